r"""Plan a training's hours, train it, and show both.

    python scripts/check_hours.py recipe=tiny_code ~schedule.phases.distilled \
        schedule.phases.corpus.steps=600

Text that the base writes is planned without drafts: compare with `distill.use_head=false`.
Evaluation is left out. Both are wall time of this machine, so nothing else should run on it.
"""

import sys
import tempfile
import time
from dataclasses import replace

from specheads.commands import _compose, _library
from specheads.training.plan.whole import plan
from specheads.training.processes import accelerator_of_environment


def main() -> None:
    """Print planned and measured minutes, and by how much they differ."""
    settings = _compose.settings_of("train", [*sys.argv[1:], "evaluate_after=false"])
    found = plan(settings, accelerator_of_environment(settings.base.dtype))
    if found.hours is None:
        sys.exit("; ".join(found.notes))
    planned = 60 * found.hours
    for one in found.phases:
        hours = (one.hours or 0.0, one.writing_hours or 0.0)
        print(f"{one.name}: {60 * hours[0]:.2f} minutes, and {60 * hours[1]:.2f} of writing")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        _library.train(settings=replace(settings, run_dir=f"{folder}/run"))
        measured = (time.perf_counter() - began) / 60
    print(f"planned {planned:.2f} minutes, took {measured:.2f}: {planned / measured - 1:+.1%}")


if __name__ == "__main__":
    main()
