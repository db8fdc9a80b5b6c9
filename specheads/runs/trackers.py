"""Metrics: metrics.jsonl, and an experiment tracker if one is chosen."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from specheads.config.shared import TrackerSettings
from specheads.core.errors import InputError
from specheads.core.files import naming_full_disk, refuse_outside, write_atomic


def refuse_missing(kind: str) -> None:
    """Refuse a tracker whose package is not installed."""
    if kind != "jsonl" and LoggerType(kind) not in get_available_trackers():
        raise InputError(
            f"tracker.kind={kind} needs a package; pip install {kind}, or set tracker.kind=jsonl"
        )


class Tracker:
    """Writes each row to `metrics`, and to one of accelerate's trackers if one is chosen.

    An error of that tracker is logged in one line, and from then on rows go to `metrics` only.
    """

    def __init__(
        self,
        metrics: Path,
        settings: TrackerSettings,
        name: str = "",
        run_id: str = "",
        announce: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.metrics, self.kind, self.project = metrics, settings.kind, settings.project
        # two runs may have one name; an older run has no id
        self.name, self.run_id = name, run_id or name
        self._announce = announce
        self.tracker: GeneralTracker | None = None
        """The tracker of accelerate; None without a tracker, or after an error."""

    def resume(self, step: int) -> None:
        """Drop the rows after this step, from which training resumes, and start the tracker."""
        rows = [row for row in read_metrics(self.metrics) if row["step"] <= step]
        write_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))
        if self.kind != "jsonl":
            self._call_tracker(lambda: self._start(step))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row; `step` is required."""
        with naming_full_disk(self.metrics), self.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        if (tracker := self.tracker) is not None:
            values = {name: value for name, value in row.items() if not isinstance(value, str)}
            self._call_tracker(lambda: tracker.log(values, step=row["step"]))

    def close(self) -> None:
        """Close the tracker."""
        if (tracker := self.tracker) is not None:
            self._call_tracker(tracker.finish)

    def _start(self, step: int) -> None:
        project, folder = self.project, str(self.metrics.parent)
        options: dict[str, Any] = {"name": f"{self.name}-{self.run_id}", "resume": "allow"}
        if self.kind == "tensorboard":
            project, options = "tensorboard", {"logging_dir": folder, "purge_step": step + 1}
        if self.kind == "wandb":
            import wandb

            # without a key wandb would ask for one: offline keeps the numbers for later
            mode = None if wandb.api.api_key else "offline"
            options |= {"id": self.run_id, "name": self.name, "dir": folder, "mode": mode}
        tracker = LOGGER_TYPE_TO_CLASS[self.kind](project, **options)
        self.tracker = tracker
        tracker.start()

    def _call_tracker(self, call: Callable[[], object]) -> None:
        """Call the tracker; drop it if it fails."""
        try:
            call()
        # the tracker's code uses the network and can raise any error
        except Exception as error:
            self.tracker = None
            reason = shorten(f"{type(error).__name__}: {error}", 200)
            self._announce(f"{self.kind} failed ({reason}); rows go to {self.metrics} only")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a last line that a crash cut short."""
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
        # the last line has no line end: it is empty or incomplete
        elif number < len(lines):
            raise InputError(f"line {number} of {path} must be an object with a step; remove it")
    return rows
