"""Packed and unpacked training have the same loss on the same documents."""

import copy

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for, kinds
from specheads.training.depth_loss import DepthLoss
from specheads.training.objective import Objective, drawn_labels
from specheads.training.settings import LOSSES, Joint, Phase
from specheads.training.teacher import Teacher
from tests import tiny
from tests.packed import alone, packed, texts

DEPTH = 2


def head_of(kind: str) -> Head:
    head = build_for({"kind": kind, "depth": DEPTH}, tiny.base()).double()
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.3)
    return head


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
