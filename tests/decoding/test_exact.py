"""Tree decoding gives, token for token, the text that the base alone decodes.

Further architectures, dense and with experts, are also trained, planned, exported and loaded.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specheads.base.forward
from specheads.base.model import FrozenBase
from specheads.config.training import Schedule
from specheads.core.tree import TokenTree
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.trees import policies
from specheads.export.write import export_head
from specheads.heads.load import build_for_base, load_head
from specheads.runs.trackers import read_metrics
from specheads.training.memory import MetaTraining, PeakMemory
from specheads.training.schedule import schedule_phases
from tests import tiny
from tests.oracle import TextPositions
from tests.slow import ATTENTIONS, SOME_KINDS, slow_except
from tests.training.test_plan import settings_of, stepping
from tests.training.test_trainer import phase, run_training


class RandomTrees(policies.TreePolicy):
    """Another random tree for every row and step, about half its tokens right.

    Parents are uniform over the nodes before, so the nodes of the accepted path are
    mixed with siblings, cousins and dead branches.
    """

    def __init__(self, num_nodes: int = 14, share_right: float = 0.6) -> None:
        self.name, self.num_nodes, self.depth = "random", num_nodes, num_nodes - 1
        self.share_right = share_right
        self.generator = torch.Generator().manual_seed(3)

    def grow(
        self, drafter: Any, committed: Any, memory: Any, sampling: Any = None, texts: Any = ()
    ) -> TokenTree:
        assert isinstance(drafter, tiny.Oracle)
        assert isinstance(memory, TextPositions)
        drafter.begin(committed, memory)
        rows_of = (committed.root()[:, 0].tolist(), memory.texts.tolist(), memory.roots.tolist())
        trees = [
            self._row(root, drafter.guesses[text, position:].tolist())
            for root, text, position in zip(*rows_of, strict=True)
        ]
        drafted, parents = zip(*trees, strict=True)
        return TokenTree(torch.tensor(drafted), torch.tensor(parents))

    def _row(self, root: int, expected: list[int]) -> tuple[list[int], list[int]]:
        tokens, parents, depths = [root], [-1], [0]
        used: set[tuple[int, int]] = set()
        while len(tokens) < self.num_nodes:
            parent = self._below(len(tokens))
            right = self._below(1000) < 1000 * self.share_right
            token = expected[depths[parent] + 1] if right else self._below(tiny.VOCAB)
            if (parent, token) not in used:
                used.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return tokens, parents

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=self.generator))


BRANCHES = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]
TREES = {
    "static": policies.Static(BRANCHES, "static"),
    "chain": policies.chain(4),
    "best_first": policies.BestFirst(12, 4),
}


def decode(
    architecture: str,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    tree: policies.TreePolicy | None = None,
) -> Decoding:
    """Decode with a tree and drafts that are right at a rate, or with random trees."""
    rate: dict[str, Any] = {"rate": 0.7} if tree else {}
    tree = tree or RandomTrees()
    drafter = tiny.oracle(tree.depth, architecture, **rate)
    base, limit = tiny.base(architecture, attention, dtype), tiny.NEW_TOKENS
    return generate(base, drafter, tiny.prompts(), max_new_tokens=limit, tree=tree)


def assert_branching(out: Decoding, *, branches: bool = True) -> None:
    """Check that drafts beyond the root were accepted, in trees not all along the first branch."""
    assert all(forwards < 0.7 * tiny.NEW_TOKENS for forwards in out.forwards)
    paths = [step.path for row in out.steps for step in row]
    assert not branches or any(path != list(range(len(path))) for path in paths)


def change_mask(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    change: Callable[[Tensor, int | None], tuple],
) -> None:
    """Let `change` replace the ancestors and the window that the mask is built from."""
    # made before: a base that is loaded with a wrong mask is refused by its self check
    for attention in ("sdpa", "eager"):
        tiny.base(architecture, attention, torch.float64)
    tiny.continuations(architecture)
    true_mask = specheads.base.forward.tree_mask

    def wrong_mask(ancestors, depths, cache, window, dtype):
        ancestors, window = change(ancestors, window)
        return true_mask(ancestors, depths, cache, window, dtype)

    monkeypatch.setattr(specheads.base.forward, "tree_mask", wrong_mask)


@pytest.mark.parametrize(("architecture", "attention"), ATTENTIONS)
def test_random_trees_on_ragged_rows_decode_the_base_s_text(architecture, attention):
    out = decode(architecture, attention)
    assert out.tokens == tiny.continuations(architecture)
    assert_branching(out)


def test_random_trees_are_exact_in_float32_too():
    assert decode("llama", "sdpa", torch.float32).tokens == tiny.continuations("llama")


@pytest.mark.parametrize(
    "architecture", slow_except(["llama", "gemma3", "gpt_bigcode"], tiny.ARCHITECTURES)
)
def test_a_causal_mask_in_place_of_the_tree_mask_is_caught(architecture, monkeypatch):
    change_mask(
        monkeypatch, architecture, lambda mask, window: (torch.ones_like(mask).tril(), window)
    )
    assert decode(architecture).tokens != tiny.continuations(architecture)


FURTHER_WINDOWED = ("mixtral", "phi3", "gemma2", "starcoder2")


@pytest.mark.parametrize(
    "architecture", slow_except(tiny.WINDOWED, [*tiny.WINDOWED, *FURTHER_WINDOWED])
)
def test_forgetting_the_sliding_window_is_caught(architecture, monkeypatch):
    change_mask(monkeypatch, architecture, lambda ancestors, _: (ancestors, None))
    tree = None if architecture in tiny.WINDOWED else TREES["static"]
    assert decode(architecture, tree=tree).tokens != tiny.continuations(architecture)


@pytest.mark.parametrize("architecture", slow_except(tiny.ARCHITECTURES, tiny.RECIPES))
def test_the_reference_is_varied_and_never_close_to_a_tie(architecture):
    """A base that repeats itself would forgive wrong masks, and a tie would fail right ones."""
    model = tiny.base(architecture, "eager").model
    for prompt, continuation in zip(tiny.prompts(), tiny.continuations(architecture), strict=True):
        logits = model(input_ids=torch.tensor([prompt + continuation])).logits[
            0, len(prompt) - 1 : -1
        ]
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3
        assert len(set(continuation)) > tiny.NEW_TOKENS // 3


# further architectures


@pytest.mark.parametrize(
    ("architecture", "tree"),
    slow_except([(name, "static") for name in tiny.FURTHER], product(tiny.FURTHER, TREES)),
)
def test_trees_of_further_architectures_decode_the_base_s_text(architecture: str, tree: str):
    out = decode(architecture, tree=TREES[tree])
    assert out.tokens == tiny.continuations(architecture)
    assert_branching(out, branches=tree != "chain")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    slow_except(
        [("gemma2", "redrafter"), ("qwen3_moe", "eagle3"), ("phi3", "dflash")],
        product(tiny.FURTHER, SOME_KINDS),
    ),
)
def test_training_lowers_the_loss(architecture: str, kind: str, tmp_path: Path):
    base = tiny.base(architecture, dtype=torch.float32)
    run_training(tmp_path, Schedule(phases={"corpus": phase(steps=8)}), kind=kind, base=base)
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("architecture", tiny.EXPERTS)
def test_head_of_experts_is_planned_exported_and_loaded(
    architecture: str, kind: str, tmp_path: Path
):
    folder = tiny.saved(tmp_path / "base", architecture, num_hidden_layers=7)
    base = FrozenBase.load(folder, dtype="float32", device="cpu")
    # a CPU reads packed documents one by one, and the plan is for masks
    plain = ("schedule.phases.corpus.packing=none", "~schedule.phases.distilled")
    expected = settings_of(folder, f"head={kind}", *plain)
    training = MetaTraining(expected, torch.device("cpu"))
    weights = training.fixed_memory()
    assert weights.base_weights_bytes == sum(
        parameter.nbytes for parameter in base.model.parameters()
    )
    (planned,), (_, step) = schedule_phases(expected.schedule), stepping(expected, base)
    step()
    with PeakMemory() as memory:
        step()
    planned_bytes = training.measure_step(planned, 2).memory.total_bytes
    assert 0.85 < planned_bytes / (weights.total_bytes + memory.peak) < 1.3

    torch.manual_seed(0)
    head = build_for_base({"kind": kind, "depth": 3}, base)
    head.save_pretrained(tmp_path / "head")
    loaded = load_head(tmp_path / "head", base=base)
    prompts = tiny.prompts()
    texts = generate(base, None, prompts, max_new_tokens=16).tokens
    assert generate(base, loaded, prompts, max_new_tokens=16).tokens == texts
    engine = "speculators" if kind == "dflash" else "vllm"
    served = tmp_path / "served"
    _, parity = export_head(loaded, base, engine, served, list(zip(prompts, texts, strict=True)))
    assert parity.largest_difference < 1e-5
