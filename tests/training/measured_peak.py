"""Script: print the planned or the measured peak of a training."""

import json
import sys
import tempfile
from pathlib import Path

from specheads.commands._dry_run import setup_of
from specheads.commands.train import train
from specheads.config import compose
from specheads.config.commands import Train
from specheads.training.plan import plan
from specheads.training.processes import accelerator_of_environment

SHORT = ("evaluate_after=false", "validation.rows=0")


def planned(settings: Train) -> int:
    """Return the planned peak in bytes."""
    accelerator = accelerator_of_environment(settings.base.dtype)
    return plan(setup_of(settings), accelerator)["peak_bytes"]


def measured(settings: Train) -> int:
    """Train, and return the peak resident memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        settings.run_dir = f"{folder}/run"
        train(settings=settings)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    what, *overrides = sys.argv[1:]
    settings = compose.settings_of("train", [*overrides, *SHORT])
    found = {"planned": planned, "measured": measured}[what](settings)
    sys.stdout.write(f"{json.dumps(found)}\n")
