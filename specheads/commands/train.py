"""Train a head through every phase of a recipe, then evaluate it.

specheads train recipe=smollm2
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl preview=3
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl dry_run=true
"""

from collections.abc import Sequence

from specheads.config import Train


def run(settings: Train, _: Sequence[str]) -> None:
    """Run the recipe; an unfinished run of the same name goes on where it stopped."""
    if settings.dry_run:
        from specheads.commands import _plan

        _plan.show(settings)
        return
    if settings.preview:
        from specheads.commands import _preview

        _preview.show(settings)
        return
    # late: settings that are refused need not wait for torch
    from accelerate import PartialState
    from rich.console import Console

    from specheads.commands import _library
    from specheads.measure import report
    from specheads.measure.results import Results, read

    run = _library.train(settings=settings, announce=Console(markup=False).print)
    results = read(Results, run.report / "results.json")
    if settings.evaluate_after and results and PartialState().is_main_process:
        report.show(results, page=run.report / "report.html")
