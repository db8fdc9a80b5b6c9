"""Further architectures, dense and with experts: exact trees, training, plan, export, loading.

In each architecture one case is fast, and the others are slow.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import specheads.base.forward
from specheads.base.model import FrozenBase
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.export.write import export_head
from specheads.heads.load import build_for, load_head
from specheads.runs.trackers import read_metrics
from specheads.training.plan import PeakMemory, Shapes, Trial
from specheads.training.schedule import placed
from specheads.training.settings import Schedule
from tests import tiny
from tests.training.test_plan import ACCELERATOR, setup
from tests.training.test_trainer import phase, run_training

BRANCHES = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]
TREES = {
    "static": policies.Static(BRANCHES, "static"),
    "chain": policies.chain(4),
    "best_first": policies.BestFirst(12, 4),
}
KINDS = ("redrafter", "eagle3", "dflash")


def cases(second: tuple[str, ...], *, every: bool = True) -> list[Any]:
    """Return pairs of an architecture and a choice; only the first choice of each is fast.

    Without `every`, only the first architecture with the first choice is fast.
    """
    return [
        pytest.param(
            one, choice, marks=() if not number and (every or not place) else pytest.mark.slow
        )
        for place, one in enumerate(tiny.FURTHER if every else tiny.EXPERTS)
        for number, choice in enumerate(second)
    ]


def decode(architecture: str, tree: policies.TreePolicy, attention: str = "sdpa") -> Any:
    drafter = tiny.oracle(tree.depth, architecture, rate=0.7)
    base, limit = tiny.base(architecture, attention), tiny.NEW_TOKENS
    return generate(base, drafter, tiny.prompts(), max_new_tokens=limit, tree=tree)


@pytest.mark.parametrize(("architecture", "tree"), cases((*TREES,)))
def test_trees_decode_the_base_s_own_text(architecture: str, tree: str):
    out = decode(architecture, TREES[tree])
    assert out.tokens == tiny.continuations(architecture)
    assert all(forwards < 0.7 * tiny.NEW_TOKENS for forwards in out.forwards)
    paths = [step.path for row in out.steps for step in row]
    assert tree == "chain" or any(path != list(range(len(path))) for path in paths)


@pytest.mark.parametrize("architecture", ["mixtral", "phi3", "gemma2", "starcoder2"])
@pytest.mark.slow
def test_forgetting_the_sliding_window_is_caught(
    architecture: str, monkeypatch: pytest.MonkeyPatch
):
    tiny.base(architecture)
    true_mask = specheads.base.forward.tree_mask
    monkeypatch.setattr(
        specheads.base.forward,
        "tree_mask",
        lambda ancestors, depths, cache, _, dtype: true_mask(ancestors, depths, cache, None, dtype),
    )
    assert decode(architecture, TREES["static"]).tokens != tiny.continuations(architecture)


@pytest.mark.parametrize(("architecture", "kind"), cases(KINDS))
def test_training_lowers_the_loss(architecture: str, kind: str, tmp_path: Path):
    base = tiny.base(architecture, dtype=torch.float32)
    run_training(tmp_path, Schedule(phases={"corpus": phase(steps=8)}), kind=kind, base=base)
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("architecture", "kind"), cases(KINDS, every=False))
def test_head_of_experts_is_planned_exported_and_loaded(
    architecture: str, kind: str, tmp_path: Path
):
    folder = tiny.saved(tmp_path / "base", architecture, num_hidden_layers=7)
    base = FrozenBase.load(folder, dtype="float32", device="cpu")
    # a CPU reads packed documents one by one, and the plan is for masks
    plain = ("schedule.phases.corpus.packing=none", "~schedule.phases.distilled")
    wanted = setup(folder, f"head={kind}", *plain)
    shapes = Shapes(wanted, torch.device("cpu"))
    weights = shapes.weights()
    assert weights["base weights"] == sum(one.nbytes for one in base.model.parameters())
    (planned,), real = placed(wanted.schedule), Trial(wanted, base, ACCELERATOR)
    real.step(planned, 2)
    with PeakMemory() as memory:
        real.step(planned, 2)
    found = sum(shapes.step(planned, 2).values()) / (sum(weights.values()) + memory.peak)
    assert 0.85 < found < 1.3

    torch.manual_seed(0)
    head = build_for({"kind": kind, "depth": 3}, base)
    head.save_pretrained(tmp_path / "head")
    loaded = load_head(tmp_path / "head", base=base)
    prompts = tiny.prompts()
    texts = generate(base, None, prompts, max_new_tokens=16).tokens
    assert generate(base, loaded, prompts, max_new_tokens=16).tokens == texts
    engine = "speculators" if kind == "dflash" else "vllm"
    pairs = list(zip(prompts, texts, strict=True))
    _, parity = export_head(loaded, base, engine, tmp_path / "served", pairs)
    assert parity.largest_difference < 1e-5
