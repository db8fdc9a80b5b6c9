"""States and losses of packed documents, and losses of heads that draft from anchors."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.config.training import LOSSES, JointSettings, Phase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base, kinds
from specheads.measure.offline import offline_logits
from specheads.training.depth_loss import DepthLoss
from specheads.training.joint import JointTraining
from specheads.training.objective import Objective, draft_labels, draw_labels
from tests import recurrent, tiny
from tests.packed import alone, chains_of, packed, pieces, texts
from tests.slow import each_kind

DEPTH = 2


def head_of(kind: str) -> Head:
    head = build_for_base({"kind": kind, "depth": DEPTH}, tiny.base()).double()
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.3)
    return head


@pytest.mark.parametrize("kind", kinds())
def test_packed_states_equal_those_of_each_document_alone(kind: str):
    head, documents = head_of(kind), texts()
    batch, single = packed(documents), alone(documents)
    features, single_features = (
        tiny.base().read(rows.tokens, head.aux_layers, rows.document_ids)
        for rows in (batch, single)
    )
    # the head's own mask matters, not only the base's
    unseen = replace(features, document_ids=None, documents=None)
    with torch.no_grad():
        packed_states, blind = (
            list(head.states(base_features, batch.tokens)) for base_features in (features, unseen)
        )
        single_states = list(head.states(single_features, single.tokens))
    apart = 0.0
    for level, (states, expected) in enumerate(zip(packed_states, single_states, strict=True)):
        cut = [pieces(value, batch) for value in (states, blind[level])]
        for document_states, unmasked, text, expected_states in zip(
            *cut, documents, expected, strict=True
        ):
            # later states read tokens after the document
            num_states = len(text) - 1 - level
            torch.testing.assert_close(
                document_states[:num_states], expected_states[:num_states], rtol=1e-10, atol=1e-10
            )
            apart = max(
                apart, (unmasked[:num_states] - expected_states[:num_states]).abs().max().item()
            )
    # a head whose states depend on other positions stores them when it drafts
    assert (apart > 1e-3) == (head.memory(1, 8) is not None)


def phase(**changes: object) -> Phase:
    settings = {"text": "corpus", "steps": 1, "batch_size": 2, "sequence_length": 40}
    return Phase(**settings | changes)  # pyright: ignore[reportArgumentType]


def loss_of(
    head: Head, batch: TokenBatch, settings: Phase, base: FrozenBase | None = None
) -> tuple[DepthLoss, list[torch.Tensor]]:
    """Return a head's loss on a batch, and its gradients."""
    base = base or tiny.base()
    features = base.read(batch.tokens, head.aux_layers, batch.document_ids)
    labels = draft_labels(head, batch, draw_labels(batch, head, settings))
    loss = Objective(head)(features, batch, labels, base.logits_of, settings)
    learned = [value for value in head.parameters() if value.requires_grad]
    gradients = torch.autograd.grad(loss.total, learned, allow_unused=True)
    return loss, [value for value in gradients if value is not None]


def same(loss: DepthLoss, expected: DepthLoss, within: float = 1e-6) -> bool:
    pairs = [(getattr(loss, name), getattr(expected, name)) for name in DepthLoss._fields]
    return all(
        torch.allclose(value, expected_value, rtol=within, atol=within)
        for value, expected_value in pairs
    )


@pytest.mark.parametrize("kind", each_kind())
def test_packed_loss_equals_separate_loss_for_every_kind(kind: str):
    head, documents = head_of(kind), texts()
    settings = phase()
    loss, slopes = loss_of(head, packed(documents), settings)
    expected, expected_slopes = loss_of(head, alone(documents), settings)
    assert same(loss, expected)
    for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
        torch.testing.assert_close(slope, expected_slope, rtol=1e-6, atol=1e-8)
    # the same rows without document ids have another loss
    batch = packed(documents)
    blind, _ = loss_of(head, TokenBatch(batch.tokens, batch.loss_mask), settings)
    assert not same(blind, expected, within=1e-3)


def test_joint_training_of_a_base_with_states_is_refused():
    with pytest.raises(InputError, match=r"joint training needs .*'lfm2' keep states"):
        JointTraining(recurrent.base("lfm2"), JointSettings())


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_loss_equals_separate_loss_for_every_loss(loss: str):
    head, documents = head_of("eagle3"), texts()
    settings = phase(loss=loss)
    packed_loss, separate_loss = (
        loss_of(head, batch, settings)[0] for batch in (packed(documents), alone(documents))
    )
    assert same(packed_loss, separate_loss)


@pytest.mark.parametrize("target", ["text", "base"])
def test_packed_joint_loss_equals_separate_loss(target: str):
    base = FrozenBase(copy.deepcopy(tiny.base().model))
    joint = JointSettings(rank=2, dropout=0.0, target=target)
    training = JointTraining(base, joint)
    for value in training.adapter.parameters:
        value.data.copy_(torch.randn_like(value) * 0.1)
    training.adapter.learn(True)
    documents, losses = texts(), []
    for batch in (packed(documents), alone(documents)):
        loss = training.read(batch, batch.loss_mask, joint)[1]
        losses.append((loss, torch.autograd.grad(loss, training.adapter.parameters)))
    (loss, slopes), (expected, expected_slopes) = losses
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(slopes, expected_slopes, rtol=1e-8, atol=1e-10)
    batch = packed(documents)
    blind = training.read(TokenBatch(batch.tokens, batch.loss_mask), batch.loss_mask, joint)[1]
    assert abs(blind.item() - expected.item()) > 1e-3


CHAIN, TIME, MOST = 3, 24, 4


def anchored(kind: str, **settings):
    torch.manual_seed(1)
    defaults = {"depth": CHAIN, "num_layers": 1, "num_anchors": MOST}
    frequencies = torch.arange(tiny.VOCAB) % 7
    head = build_for_base({"kind": kind, **defaults, **settings}, tiny.base(), frequencies).double()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def batch_of(first_sample: int = 0, rows: int = 3) -> TokenBatch:
    tokens = torch.randint(tiny.VOCAB, (3, TIME), generator=torch.manual_seed(2))
    loss_mask = torch.ones_like(tokens, dtype=torch.bool)
    loss_mask[0, :9], loss_mask[1, 14] = False, False
    batch = TokenBatch(tokens, loss_mask)
    samples = slice(first_sample, first_sample + rows)
    return TokenBatch(batch.tokens[samples], batch.loss_mask[samples], None, first_sample)


def test_anchors_per_row_do_not_depend_on_parts():
    head = anchored("dflash")
    batch, settings = batch_of(), phase()
    anchors = draw_labels(batch, head, settings, seed=5)
    assert anchors.sum(1).tolist() == [MOST] * 3
    assert not (anchors & ~batch.loss_mask).any()
    assert torch.equal(draw_labels(batch_of(1, 2), head, settings, seed=5), anchors[1:])
    assert not torch.equal(draw_labels(batch, head, settings, seed=6), anchors)
    # validation uses the same anchors each time
    assert torch.equal(draw_labels(batch, head, settings), draw_labels(batch, head, settings))


@pytest.mark.parametrize("draft_tokens", [0, 40])
def test_loss_covers_drawn_drafts_with_weights(draft_tokens: int):
    base, batch = tiny.base(), batch_of()
    head = anchored("dflash", draft_tokens=draft_tokens)
    settings = phase(loss="cross_entropy", decay=0.7788)
    features = base.read(batch.tokens, head.aux_layers)
    loss_mask = draw_labels(batch, head, settings, seed=5)
    labels = draft_labels(head, batch, loss_mask)
    loss = Objective(head)(features, batch, labels, base.logits_of, settings)
    # a draft needs a position two before its first label
    rows, first = (loss_mask & (torch.arange(TIME) > 1)).nonzero(as_tuple=True)
    assert len(rows) > 8
    labels = chains_of(batch, rows, first, CHAIN)
    labels = head.to_drafted(labels).where(labels >= 0, -1)
    assert (labels[:, 2] < 0).any()
    losses = []
    for level, logits in enumerate(offline_logits(head, features, batch.tokens)):
        has_label = labels[:, level] >= 0
        losses.append(
            F.cross_entropy(logits[rows[has_label], first[has_label] - 2], labels[has_label, level])
        )
    torch.testing.assert_close(loss.by_depth, torch.stack(losses).detach())
    expected = sum(0.7788**level * depth_loss for level, depth_loss in enumerate(losses))
    torch.testing.assert_close(loss.total, expected)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("labels", [range(10, 20), range(2, 24), range(10, 12)], ids=str)
def test_each_depth_learns_the_answer_to_its_last_token(kind: str, labels: range):
    """An answer may be shorter than the head is deep, and may end with the row."""
    base, batch, depth = tiny.base(), batch_of(rows=1), 7
    head = anchored(kind, depth=depth, num_anchors=TIME)
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    batch.loss_mask[:, labels.start : labels.stop] = True
    loss, _ = loss_of(head, batch, phase(loss="cross_entropy"))
    features = base.read(batch.tokens, head.aux_layers)
    for level, logits in enumerate(offline_logits(head, features, batch.tokens)):
        first = torch.arange(labels.start, max(labels.start, labels.stop - level))
        draft, text = logits[0, first - 2], batch.tokens[0, first + level]
        expected = F.cross_entropy(draft, text, reduction="sum") / max(1, len(first))
        torch.testing.assert_close(loss.by_depth[level], expected.detach())
        agreed = (draft.argmax(-1) == text).sum() / max(1, len(first))
        torch.testing.assert_close(loss.agreement[level], agreed.double())
    assert loss.by_depth[: len(labels)].all()


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "domino", "dspark"])
def test_loss_of_a_document_does_not_depend_on_the_next_one(kind: str):
    base, batch = tiny.base(), batch_of(rows=1)
    head = anchored(kind)
    ids = (torch.arange(TIME)[None] > 13).long()
    label_mask = (torch.arange(TIME)[None] > 9) & (ids == 0)
    results = []
    for added in (0, 1):
        tokens = (batch.tokens + added * ids) % tiny.VOCAB
        row = TokenBatch(tokens, torch.ones_like(batch.loss_mask), ids)
        features = base.read(tokens, head.aux_layers, ids)
        settings = phase(loss="lk")
        labels = draft_labels(head, row, label_mask)
        loss = Objective(head)(features, row, labels, base.logits_of, settings)
        learned = [value for value in head.parameters() if value.requires_grad]
        slopes = torch.autograd.grad(loss.total, learned, allow_unused=True)
        results.append((*loss, *(value for value in slopes if value is not None)))
    # all depths learn the last token of the first document
    assert results[0][1].all()
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_each_depth_learns_the_distribution_that_the_base_has_of_the_label():
    base, head, batch = tiny.base(), head_of("eagle3"), alone(texts())
    features = base.read(batch.tokens, head.aux_layers)
    labels = draft_labels(head, batch, batch.loss_mask)
    loss = Objective(head)(features, batch, labels, base.logits_of, phase())
    rows, labels = (batch.loss_mask & (torch.arange(40) > DEPTH)).nonzero(as_tuple=True)
    base_probs = base.logits_of(features.hidden[rows, labels - 1]).softmax(-1)
    for level, logits in enumerate(offline_logits(head, features, batch.tokens)):
        expected = F.cross_entropy(logits[rows, labels - 2 - level], base_probs)
        torch.testing.assert_close(loss.by_depth[level], expected.detach())


def test_dspark_loss_includes_the_confidence_loss():
    base, head, batch = tiny.base(), anchored("dspark"), batch_of()
    settings = phase(loss="cross_entropy_l1", decay=0.7788)
    features = base.read(batch.tokens, head.aux_layers)
    loss_mask = draw_labels(batch, head, settings, seed=5)
    labels = draft_labels(head, batch, loss_mask)
    loss = Objective(head)(features, batch, labels, base.logits_of, settings)
    every_row, every_first = (loss_mask & (torch.arange(TIME) > 1)).nonzero(as_tuple=True)
    labels = chains_of(batch, every_row, every_first, CHAIN)
    assert (labels[:, 2] < 0).any()
    expected = torch.zeros(())
    for level, state in enumerate(head.states(features, batch.tokens)):
        has_label = labels[:, level] >= 0
        rows, first = every_row[has_label], every_first[has_label]
        state = state[rows, first - 2]
        draft = head.logits(state, level).softmax(-1)
        base_probs = base.logits_of(features.hidden[rows, first + level - 1]).softmax(-1)
        accepted = (1 - 0.5 * (draft - base_probs).abs().sum(-1)).detach()
        confidence = head.confidence_logits(state)
        assert confidence is not None
        word = F.binary_cross_entropy_with_logits(confidence, accepted)
        surprise = F.cross_entropy(head.logits(state, level), batch.tokens[rows, first + level])
        apart = (draft - base_probs).abs().sum(-1).mean()
        expected = expected + 0.7788**level * (0.1 * surprise + 0.9 * apart + word)
    torch.testing.assert_close(loss.total, expected.double())
    loss.total.backward()
    slope = head.get_parameter("confidence_head.proj.weight").grad
    assert slope is not None
    assert slope.abs().max() > 0
