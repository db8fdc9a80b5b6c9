"""Measure a head: offline replay, online decoding, speed compared with the base alone, a report.

specheads evaluate run=runs/smollm2
specheads evaluate run=runs/smollm2 tree=best_first max_new_tokens=256 out=again
specheads evaluate head=HEAD base=MODEL prompts=prompts.jsonl out=measured
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.commands._library import (
    Prompts,
    load_base,
    objects,
    own,
    prompt_set,
    settings_for,
)
from specheads.config import Evaluate, Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.paths import writable_folder
from specheads.data.prompts import PromptSet
from specheads.export import card
from specheads.measure import report
from specheads.measure.evaluation import evaluate_head, evaluate_run
from specheads.measure.results import Results
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics


def run(settings: Evaluate, overrides: Sequence[str]) -> None:
    """Evaluate a run, or any head on its base."""
    if settings.head_path and not settings.run and not settings.out:
        raise InputError("a head without a run needs out=FOLDER for its report")
    if settings.record:
        report.record_folder(Path(settings.record))
    results = evaluate(settings=settings, overrides=overrides)
    folder = Path(settings.out) if settings.out else RunDirectory(Path(settings.run)).report
    report.show(results, page=folder / "report.html")
    if settings.record:
        report.record(Path(settings.record), results)


def evaluate(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Evaluate | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
    prompts: Prompts = None,
    out: str | Path = "",
) -> Results:
    """Measure the head of a run, or any head on its base.

    Args:
        run: Directory of the run.
        overrides: As on the command line: `["tree=chain", "num_prompts=8"]`.
        settings: Typed settings. For a run only the tree and what `overrides` names count.
        base: The loaded base, in place of the one in the settings.
        head: A loaded head; it is bound to the base.
        prompts: Token ids, a name or a .jsonl file.
        out: Folder of the report. Without it the report and the card of the run are replaced.
    """
    settings, words = settings_for(Evaluate, settings, overrides, head, run=run, out=out)
    if settings.out:
        writable_folder(settings.out)
    if settings.run:
        made, trained = own(settings, words)
        given = prompt_set(prompts, trained)
        base = base or load_base(trained)
        return measure_run(made, trained, base, settings.out, given, force=settings.force)
    base, head = objects(settings, base, head, "evaluate")
    results = evaluate_head(base, head, settings, prompt_set(prompts, settings))
    if settings.out:
        report.write_report(Path(settings.out), results, [])
    return results


def measure_run(
    run: RunDirectory,
    settings: Train,
    base: FrozenBase,
    out: str = "",
    prompts: PromptSet | None = None,
    *,
    force: bool = False,
) -> Results:
    """Evaluate a run and write its report, and its card unless `out` names another folder."""
    results, head = evaluate_run(run, settings, base, prompts, force=force)
    report.write_report(Path(out) if out else run.report, results, read_metrics(run.metrics))
    if not out:
        card.write_card(run, asdict(settings), head, base)
    return results
