"""Where numbers go: metrics.jsonl always, an experiment tracker when one is chosen."""

import json
import os
from pathlib import Path
from typing import Any

import wandb


class Tracker:
    """Writes each row to `metrics` and, when chosen, to wandb.

    Rows of steps after `resumed_step`, where training goes on from, are dropped: a resumed run
    writes them again. `project` and `name` are those at wandb.
    """

    def __init__(
        self, metrics: Path, *, kind: str, project: str, name: str, resumed_step: int = 0
    ) -> None:
        self.metrics = metrics
        kept = [row for row in read_metrics(metrics) if row["step"] <= resumed_step]
        metrics.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self.run: Any = None
        if kind == "wandb":
            # without a key wandb would stop and ask for one: offline keeps the numbers for later
            has_key = bool(os.environ.get("WANDB_API_KEY")) or wandb.api.api_key is not None
            mode, folder = None if has_key else "offline", metrics.parent
            self.run = wandb.init(
                project=project, name=name, id=name, resume="allow", dir=folder, mode=mode
            )

    def log(self, row: dict[str, Any]) -> None:
        """Write one row; it holds at least `step`."""
        with self.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        if self.run is not None:
            self.run.log(row, step=row["step"])

    def close(self) -> None:
        """Tell wandb that the run is over."""
        if self.run is not None:
            self.run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, leaving out a last one cut short by a crash."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
