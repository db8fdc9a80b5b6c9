"""Measure a head: offline replay, online decoding, speed beside the base alone, and a report.

specheads evaluate run=runs/smollm2
specheads evaluate run=runs/smollm2 tree=best_first max_new_tokens=256 out=again
specheads evaluate head=HEAD base=MODEL prompts=prompts.jsonl out=measured
"""

from collections.abc import Sequence
from pathlib import Path

from specheads.commands import _library
from specheads.config import Evaluate
from specheads.core.errors import InputError
from specheads.measure import report
from specheads.runs.directory import RunDirectory


def run(settings: Evaluate, overrides: Sequence[str]) -> None:
    """Evaluate a run, or any head on the base it was made for."""
    if settings.head_path and not settings.run and not settings.out:
        raise InputError("a head without a run needs out=FOLDER for its report")
    if settings.record:
        report.record_folder(Path(settings.record))
    results = _library.evaluate(settings=settings, overrides=overrides)
    folder = Path(settings.out) if settings.out else RunDirectory(Path(settings.run)).report
    report.show(results, page=folder / "report.html")
    if settings.record:
        report.record(Path(settings.record), results)
