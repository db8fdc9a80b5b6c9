"""A step synchronises with the device once, to read the accepted tokens."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache
from specheads.core.drafter import Drafter
from specheads.decoding import loop
from specheads.decoding.accept import RULES, acceptance_rule
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.policies import Product, Sampled
from specheads.heads.load import Head, build_for_base, kinds
from tests import tiny
from tests.meta import META, Waits

PATHS = [(0,), (1,), (0, 0), (0, 1)]
POLICIES = {
    "chain": policies.chain(3),
    "static": policies.Static(PATHS),
    "best_first": policies.BestFirst(6, 3),
    "beam": policies.Beam(3, 3),
    "product": Product((2, 2), 6),
    "sampled": Sampled((2, 2)),
}
LAWS = {
    "greedy": [Sampling(), Sampling()],
    "sampled": [Sampling(temperature=0.8, top_k=5), Sampling(temperature=1.0, top_p=0.9)],
    "penalised": [Sampling(repetition_penalty=1.2), Sampling(temperature=0.7, min_p=0.1)],
}


def uploaded(values: list[Any], device: torch.device) -> Tensor:
    return torch.empty(torch.tensor(values).shape, dtype=torch.long, device=device)


def verdict_of_nobody(tree: Any, verdict: Any) -> list[list[int]]:
    """Stand for the one time a step asks: a row keeps its root, the other one node more."""
    del verdict
    num_nodes = tree.tokens.shape[1]
    last = [0] if num_nodes == 1 else [0, num_nodes - 1]
    nodes, parents = [5] * num_nodes, [-1] * num_nodes
    return [[1, 5, *nodes, *parents, 0], [len(last), 5, *nodes, *parents, *last]]


@pytest.fixture(scope="module")
def meta() -> FrozenBase:
    model = copy.deepcopy(tiny.base("llama", dtype=torch.float32).model)
    torch.nn.Module.to(model, META)
    # not tried first: there is nothing to compare
    return FrozenBase(model, prepare=False)


@pytest.fixture
def base(meta: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> FrozenBase:
    for name, module in list(sys.modules.items()):
        if name.startswith("specheads.") and hasattr(module, "upload"):
            monkeypatch.setattr(module, "upload", uploaded)
    monkeypatch.setattr(loop, "copy_to_host", verdict_of_nobody)
    # prompts are read once, and may wait
    monkeypatch.setattr(Tensor, "tolist", lambda values: [1] * len(values))
    return meta


def waits(
    base: FrozenBase, drafter: Drafter | None, policy: policies.TreePolicy, **settings: Any
) -> dict[str, int]:
    """Return the copies from the host in a step, after a first step that may prepare itself."""
    sampling = LAWS[settings.get("law", "greedy")]
    acceptance = acceptance_rule(settings.get("acceptance", "match"))
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    state, _ = loop.start(base, drafter, prompts, 64, sampling, settings.get("cache"))
    loop.step(base, drafter, policy, acceptance, state)
    with Waits() as waits:
        loop.step(base, drafter, policy, acceptance, state)
    return waits.found


def head_on(base: FrozenBase, kind: str = "medusa") -> Head:
    head = build_for_base({"kind": kind, "depth": 3}, tiny.base("llama", dtype=torch.float32))
    head.to(META)
    head.bind(base.embedding, base.projection.weight)
    return head.eval()


@pytest.mark.parametrize("tree", POLICIES)
def test_no_tree_waits(base: FrozenBase, tree: str) -> None:
    assert waits(base, head_on(base, "mlp_speculator"), POLICIES[tree]) == {}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("acceptance", RULES)
def test_no_rule_and_no_law_waits(base: FrozenBase, acceptance: str, law: str) -> None:
    head = head_on(base, "mlp_speculator")
    assert waits(base, head, POLICIES["sampled"], acceptance=acceptance, law=law) == {}


@pytest.mark.parametrize("kind", kinds())
def test_no_head_waits(base: FrozenBase, kind: str) -> None:
    assert waits(base, head_on(base, kind), POLICIES["static"]) == {}


def test_neither_the_base_alone_nor_copies_nor_a_paged_cache_waits(base: FrozenBase) -> None:
    cache = PagedKVCache(BlockPool(base.num_layers, 20, 16, META), 2)
    assert waits(base, None, policies.NOTHING) == {}
    assert waits(base, head_on(base), HybridTree(policies.chain(3), 4, trim=False)) == {}
    assert waits(base, head_on(base), POLICIES["static"], cache=cache) == {}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("law", LAWS)
def test_rows_that_leave_or_join_do_not_wait(
    base: FrozenBase, law: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BlockPool(base.num_layers, 40, 16, META)
    state, joining = (
        loop.start(base, None, prompts, 64, LAWS[law], PagedKVCache(pool, 2) if paged else None)[0]
        for prompts in ([[1, 2, 3], [4, 5, 6, 7]], [[1, 2], [3, 4, 5]])
    )
    build_tensor = torch.tensor

    def on_the_host(values: Any, **settings: Any) -> Tensor:
        assert "device" not in settings, "a copy from memory that is not pinned waits"
        return build_tensor(values, **settings)

    monkeypatch.setattr(torch, "tensor", on_the_host)
    with Waits() as waits:
        state.join(joining)
        state.keep([0, 3, 2])
    assert waits.found == {}


def test_a_wait_would_be_seen(base: FrozenBase) -> None:
    class Host(policies.Static):
        def shape(self, device: torch.device) -> Any:
            self._shapes.clear()
            return super().shape(device)

    assert waits(base, head_on(base), Host(PATHS)) != {}
    with pytest.raises(RuntimeError, match="meta"):
        waits(base, head_on(base), policies.chain(2, confidence=0.5))
