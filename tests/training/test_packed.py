"""States and losses of packed documents, and losses of heads that draft from anchors."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for, kinds
from specheads.measure.offline import offline_logits
from specheads.training.depth_loss import DepthLoss
from specheads.training.objective import Objective, drawn_labels, whole_chains
from specheads.training.settings import LOSSES, Joint, Phase
from specheads.training.step import Teacher
from tests import tiny
from tests.packed import alone, packed, pieces, texts

DEPTH = 2


def head_of(kind: str) -> Head:
    head = build_for({"kind": kind, "depth": DEPTH}, tiny.base()).double()
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.3)
    return head


@pytest.mark.parametrize("kind", kinds())
def test_packed_states_equal_those_of_each_document_alone(kind: str):
    head, documents = head_of(kind), texts()
    batch, single = packed(documents), alone(documents)
    features, own = (
        tiny.base().read(one.tokens, head.aux_layers, one.document_ids) for one in (batch, single)
    )
    # the head's own mask matters, not only the base's
    unseen = replace(features, document_ids=None, documents=None)
    with torch.no_grad():
        found, blind = (list(head.states(one, batch.tokens)) for one in (features, unseen))
        wanted = list(head.states(own, single.tokens))
    apart = 0.0
    for level, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        cut = [pieces(value, batch) for value in (ours, blind[level])]
        for one, unmasked, text, other in zip(*cut, documents, theirs, strict=True):
            # later states read tokens after the document
            known = len(text) - 1 - level
            torch.testing.assert_close(one[:known], other[:known], rtol=1e-10, atol=1e-10)
            apart = max(apart, (unmasked[:known] - other[:known]).abs().max().item())
    # a head whose states depend on other positions stores them when it drafts
    assert (apart > 1e-3) == (head.memory(1, 8) is not None)


def phase(**changes: object) -> Phase:
    settings = {"text": "corpus", "steps": 1, "batch_size": 2, "sequence_length": 40}
    return Phase(**settings | changes)  # pyright: ignore[reportArgumentType]


def loss_of(head: Head, batch: TokenBatch, settings: Phase) -> tuple[DepthLoss, list[torch.Tensor]]:
    """Return a head's loss on a batch, and its gradients."""
    base = tiny.base()
    features = base.read(batch.tokens, head.aux_layers, batch.document_ids)
    loss_mask = drawn_labels(batch, head, settings)
    loss = Objective(head)(features, batch.tokens, loss_mask, base.logits_of, settings)
    learned = [value for value in head.parameters() if value.requires_grad]
    found = torch.autograd.grad(loss.total, learned, allow_unused=True)
    return loss, [value for value in found if value is not None]


def same(found: DepthLoss, wanted: DepthLoss, within: float = 1e-6) -> bool:
    pairs = [(getattr(found, name), getattr(wanted, name)) for name in DepthLoss._fields]
    return all(torch.allclose(one, other, rtol=within, atol=within) for one, other in pairs)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("weighting", ["geometric", "dpace"])
def test_packed_loss_equals_separate_loss_for_every_kind(kind: str, weighting: str):
    head, documents = head_of(kind), texts()
    settings = phase(weighting=weighting)
    found, slopes = loss_of(head, packed(documents), settings)
    wanted, theirs = loss_of(head, alone(documents), settings)
    assert same(found, wanted)
    for ours, other in zip(slopes, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-8)
    # the same rows without document ids have another loss
    batch = packed(documents)
    blind, _ = loss_of(head, TokenBatch(batch.tokens, batch.loss_mask), settings)
    assert not same(blind, wanted, within=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weighting", ["geometric", "dpace"])
def test_packed_loss_equals_separate_loss_for_every_loss(loss: str, weighting: str):
    head, documents = head_of("eagle3"), texts()
    settings = phase(loss=loss, weighting=weighting)
    found, wanted = (
        loss_of(head, batch, settings)[0] for batch in (packed(documents), alone(documents))
    )
    assert same(found, wanted)


@pytest.mark.parametrize("target", ["text", "base"])
def test_packed_joint_loss_equals_separate_loss(target: str):
    base = FrozenBase(copy.deepcopy(tiny.base().model))
    joint = Joint(rank=2, dropout=0.0, target=target)
    teacher = Teacher(base, head_of("medusa"), joint, seed=0)
    for value in teacher.parameters:
        value.data.copy_(torch.randn_like(value) * 0.1)
    assert teacher.adapter
    teacher.adapter.learn(True)
    documents, found = texts(), []
    for batch in (packed(documents), alone(documents)):
        loss = teacher.learn(batch, batch.loss_mask, joint)[1]
        found.append((loss, torch.autograd.grad(loss, teacher.parameters)))
    (loss, slopes), (wanted, theirs) = found
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(slopes, theirs, rtol=1e-8, atol=1e-10)
    batch = packed(documents)
    blind = teacher.learn(TokenBatch(batch.tokens, batch.loss_mask), batch.loss_mask, joint)[1]
    assert abs(blind.item() - wanted.item()) > 1e-3


CHAIN, TIME, MOST = 3, 24, 4


def anchored(kind: str, **settings):
    torch.manual_seed(1)
    how = {"depth": CHAIN, "num_layers": 1, "num_anchors": MOST}
    frequencies = torch.arange(tiny.VOCAB) % 7
    head = build_for({"kind": kind, **how, **settings}, tiny.base(), frequencies).double()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def batch_of(first_sample: int = 0, rows: int = 3) -> TokenBatch:
    tokens = torch.randint(tiny.VOCAB, (3, TIME), generator=torch.manual_seed(2))
    loss_mask = torch.ones_like(tokens, dtype=torch.bool)
    loss_mask[0, :9], loss_mask[1, 14] = False, False
    batch = TokenBatch(tokens, loss_mask)
    part = slice(first_sample, first_sample + rows)
    return TokenBatch(batch.tokens[part], batch.loss_mask[part], None, first_sample)


def test_anchors_per_row_do_not_depend_on_parts():
    head = anchored("dflash")
    batch, settings = batch_of(), phase()
    drawn = drawn_labels(batch, head, settings, seed=5)
    assert drawn.sum(1).tolist() == [MOST] * 3
    assert not (drawn & ~whole_chains(batch.loss_mask, CHAIN)).any()
    assert torch.equal(drawn_labels(batch_of(1, 2), head, settings, seed=5), drawn[1:])
    assert not torch.equal(drawn_labels(batch, head, settings, seed=6), drawn)
    # validation uses the same anchors each time
    assert torch.equal(drawn_labels(batch, head, settings), drawn_labels(batch, head, settings))


@pytest.mark.parametrize("draft_tokens", [0, 40])
def test_loss_covers_drawn_drafts_with_weights(draft_tokens: int):
    base, batch = tiny.base(), batch_of()
    head = anchored("dflash", draft_tokens=draft_tokens)
    settings = phase(loss="cross_entropy", decay=0.7788)
    features = base.read(batch.tokens, head.aux_layers)
    loss_mask = drawn_labels(batch, head, settings, seed=5)
    loss = Objective(head)(features, batch.tokens, loss_mask, base.logits_of, settings)
    # the first labels of a text count if every depth can draft them
    rows, first = (loss_mask & (torch.arange(TIME) > CHAIN)).nonzero(as_tuple=True)
    assert len(rows) > 8
    logits, labels = offline_logits(head, features, batch.tokens), head.to_drafted(batch.tokens)
    each = [
        F.cross_entropy(one[rows, first - 2], labels[rows, first + level], ignore_index=-1)
        for level, one in enumerate(logits)
    ]
    torch.testing.assert_close(loss.by_depth, torch.stack(each).detach())
    wanted = sum(0.7788**level * one for level, one in enumerate(each))
    torch.testing.assert_close(loss.total, wanted)


def test_each_depth_learns_the_distribution_that_the_base_has_of_the_label():
    base, head, batch = tiny.base(), head_of("eagle3"), alone(texts())
    features = base.read(batch.tokens, head.aux_layers)
    call = features, batch.tokens, batch.loss_mask.clone(), base.logits_of, phase()
    found = Objective(head)(*call)
    rows, labels = (batch.loss_mask & (torch.arange(40) > DEPTH)).nonzero(as_tuple=True)
    theirs = base.logits_of(features.hidden[rows, labels - 1]).softmax(-1)
    for level, logits in enumerate(offline_logits(head, features, batch.tokens)):
        wanted = F.cross_entropy(logits[rows, labels - 2 - level], theirs)
        torch.testing.assert_close(found.by_depth[level], wanted.detach())


def test_dspark_loss_includes_the_confidence_loss():
    base, head, batch = tiny.base(), anchored("dspark"), batch_of()
    settings = phase(loss="cross_entropy_l1", decay=0.7788)
    features = base.read(batch.tokens, head.aux_layers)
    loss_mask = drawn_labels(batch, head, settings, seed=5)
    call = features, batch.tokens, loss_mask, base.logits_of, settings
    loss = Objective(head)(*call)
    rows, first = (loss_mask & (torch.arange(TIME) > CHAIN)).nonzero(as_tuple=True)
    wanted = torch.zeros(())
    for level, state in enumerate(head.states(features, batch.tokens)):
        state = state[rows, first - 2]
        draft = head.logits(state, level).softmax(-1)
        theirs = base.logits_of(features.hidden[rows, first + level - 1]).softmax(-1)
        accepted = (1 - 0.5 * (draft - theirs).abs().sum(-1)).detach()
        said = head.confidence_logits(state)
        assert said is not None
        word = F.binary_cross_entropy_with_logits(said, accepted)
        surprise = F.cross_entropy(head.logits(state, level), batch.tokens[rows, first + level])
        apart = (draft - theirs).abs().sum(-1).mean()
        wanted = wanted + 0.7788**level * (0.1 * surprise + 0.9 * apart + word)
    torch.testing.assert_close(loss.total, wanted.double())
    loss.total.backward()
    slope = head.get_parameter("confidence_head.proj.weight").grad
    assert slope is not None
    assert slope.abs().max() > 0
