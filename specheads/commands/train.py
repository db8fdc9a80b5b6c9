"""Train a head through every phase of a recipe, then evaluate it.

specheads train recipe=smollm2
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl preview=3
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl dry_run=true
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from accelerate import PartialState
from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands import _dry_run
from specheads.commands._library import settings_for
from specheads.commands.evaluate import measure_run, usable_prompts
from specheads.config import Train, compose
from specheads.core.files import dumps, write_atomic
from specheads.decoding.trees.tuned import FILE
from specheads.export import card
from specheads.measure import report
from specheads.measure.quality import quality_windows
from specheads.measure.results import Results, read
from specheads.runs.directory import RunDirectory
from specheads.training import run as training
from specheads.training.plan.batch import settle_batches, unsettled
from specheads.training.processes import accelerator_of_environment


def run(settings: Train, _: Sequence[str]) -> None:
    """Train a recipe; an unfinished run of the same name resumes."""
    if settings.dry_run:
        _dry_run.show_plan(settings)
        return
    if settings.preview:
        _dry_run.show_examples(settings)
        return
    made = train(settings=settings, announce=Console(markup=False).print)
    results = read(Results, made.report / "results.json")
    if settings.evaluate_after and results and PartialState().is_main_process:
        report.show(results, page=made.report / "report.html")


def train(
    recipe: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: Train | None = None,
    base: FrozenBase | None = None,
    announce: training.Announce = training.quiet,
) -> RunDirectory:
    """Train a head through every phase of a recipe, evaluate it, and return the run.

    Args:
        recipe: Name of the recipe.
        overrides: As on the command line: `["name=mine", "head=medusa"]`.
        settings: Typed settings, in place of recipe and overrides.
        base: The loaded base, in place of the one in the settings.
        announce: Called with lines for people.
    """
    words = [f"recipe={recipe}", *overrides] if recipe else list(overrides)
    settings, _ = settings_for(Train, settings, words)
    if unsettled(settings):
        accelerator = accelerator_of_environment(settings.base.dtype)
        base = settle_batches(settings, accelerator, announce, base)
    refuse = partial(_refuse_evaluation, settings)
    made = training.run(settings, compose.as_yaml(settings), base, announce, refuse)
    if made.is_main:
        card.write_card(made.run, asdict(settings), made.head, made.base)
        announce(f"head: {made.run.head}")
        if made.run.adapter.is_dir():
            announce(f"adapter of the base: {made.run.adapter}")
        if settings.evaluate_after and made.base.sharding:
            announce(
                "a sharded base cannot decode in one process: measure with specheads evaluate "
                f"run={made.run.path}"
            )
        elif settings.evaluate_after:
            results = measure_run(made.run, settings, made.base)
            # keep the tree that was chosen for greedy decoding, as specheads tune does
            if results.tuned and settings.evaluation.temperature == 0:
                write_atomic(made.run.head / FILE, dumps(results.tuned))
    return made.run


def _refuse_evaluation(settings: Train, base: FrozenBase, head_depth: int) -> None:
    """Raise if the evaluation after training would fail."""
    if settings.evaluate_after:
        usable_prompts(base, head_depth, settings)
        if any(phase.joint for phase in settings.schedule.phases.values()):
            quality_windows(base, settings.data, settings.seed)
