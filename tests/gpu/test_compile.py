"""Compiled verification gives the tokens of eager verification; on CUDA these are CUDA graphs."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch

from specheads.base.cache import KVCache
from specheads.base.forward import answer
from specheads.base.model import FrozenBase
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.measure.oracle import Oracle
from tests import tiny

pytestmark = pytest.mark.gpu

TREE = policies.Static([(0,), (1,), (0, 0), (0, 1)])


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    # the compiler cannot trace the type checks of the tests
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


def compiled_base(
    architecture: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> FrozenBase:
    """Return a base whose graphs have fixed shapes, as CUDA graphs have.

    A CPU has no CUDA graphs: there the graphs run as plain torch code over a static cache.
    """
    dtype = torch.float32
    if device.type == "cuda":
        return tiny.own_base(architecture, dtype=dtype, device=device, compile=True)
    base = tiny.own_base(architecture, dtype=dtype, device=device)
    graphs = torch.compile(answer, backend="eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(base, "_run", graphs)
    monkeypatch.setattr(
        base,
        "cache",
        lambda batch, capacity: KVCache(base.num_layers, batch, capacity, device, static=True),
    )
    return base


def drafter(base: FrozenBase, prompts: list[list[int]], length: int) -> Oracle:
    said = generate(base, None, prompts, max_new_tokens=length).tokens
    texts = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
    return Oracle(texts, 2, base.vocab_size, rate=0.6, device=base.device)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "granite"])
def test_compiled_graphs_give_the_text_of_eager_code(
    architecture: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny.base(architecture, dtype=torch.float32, device=device)
    base = compiled_base(architecture, device, monkeypatch)
    prompts = tiny.prompts()[:1]
    for length in (24, 60):
        settings = {"max_new_tokens": length, "tree": TREE}
        found = generate(base, drafter(plain, prompts, length), prompts, **settings)
        assert found == generate(plain, drafter(plain, prompts, length), prompts, **settings)


def test_compiled_graphs_follow_rows_that_leave(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny.base("llama", dtype=torch.float32, device=device)
    base = compiled_base("llama", device, monkeypatch)
    prompts, settings = tiny.prompts(), {"max_new_tokens": 30, "tree": TREE}
    found = generate(base, drafter(plain, prompts, 30), prompts, **settings)
    assert found == generate(plain, drafter(plain, prompts, 30), prompts, **settings)
