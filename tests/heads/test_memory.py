"""Memories of drafters: rows that are kept, removed and joined draft as if alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.core.drafter import Drafter, Memory
from specheads.core.features import Committed
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.heads.layers.attention import HeadCache
from specheads.training.memory import PeakMemory
from tests import tiny
from tests.heads.test_heads import CASES, make, told
from tests.oracle import Oracle

LENGTHS = torch.tensor([5, 9, 3, 7])
"""Positions that each row has committed before the rows move."""


def eagle3() -> Drafter:
    return make({"kind": "eagle3"}, tiny.base())


BASELINES: dict[str, Callable[[], Drafter]] = {
    "draft model": lambda: DraftModel(tiny.base("gpt2"), 3, tiny.base()),
    "streaming": lambda: Streaming(tiny.base(), 3, sinks=2, window=6),
    # one text, since each row that begins is given the next
    "oracle": lambda: Oracle(tiny.continuations()[:1], 3, tiny.VOCAB),
}


def drafted(drafter: Drafter, committed: Committed, memory: Any) -> Tensor:
    """Return the drafts after the root and after one node."""
    first, state = drafter.begin(committed, memory)
    node = torch.full((len(first), 1), 7)
    return torch.cat([first, drafter.extend(state, node, torch.zeros_like(node))[0]], dim=1)


def check_memory(drafter: Drafter) -> None:
    """Remove, reorder and join rows; each must draft what it drafts alone."""
    tokens = torch.randint(8, (4, 14), generator=torch.manual_seed(0))
    features = tiny.base().read(tokens, drafter.aux_layers)

    def committed(rows: list[int], *, fresh: bool) -> Committed:
        index = torch.tensor(rows)
        starts = 0 * LENGTHS[index] if fresh else LENGTHS[index]
        counts = LENGTHS[index] if fresh else 1 + index % 3
        positions = starts[:, None] + torch.arange(int(counts.max()))
        following = tokens[index].gather(1, positions + 1)
        return Committed(features.select(index).gather(positions), following, counts)

    def draft(rows: list[int], memory: Any, *, fresh: bool) -> Tensor:
        return drafted(drafter, committed(rows, fresh=fresh), memory)

    def remember(rows: list[int], *, drafts: bool = True) -> Any:
        memory = drafter.memory(len(rows), 64)
        assert isinstance(memory, Memory)
        if drafts:
            draft(rows, memory, fresh=True)
        else:
            drafter.store_committed(committed(rows, fresh=True), memory)
        return memory

    memory = remember([0, 1, 2]).keep(torch.tensor([2, 0])).join(remember([3]))
    rows = [3, 2, 0]
    together = draft(rows, memory.keep(torch.tensor([2, 0, 1])), fresh=False)
    for index, row in enumerate(rows):
        # a step without a draft stores the same
        alone = draft([row], remember([row], drafts=False), fresh=False)
        torch.testing.assert_close(together[index], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", CASES, ids=told)
def test_rows_of_a_head_are_kept_removed_and_joined(settings: dict):
    head = make(settings, tiny.base())
    if head.memory(1, 64) is not None:
        check_memory(head)


@pytest.mark.parametrize("settings", CASES, ids=told)
def test_scattered_rows_of_a_head_draft_like_separate_rows(settings: dict):
    head = make(settings, tiny.base())
    separate_cache, cache = head.memory(2, 32), head.memory(1, 64)
    if separate_cache is None or cache is None:
        return
    tokens = torch.randint(tiny.VOCAB, (2, 13), generator=torch.manual_seed(3))
    features = tiny.base().read(tokens, head.aux_layers)
    slots = torch.randperm(64, generator=torch.manual_seed(4)).view(2, 32)
    lengths = torch.zeros(2, dtype=torch.long)
    for counts in (torch.tensor([5, 2]), torch.tensor([1, 4])):
        at = lengths[:, None] + torch.arange(int(counts.max()))
        committed = Committed(features.gather(at), tokens.gather(1, at + 1), counts)
        reference = drafted(head, committed, separate_cache)
        result = drafted(head, committed, cache.scatter(slots, lengths))
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-12)
        lengths = lengths + counts


@pytest.mark.parametrize("name", BASELINES)
def test_rows_of_a_baseline_are_kept_removed_and_joined(name: str):
    check_memory(BASELINES[name]())


WRONG = {
    "join": lambda cache, _: cache,
    "keep": lambda cache, rows: HeadCache(
        cache.kv_cache[: len(rows)],
        cache.lengths[: len(rows)],
        cache.extent,
        cache.dropped[: len(rows)],
    ),
}
"""Memories that pass for one, and whose rows silently stay what they were."""


@pytest.mark.parametrize("method", WRONG)
def test_the_check_detects_a_memory_that_ignores_its_rows(method: str, monkeypatch):
    monkeypatch.setattr(HeadCache, method, WRONG[method])
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_memory(eagle3())


def test_keys_and_values_are_not_copied():
    head = make({"kind": "eagle3", "attention_heads": 4, "key_value_heads": 2}, tiny.base())
    tokens = torch.randint(8, (3, 512))
    features = tiny.base().read(tokens, head.aux_layers)
    memory: Any = head.memory(3, capacity=512)
    committed = Committed(features, tokens, torch.full((3,), 512))
    _, state = head.begin(committed, memory)
    node = torch.zeros(3, 1, dtype=torch.long)
    with PeakMemory() as memory_of_step:
        head.extend(state, node, node)
    # a level allocates scores and weights, and no copy of keys and values
    assert memory_of_step.peak < memory.kv_cache.nbytes / 2
