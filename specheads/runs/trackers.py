"""Where numbers go: metrics.jsonl always, an experiment tracker when one is chosen."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from specheads.core.errors import InputError
from specheads.core.files import naming_full_disk, refuse_outside, write_atomic


def refuse_missing(kind: str) -> None:
    """Refuse a tracker whose package is not installed."""
    if kind != "jsonl" and LoggerType(kind) not in get_available_trackers():
        raise InputError(
            f"tracker.kind={kind} needs the package {kind}, and it is not installed; pip install "
            f"{kind}, or set tracker.kind=jsonl"
        )


class Tracker:
    """Writes each row to `metrics` and, when chosen, to one of accelerate's trackers.

    `project` and `name` are those at the tracker. What a tracker raises never stops anything: it
    is told in one line, and from then on the rows go to `metrics` only.
    """

    def __init__(
        self,
        metrics: Path,
        *,
        kind: str,
        project: str,
        name: str,
        tell: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.metrics, self.kind, self.project, self.name = metrics, kind, project, name
        self.tell = tell
        self.other: GeneralTracker | None = None
        """accelerate's, while it is there."""

    def resume(self, step: int) -> None:
        """Drop the rows of steps after this one, from which training goes on and writes anew.

        A tracker begins here, too.
        """
        kept = [row for row in read_metrics(self.metrics) if row["step"] <= step]
        write_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        if self.kind != "jsonl":
            self._try(lambda: self._begin(step))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row; it holds at least `step`."""
        with (
            naming_full_disk(self.metrics),
            self.metrics.open("a", encoding="utf-8") as stream,
        ):
            stream.write(json.dumps(row) + "\n")
        if (other := self.other) is not None:
            # a text for each row would be all that TensorBoard's page of texts shows
            texts = self.kind != "tensorboard"
            told = {name: one for name, one in row.items() if texts or not isinstance(one, str)}
            self._try(lambda: other.log(told, step=row["step"]))

    def close(self) -> None:
        """Tell the tracker that the run is over."""
        if (other := self.other) is not None:
            self._try(other.finish)

    def _begin(self, step: int) -> None:
        self.other = self._made(step)
        self.other.start()

    def _made(self, step: int) -> GeneralTracker:
        make, folder = LOGGER_TYPE_TO_CLASS[self.kind], self.metrics.parent
        if self.kind == "tensorboard":
            return make("tensorboard", folder, purge_step=step + 1)
        chosen: dict[str, Any] = {"name": self.name, "resume": "allow"}
        if self.kind == "wandb":
            import wandb

            # without a key wandb would stop and ask for one: offline keeps the numbers for later
            has_key = bool(os.environ.get("WANDB_API_KEY")) or wandb.api.api_key is not None
            mode = None if has_key else "offline"
            chosen |= {"id": self.name, "dir": str(folder), "mode": mode}
            # what waits for a network that is gone would keep a finished run from ending
            os.environ.setdefault("WANDB_FINISH_TIMEOUT", "600")
            os.environ.setdefault("WANDB_FINISH_TIMEOUT_RAISES", "true")
        return make(self.project, **chosen)

    def _try(self, act: Callable[[], object]) -> None:
        """Act on the tracker; let go of one that fails."""
        try:
            act()
        # other people's code, which talks to other machines: it may raise whatever there is
        except Exception as error:
            self.other = None
            why = shorten(f"{type(error).__name__}: {error}", 200)
            self.tell(f"{self.kind} is lost ({why}); {self.metrics} goes on")


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
