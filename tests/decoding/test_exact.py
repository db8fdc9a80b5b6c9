"""Tree decoding gives, token for token, the text that the base alone decodes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import specheads.base.forward
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.trees.policies import TreePolicy
from tests import tiny
from tests.oracle import TextPositions


class RandomTrees(TreePolicy):
    """Another random tree for every row and step, about half its tokens right.

    Parents are uniform over the nodes before, so the nodes of the accepted path are
    mixed with siblings, cousins and dead branches.
    """

    def __init__(self, num_nodes: int = 14, share_right: float = 0.6) -> None:
        self.name, self.num_nodes, self.depth = "random", num_nodes, num_nodes - 1
        self.share_right = share_right
        self.generator = torch.Generator().manual_seed(3)

    def grow(self, drafter: Any, committed: Committed, memory: Any, rows: Any = None) -> TokenTree:
        assert isinstance(drafter, tiny.Oracle)
        assert isinstance(memory, TextPositions)
        drafter.begin(committed, memory)
        rows_of = (committed.root()[:, 0].tolist(), memory.texts.tolist(), memory.roots.tolist())
        trees = [
            self._row(root, drafter.guesses[text, place:].tolist())
            for root, text, place in zip(*rows_of, strict=True)
        ]
        drafted, parents = zip(*trees, strict=True)
        return TokenTree(torch.tensor(drafted), torch.tensor(parents))

    def _row(self, root: int, said: list[int]) -> tuple[list[int], list[int]]:
        tokens, parents, depths = [root], [-1], [0]
        taken: set[tuple[int, int]] = set()
        while len(tokens) < self.num_nodes:
            parent = self._below(len(tokens))
            right = self._below(1000) < 1000 * self.share_right
            token = said[depths[parent] + 1] if right else self._below(tiny.VOCAB)
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return tokens, parents

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=self.generator))


def decode(architecture: str, attention: str, dtype: torch.dtype = torch.float64) -> Decoding:
    policy = RandomTrees()
    return generate(
        tiny.base(architecture, attention, dtype),
        tiny.oracle(policy.depth, architecture),
        tiny.prompts(),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=policy,
    )


def change_mask(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, int | None], tuple]
) -> None:
    """Let `change` replace the ancestors and the window that the mask is built from."""
    # made before: a base that is loaded with a wrong mask is refused by its self check
    for architecture in tiny.ARCHITECTURES:
        tiny.base(architecture)
    true_mask = specheads.base.forward.tree_mask

    def wrong_mask(ancestors, depths, cache, window, dtype):
        ancestors, window = change(ancestors, window)
        return true_mask(ancestors, depths, cache, window, dtype)

    monkeypatch.setattr(specheads.base.forward, "tree_mask", wrong_mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_random_trees_on_ragged_rows_decode_the_base_s_text(architecture, attention):
    out = decode(architecture, attention)
    assert out.tokens == tiny.continuations(architecture)
    # the check is empty unless branching trees are accepted beyond their roots
    assert all(forwards < 0.7 * tiny.NEW_TOKENS for forwards in out.forwards)
    paths = [step.path for row in out.steps for step in row]
    assert any(path != list(range(len(path))) for path in paths)


def test_random_trees_are_exact_in_float32_too():
    assert decode("llama", "sdpa", torch.float32).tokens == tiny.continuations("llama")


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_causal_mask_in_place_of_the_tree_mask_is_caught(architecture, monkeypatch):
    # made before the change, for a base asks itself about masks
    for attention in ("sdpa", "eager"):
        tiny.base(architecture, attention, torch.float64)
    change_mask(monkeypatch, lambda ancestors, window: (torch.ones_like(ancestors).tril(), window))
    assert decode(architecture, "sdpa").tokens != tiny.continuations(architecture)


@pytest.mark.parametrize("architecture", tiny.WINDOWED)
def test_forgetting_the_sliding_window_is_caught(architecture, monkeypatch):
    change_mask(monkeypatch, lambda ancestors, _: (ancestors, None))
    assert decode(architecture, "sdpa").tokens != tiny.continuations(architecture)


FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in tiny.FURTHER]


@pytest.mark.parametrize("architecture", [*tiny.ARCHITECTURES, *FURTHER])
def test_the_reference_is_varied_and_never_close_to_a_tie(architecture):
    """A base that repeats itself would forgive wrong masks, and a tie would fail right ones."""
    model = tiny.base(architecture, "eager").model
    for prompt, said in zip(tiny.prompts(), tiny.continuations(architecture), strict=True):
        logits = model(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3
        assert len(set(said)) > tiny.NEW_TOKENS // 3
