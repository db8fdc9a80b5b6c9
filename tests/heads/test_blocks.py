"""DFlash, DFlash 2, Domino and DSpark: their projects' numbers, and drafts from anchors only."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.config.training import Phase
from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.data.packing import TokenBatch
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.kinds import dflash, dflash2, domino, dspark
from specheads.heads.layers.block import BlockHead, block_mask
from specheads.heads.load import build_head, load_head
from specheads.training.objective import Objective, draft_labels
from specheads.training.schedule import ScheduledPhase
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


DFLASH2 = "dflash2_speculators"


def compare_dflash2(dtype: torch.dtype, tolerance: float) -> None:
    """Compare states, chains and losses with those of speculators 0.9 at some anchors."""
    head, golden = load_head(GOLDEN / DFLASH2).to(dtype), expected(DFLASH2)
    assert isinstance(head, dflash2.Head)
    assert (head.num_candidates, head.config.full_layers, head.config.causal) == (5, [1], False)
    golden = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in golden.items()
    }
    head.bind(golden["in.embedding"], golden["in.projection"])
    base_features, tokens = Features(golden["in.hidden"], golden["in.aux"]), golden["in.tokens"]
    anchors, depth = golden["out.anchors"], head.depth
    for level, state in enumerate(head.states(base_features, tokens)):
        hidden = state[0, anchors - 1, : head.width]
        close(hidden, golden["out.states"][:, level + 1], tolerance)
    for index, anchor in enumerate(anchors.tolist()):
        count = torch.tensor([anchor])
        aux = features(golden["in.aux"][:, :anchor])
        logits, state = head.begin(
            Committed(aux, tokens[:, 1 : anchor + 1], count), head.memory(1, 32)
        )
        for level in range(depth):
            # a tree takes the candidates in the order of the selector's scores
            scores, candidates = logits[0, 0].topk(5)
            order = golden["out.scores"][index, level].argsort(descending=True)
            close(scores, golden["out.scores"][index, level][order], tolerance)
            assert torch.equal(candidates, golden["out.candidates"][index, level][order])
            assert logits.softmax(-1).topk(5).values.sum() > 1 - 1e-6
            node = candidates[:1, None]
            assert node == golden["out.drafted"][index, level]
            if level + 1 < depth:
                logits, state = head.extend(state, node, torch.zeros_like(node))
    batch = TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    firsts = torch.zeros_like(batch.loss_mask)
    firsts[0, anchors + 1] = True
    labels, decay = draft_labels(head, batch, firsts), math.exp(-1 / 4)
    project = lambda hidden: hidden @ golden["in.projection"].T  # noqa: E731
    log_probs = project(base_features.hidden[0]).log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    for loss, name in (("total_variation", "tv"), ("soft_cross_entropy", "kl")):
        head.zero_grad()
        phase = Phase(text="corpus", loss=loss, decay=decay)
        result = Objective(head)(base_features, batch, labels, project, phase).total
        reference = golden[f"out.{name}"] * depth
        if name == "kl":
            for level in range(depth):
                reference = reference + decay**level * entropies[anchors + level].mean()
        # there the denominator is the number of labels and 1e-5
        torch.testing.assert_close(result, reference, rtol=2e-6 + tolerance, atol=0)
    result.backward()
    for name in (name for name in golden if name.startswith("out.gradient.")):
        gradient = head.get_parameter(name.removeprefix("out.gradient.")).grad
        assert gradient is not None
        close(gradient / depth, golden[name], 2e-6 + tolerance)


@pytest.mark.usefixtures("in_float64")
def test_dflash2_trains_and_drafts_as_speculators():
    compare_dflash2(torch.float64, 1e-9)


def test_dflash2_trains_and_drafts_as_speculators_in_float32():
    compare_dflash2(torch.float32, 1e-5)


DOMINO = "domino_modelopt"


def compare_domino(dtype: torch.dtype, tolerance: float) -> None:
    """Compare logits, chains, losses and gradients with those of ModelOpt 0.47 at some anchors."""
    head, golden = load_head(GOLDEN / DOMINO).to(dtype), expected(DOMINO)
    assert isinstance(head, domino.Head)
    assert (head.depth, head.config.num_slots, head.config.pure_draft_prefix_len) == (4, 4, 1)
    golden = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in golden.items()
    }
    projection = golden["in.projection"]
    head.bind(golden["in.embedding"], projection)
    base_features, tokens = features(golden["in.aux"]), golden["in.tokens"]
    anchors, depth = golden["out.anchors"], head.depth
    for level, state in enumerate(head.states(base_features, tokens)):
        state = state[0, anchors - 1]
        close(state[:, : head.width] @ projection.T, golden["out.base_logits"][:, level], tolerance)
        close(head.logits(state, level), golden["out.logits"][:, level], tolerance)
    for index, anchor in enumerate(anchors.tolist()):
        aux = features(golden["in.aux"][:, :anchor])
        committed = Committed(aux, tokens[:, 1 : anchor + 1], torch.tensor([anchor]))
        logits, state = head.begin(committed, head.memory(1, 32))
        for level in range(depth):
            node = logits.argmax(-1)
            assert node == golden["out.drafted"][index, level]
            if level + 1 < depth:
                # a sibling with another token changes nothing
                nodes = torch.cat([(node + 1) % 61, node], dim=1)
                logits, state = head.extend(state, nodes, torch.zeros_like(nodes) + (level > 0))
                logits = logits[:, 1:]
    batch = TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    firsts = torch.zeros_like(batch.loss_mask)
    firsts[0, anchors + 1] = True
    labels, decay = draft_labels(head, batch, firsts), math.exp(-1 / 4)
    settings = Phase(text="corpus", loss="cross_entropy", decay=decay, steps=4)
    phase, weight = ScheduledPhase("corpus", settings, first=2), sum(decay**k for k in range(depth))
    project = lambda hidden: hidden @ projection.T  # noqa: E731
    for step in (0, 3, 1):
        head.zero_grad()
        progress = phase.progress(phase.first + step)
        result = Objective(head)(
            base_features, batch, labels, project, settings, progress=progress
        ).total
        # there the denominator is the sum of weights and 1e-6
        reference = golden[f"out.loss.{step}"] * weight
        torch.testing.assert_close(result, reference, rtol=1e-6 + tolerance, atol=0)
    result.backward()
    for name in (name for name in golden if name.startswith("out.gradient.")):
        gradient = head.get_parameter(name.removeprefix("out.gradient.")).grad
        assert gradient is not None
        close(gradient / weight, golden[name], 1e-6 + tolerance)


@pytest.mark.usefixtures("in_float64")
def test_domino_trains_and_drafts_as_modelopt():
    compare_domino(torch.float64, 1e-9)


def test_domino_trains_and_drafts_as_modelopt_in_float32():
    compare_domino(torch.float32, 1e-5)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("error", ["keeps older tokens", "corrects the first level"])
def test_planted_errors_of_domino_are_found(error: str, monkeypatch: pytest.MonkeyPatch):
    read, states = domino.Head.read_tokens, domino.Head.node_states
    if error == "keeps older tokens":
        monkeypatch.setattr(
            domino.Head, "read_tokens", lambda *inputs: (read(*inputs) + inputs[2]) / 2
        )
    else:
        monkeypatch.setattr(
            domino.Head,
            "node_states",
            lambda self, hidden, tokens, summary, _: states(self, hidden, tokens, summary, 1),
        )
    with pytest.raises(AssertionError):
        compare_domino(torch.float64, 1e-9)


def _flipped(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution that reads later slots in place of earlier ones."""

    def convolve(self: Any, values: Tensor, inputs: Tensor, side: int) -> Tensor:
        def flip(value: Tensor) -> Tensor:
            return value.unflatten(1, (-1, self.num_slots)).flip(2).flatten(1, 2)

        return flip(forward(self, flip(values), flip(inputs), side))

    return convolve


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("error", ["candidates off by one", "sees the future"])
def test_planted_errors_of_dflash2_are_found(error: str, monkeypatch: pytest.MonkeyPatch):
    scores, forward = dflash2.Head._selector_scores, dflash2.BlockConvolution.forward
    if error == "sees the future":
        monkeypatch.setattr(dflash2.BlockConvolution, "forward", _flipped(forward))
    else:
        monkeypatch.setattr(
            dflash2.Head,
            "_selector_scores",
            lambda self, state, candidates: scores(self, state, (candidates + 1) % 61),
        )
    with pytest.raises(AssertionError):
        compare_dflash2(torch.float64, 1e-9)


def test_a_slot_convolves_itself_and_earlier_slots_of_its_block():
    config = dflash2.Config(depth=3, conv_kernel_size=2, conv_group_size=4)
    layer = dflash2.BlockConvolution(config, 8)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_()
    values, inputs = torch.randn(2, 1, 12, 8)
    plain = layer(values, inputs, dflash2.OUTPUT)
    for slot in range(12):
        changed = values.clone()
        changed[:, slot] += 1
        moved = (layer(changed, inputs, dflash2.OUTPUT) != plain)[0].any(-1).nonzero()[:, 0]
        assert moved.tolist() == [slot, slot + 1][: 2 if slot % 4 < 3 else 1]


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "domino", "dspark"])
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
