"""Where numbers go: metrics.jsonl always, an experiment tracker when one is chosen."""

import json
import os
from pathlib import Path
from typing import Any

import wandb

from specheads.core.errors import InputError
from specheads.core.files import naming_full_disk, write_atomic
from specheads.heads.untrusted import refuse_outside


class Tracker:
    """Writes each row to `metrics` and, when chosen, to wandb.

    `project` and `name` are those at wandb.
    """

    def __init__(self, metrics: Path, *, kind: str, project: str, name: str) -> None:
        self.metrics = metrics
        self.run: Any = None
        if kind == "wandb":
            # without a key wandb would stop and ask for one: offline keeps the numbers for later
            has_key = bool(os.environ.get("WANDB_API_KEY")) or wandb.api.api_key is not None
            mode, folder = None if has_key else "offline", metrics.parent
            self.run = wandb.init(
                project=project, name=name, id=name, resume="allow", dir=folder, mode=mode
            )

    def resume(self, step: int) -> None:
        """Drop the rows of steps after this one, from which training goes on and writes anew."""
        kept = [row for row in read_metrics(self.metrics) if row["step"] <= step]
        write_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row; it holds at least `step`."""
        with (
            naming_full_disk(self.metrics),
            self.metrics.open("a", encoding="utf-8") as stream,
        ):
            stream.write(json.dumps(row) + "\n")
        if self.run is not None:
            self.run.log(row, step=row["step"])

    def close(self) -> None:
        """Tell wandb that the run is over."""
        if self.run is not None:
            self.run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, leaving out a last one cut short by a crash.

    Raises:
        ValueError: The file lies elsewhere, or a line before the last is no row.
    """
    if not path.is_file():
        return []
    refuse_outside(path)
    rows, lines = [], path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        # the last one has no end of line: it is empty, or half a row
        elif number < len(lines):
            raise InputError(
                f"each line of {path} must be an object with a step, and line {number} is none; "
                "take it out"
            )
    return rows
