"""Compiled base and head train as without compilation."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from specheads.training.processes import load_base
from tests import tiny
from tests.training.in_processes import folder_of_base, forked
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


def test_base_is_compiled_when_accelerate_compiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    torch._dynamo.utils.counters.clear()
    base = load_base({"model": folder_of_base(), "dtype": "float64"}, Accelerator(cpu=True))
    tokens = torch.arange(40).reshape(2, 20) % tiny.VOCAB
    found, wanted = (one.read(tokens, (1, 2)) for one in (base, tiny.base("llama")))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch.testing.assert_close(found.hidden, wanted.hidden, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.aux, wanted.aux, rtol=0, atol=1e-9)
