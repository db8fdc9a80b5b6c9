"""The planned peak of memory equals the measured peak.

As a script it prints one of both: `planned` or `measured`, and overrides.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specheads.commands.train import train
from specheads.config import compose
from specheads.heads.load import kinds
from specheads.training.plan import plan_training
from specheads.training.processes import accelerator_of_environment

STATUS = Path("/proc/self/status")
TINY = ("recipe=tiny_code", "schedule.phases.corpus.steps=4")
WRITTEN = ("schedule.phases.distilled.steps=3", "schedule.phases.distilled.distill.num_samples=80")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not STATUS.is_file(), reason="peak memory is measured on Linux only"),
]


def peak_bytes(method: str, overrides: tuple[str, ...]) -> int:
    """Return a peak from a separate process; `method` is planned or measured."""
    call = [sys.executable, "-m", "tests.training.test_peaks", method, *overrides]
    process = subprocess.run(call, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("phases", [WRITTEN, ("~schedule.phases.distilled",)], ids=["two", "one"])
@pytest.mark.parametrize("kind", kinds())
def test_planned_peak_is_within_15_percent_of_the_measured_one(kind: str, phases: tuple[str, ...]):
    overrides = (*TINY, *phases, f"head={kind}")
    assert peak_bytes("planned", overrides) == pytest.approx(
        peak_bytes("measured", overrides), rel=0.15
    )


def main(method: str, *overrides: str) -> None:
    words = [*overrides, "evaluate_after=false", "validation.rows=0"]
    settings = compose.settings_of("train", words)
    if method == "planned":
        accelerator = accelerator_of_environment(settings.base.dtype)
        peak = plan_training(settings, accelerator).peak_bytes
    else:
        with tempfile.TemporaryDirectory() as folder:
            settings.run_dir = f"{folder}/run"
            train(settings=settings)
        lines = STATUS.read_text(encoding="ascii").splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    sys.stdout.write(f"{json.dumps(peak)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
