"""Compiled base and head train as without compilation."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from accelerate.state import AcceleratorState

from tests.training.in_processes import forked
from tests.training.test_ranks import each, told

# of torch, about its own compiler
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    # the compiler does not support the type checks of tests
    jaxtyping.config.update("jaxtyping_disable", True)
    # caches of earlier tests in this process
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


def test_compiled_head_and_base_have_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = {"steps": 2, "shared_out": "none"}
    assert forked(1, each, ["mlp_speculator"], tmp_path / "plain", asked) == [0]
    # the graphs of the compiler, run as they are
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    assert forked(1, each, ["mlp_speculator"], tmp_path / "compiled", asked) == [0]
    plain, compiled = (told(tmp_path / one / "mlp_speculator") for one in ("plain", "compiled"))
    assert len(plain) == 2
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-9)
