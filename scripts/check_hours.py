"""Plan a training's hours, train it for about as many minutes as are asked for, and show both.

    python scripts/check_hours.py minutes=10 recipe=tiny_code

Steps and texts of every phase are lengthened or shortened to the minutes. Text that the base writes
is planned without drafts, so it is written without. Evaluation is left out. Both are wall time
of this machine, so nothing else should run on it.
"""

import argparse
import sys
import tempfile
import time
from contextlib import suppress

from specheads import config
from specheads.commands import _compose, _library
from specheads.core.errors import InputError
from specheads.training.plan.whole import Plan, plan
from specheads.training.processes import accelerator_of_environment

MINUTES = "minutes="


def lengthen(settings: config.Train, found: Plan, minutes: float) -> float:
    """Have phases take so many minutes together; return how many are planned for them."""
    assert found.hours is not None
    factor, planned = minutes / (60 * found.hours), 0.0
    for one in found.phases:
        phase = settings.schedule.phases[one.name]
        steps = max(1, round(factor * one.steps))
        planned += 60 * (one.hours or 0.0) * steps / one.steps
        phase.steps = steps
        if phase.distill:
            texts = max(phase.distill.batch_size, round(factor * phase.distill.num_samples))
            planned += 60 * (one.writing_hours or 0.0) * texts / phase.distill.num_samples
            phase.distill.num_samples = texts
    return planned


def main() -> None:
    """Print planned and measured minutes, and by how much they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "words", nargs="*", default=["recipe=tiny_code"], help="minutes=10; of specheads train"
    )
    words = parser.parse_args().words
    asked = [word.removeprefix(MINUTES) for word in words if word.startswith(MINUTES)]
    overrides = [word for word in words if not word.startswith(MINUTES)]
    try:
        check(overrides, positive(asked[0]) if asked else 10.0)
    except InputError as error:
        parser.error(str(error))


def positive(text: str) -> float:
    """Return the minutes that somebody wrote."""
    with suppress(ValueError):
        if 0 < (minutes := float(text)) < float("inf"):
            return minutes
    raise InputError(f"minutes must be a number above 0, got {text}; try minutes=10")


def check(overrides: list[str], minutes: float) -> None:
    """Train for about so many minutes, and print how many it took."""
    settings = _compose.settings_of("train", [*overrides, "evaluate_after=false"])
    for phase in settings.schedule.phases.values():
        if phase.distill:
            phase.distill.use_head = "false"
    found = plan(settings, accelerator_of_environment(settings.base.dtype))
    if found.hours is None:
        sys.exit("; ".join(found.notes))
    planned = lengthen(settings, found, minutes)
    print(f"planned {planned:.2f} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        settings.run_dir = f"{folder}/run"
        began = time.perf_counter()
        _library.train(settings=settings)
        measured = (time.perf_counter() - began) / 60
    print(f"took {measured:.2f} minutes: the plan is off by {planned / measured - 1:+.1%}")


if __name__ == "__main__":
    main()
