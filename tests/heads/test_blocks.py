"""DFlash and DSpark: the numbers of their projects, and drafts from anchors only."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specheads.core.features import Committed
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.kinds import dflash, dspark
from specheads.heads.layers.block import BlockHead, block_mask
from specheads.heads.load import build_head, load_head
from tests import tiny
from tests.heads.golden import GOLDEN, changed, close, expected, features
from tests.heads.test_heads import make

DEEPSPEC = {"dflash_deepspec": dflash.Head, "dspark_deepspec": dspark.Head}
FIRST = 6
"""Positions that the first of two drafts has seen."""


def case(name: str) -> tuple[BlockHead, dict[str, Tensor]]:
    head, golden = load_head(GOLDEN / name), expected(name)
    assert isinstance(head, BlockHead)
    head.double()
    if "in.embedding" in golden:
        head.bind(golden["in.embedding"], golden["in.projection"])
    return head, golden


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", DEEPSPEC)
def test_training_states_give_deepspec_s_logits_and_confidences(name: str):
    head, golden = case(name)
    assert isinstance(head, DEEPSPEC[name])
    tokens, counted = golden["in.tokens"], golden["out.counted"]
    # there an anchor is the token after the position to draft from
    at = golden["out.anchors"] - 1
    is_kept = golden["out.kept"] & (at >= 0)
    rows = torch.arange(len(at))[:, None].expand_as(at)
    marks = torch.zeros_like(tokens, dtype=torch.bool)
    marks[rows[is_kept], at[is_kept]] = True
    checked = 0
    for level, state in enumerate(head.states(features(golden["in.aux"]), tokens, marks)):
        is_counted = is_kept & counted[:, :, level]
        result = state[rows[is_counted], at[is_counted]]
        close(head.logits(result, level), golden["out.logits"][:, :, level][is_counted])
        if "out.confidence" in golden:
            sure = head.confidence_logits(result)
            assert sure is not None
            close(sure, golden["out.confidence"][:, :, level][is_counted])
        checked += int(is_counted.sum())
    assert checked > 20


@pytest.mark.parametrize("name", DEEPSPEC)
def test_the_block_mask_equals_deepspec_s(name: str):
    golden = expected(name)
    anchors, is_kept, time = golden["out.anchors"], golden["out.kept"], golden["in.tokens"].shape[1]
    before = torch.arange(time) < anchors[..., None]
    result = block_mask(before.repeat_interleave(4, dim=1), slots=4)
    is_kept_slot = is_kept.repeat_interleave(4, dim=1)
    assert torch.equal(result[is_kept_slot], golden["out.mask"][:, 0][is_kept_slot])


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [*DEEPSPEC, "dflash_z_lab"])
def test_public_heads_draft_like_their_projects(name: str):
    """Draft twice from one memory: after the first positions, and after all."""
    head, golden = case(name)
    memory = head.memory(2, capacity=32)
    ends = (0, FIRST, golden["in.aux"].shape[1])
    for step, (start, end) in enumerate(itertools.pairwise(ends)):
        block_features = features(golden["in.aux"][:, start:end])
        root = golden["in.roots"][:, step : step + 1]
        following = root.expand(-1, end - start)
        committed = Committed(block_features, following, torch.full((2,), end - start))
        reference = golden[f"out.draft_logits.{step}"]
        decoding = golden.get(f"out.drafted.{step}", reference.argmax(-1))
        logits, state = head.begin(committed, memory)
        for level in range(head.depth):
            close(logits[:, 0], reference[:, level])
            assert torch.equal(logits.argmax(-1)[:, 0], decoding[:, level])
            sure = head.confidence(state)
            if sure is not None:
                logit = golden[f"out.draft_confidence.{step}"][:, level]
                close(sure[:, 0], logit.sigmoid())
            if level + 1 < head.depth:
                node = decoding[:, level : level + 1]
                logits, state = head.extend(state, node, torch.zeros_like(node))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_only_anchors_are_computed(kind: str, monkeypatch: pytest.MonkeyPatch):
    base = tiny.base("llama")
    head = make({"kind": kind, "num_layers": 2}, base)
    assert isinstance(head, BlockHead)
    tokens = torch.randint(base.vocab_size, (2, 16), generator=torch.manual_seed(3))
    marks = torch.zeros_like(tokens, dtype=torch.bool)
    marks[0, [2, 9]] = marks[1, 5] = True
    slots = 3 + (not head.config.sample_from_anchor)
    sizes = []
    layer = type(head.layers[0])
    forward = layer.forward
    monkeypatch.setattr(
        layer,
        "forward",
        lambda self, inputs, context: (
            sizes.append(inputs.stream.shape[1]) or forward(self, inputs, context)
        ),
    )
    states = list(head.states(base.read(tokens, head.aux_layers), tokens, marks))
    assert sizes == [2 * slots] * 2
    assert not states[0][0, 3, : base.width].any()


@pytest.mark.parametrize("sure", [-9.0, 9.0])
def test_a_chain_stops_at_low_dspark_confidence(sure: float):
    """Its confidence replaces its probabilities; the text stays the same."""
    base = tiny.base("llama")
    head = make({"kind": "dspark", "num_layers": 2}, base)
    assert isinstance(head, dspark.Head)
    head.get_parameter("confidence_head.proj.weight").data.zero_()
    head.get_parameter("confidence_head.proj.bias").data.fill_(sure)
    prompts = tiny.prompts()
    decoding = generate(
        base, head, prompts, max_new_tokens=12, tree=policies.chain(3, confidence=0.5)
    )
    assert decoding.tokens == [text[:12] for text in tiny.continuations()]
    committed = Committed(
        base.read(torch.tensor([prompts[0]]), head.aux_layers),
        torch.tensor([[*prompts[0][1:], 5]]),
        torch.tensor([len(prompts[0])]),
    )
    tree = policies.chain(3, confidence=0.5).grow(head, committed, head.memory(1, 64))
    assert tree.tokens.shape[1] == (2 if sure < 0 else 4)


@pytest.mark.parametrize(
    ("num_layers", "num_head_layers", "aux_layers"),
    [
        (36, 5, (2, 10, 18, 26, 34)),
        (32, 1, (17,)),
        (7, 5, (1, 2, 4, 5, 6)),
        (3, 5, (1, 2)),
        (2, 1, (1,)),
    ],
)
def test_aux_layers_are_evenly_spaced_and_exclude_the_last(
    num_layers: int, num_head_layers: int, aux_layers: tuple[int, ...]
):
    head = build_head({"kind": "dflash", "num_layers": num_head_layers}, width=16, vocab_size=11)
    head.choose_aux_layers(num_layers)
    assert head.aux_layers == tuple(head.config.aux_layers) == aux_layers
    assert head.get_parameter("fc.weight").shape == (16, 16 * len(aux_layers))


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "LingDSparkModel"])
def test_deepspec_s_network_is_read_by_sglang_s_names(architecture: str, tmp_path: Path):
    folder = changed("dspark_deepspec", tmp_path, architectures=[architecture])
    head, original = load_head(folder), load_head(GOLDEN / "dspark_deepspec")
    assert isinstance(head, dspark.Head)
    assert head.config == original.config
    assert head.config.sample_from_anchor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.*only 'full_attention'"),
        ({"markov_head_type": "gated"}, "markov_head_type='gated'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"is_causal": True}, "is_causal=True"),
    ],
)
def test_unsupported_checkpoints_are_refused(change: dict, message: str):
    config = {"architectures": ["Qwen3DSparkModel"], "hidden_size": 32, "markov_rank": 5} | change
    with pytest.raises(ValueError, match=message):
        dspark.read_public(config, {})


def test_a_trained_embedding_of_the_mask_is_refused(tmp_path: Path):
    folder = changed("dflash_z_lab", tmp_path)
    torch.save({"embedding": torch.ones(32), "mask_token_id": 60}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"an embedding of its own in mask_embedding\.pt"):
        load_head(folder)
