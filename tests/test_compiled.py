"""Compiled verification says what eager verification says, and is not compiled again and again."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jaxtyping
import pytest
import torch
from torch._inductor import config as inductor
from transformers import PreTrainedModel

from specheads import grow, heads
from specheads.base import FrozenBase
from specheads.cache import KVCache
from specheads.compiled import EXTENT, compiled
from specheads.decode import generate
from specheads.measure.oracle import Oracle
from tests import tiny

# of torch, about its own compiler
pytestmark = pytest.mark.filterwarnings("ignore")

TREE = grow.Static([(0,), (1,), (0, 0), (0, 1)])


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    # no compiler sees through the checks of types that tests run with
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


def copied(architecture: str, device: str = "cpu", **settings: Any) -> FrozenBase:
    """Return a base of its own: what is compiled listens to it."""
    model: torch.nn.Module = copy.deepcopy(tiny.base(architecture).model)
    return FrozenBase(cast(PreTrainedModel, model.to(device)), **settings)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def oracle(base: FrozenBase, prompts: list[list[int]], length: int) -> Oracle:
    said = generate(base, None, prompts, max_new_tokens=length).tokens
    texts = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
    return Oracle(texts, 2, base.vocab_size, rate=0.6, device=base.device)


def test_a_static_cache_makes_one_graph_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    # how CUDA compiles, without what only CUDA has: sizes are no symbols, a new one is a new graph
    plain, base = tiny.base("llama"), copied("llama")
    forward = torch.compile(base.model.forward, backend="eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(base, "_run", forward)
    monkeypatch.setattr(
        base,
        "cache",
        lambda batch, capacity: KVCache(base.num_layers, batch, capacity, static=True),
    )
    prompts, before = tiny.prompts()[:1], graphs()
    for length in (8, 40):
        drafter = oracle(plain, prompts, length)
        found = generate(base, drafter, prompts, max_new_tokens=length, tree=TREE)
        drafter = oracle(plain, prompts, length)
        assert found == generate(plain, drafter, prompts, max_new_tokens=length, tree=TREE)
    assert graphs() - before == 1


def test_a_static_cache_looks_at_whole_pieces_and_never_past_its_end() -> None:
    cache = KVCache(1, 2, EXTENT + 10, static=True)
    assert [cache.extent(length) for length in (1, EXTENT)] == [EXTENT, EXTENT]
    assert cache.extent(EXTENT + 1) == cache.capacity == 2 * EXTENT
    with pytest.raises(ValueError, match="allocate more"):
        cache.reserve(2 * EXTENT + 1)


def test_a_machine_without_a_compiler_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", ("/no/such/compiler",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    double = compiled(lambda values: (values.sin() + values).cos() * 3.25, torch.device("cpu"))
    with pytest.raises(ValueError, match="needs a working compiler") as raised:
        double(torch.ones(41))
    assert "\n" not in str(raised.value)


@functools.cache
def eagle(architecture: str) -> heads.Head:
    torch.manual_seed(0)
    base = tiny.base(architecture)
    return heads.build_for({"kind": "eagle3", "depth": 2}, base).eval().double()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama"])
def test_compiled_on_a_cpu_says_what_eager_says(architecture: str) -> None:
    plain, base = tiny.base(architecture), copied(architecture, compile=True)
    prompts, head = tiny.prompts(), eagle(architecture)
    drafters: list[tuple[Callable[[], Any], grow.Policy | None]] = [
        (lambda: None, None),
        (lambda: head, grow.chain(2)),
        (lambda: oracle(plain, prompts, 31), TREE),
    ]
    compiled_by_then = []
    for length in (24, 31):
        for drafter, tree in drafters:
            for pool in (None, base.pool(200)):
                said = generate(
                    base, drafter(), prompts, max_new_tokens=length, tree=tree, pool=pool
                )
                assert said == generate(plain, drafter(), prompts, max_new_tokens=length, tree=tree)
        compiled_by_then.append(graphs())
    # rows, nodes and slots are symbols: other lengths are nothing new
    assert compiled_by_then[0] == compiled_by_then[1] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama"])
def test_cuda_graphs_say_what_eager_says(architecture: str) -> None:
    plain, base = copied(architecture, "cuda"), copied(architecture, "cuda", compile=True)
    prompts = tiny.prompts()
    for length in (24, 300):
        drafter = oracle(plain, prompts, length)
        found = generate(base, drafter, prompts, max_new_tokens=length, tree=TREE)
        drafter = oracle(plain, prompts, length)
        assert found == generate(plain, drafter, prompts, max_new_tokens=length, tree=TREE)
