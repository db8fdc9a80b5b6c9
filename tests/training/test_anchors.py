"""Heads with anchors: sampling of anchors, loss and confidence."""

import torch
from torch.nn import functional as F  # noqa: N812

from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for
from specheads.measure.offline import offline_logits
from specheads.training.objective import Objective, drawn_labels, whole_chains
from tests import tiny
from tests.training.test_trainer import phase

DEPTH, TIME, MOST = 3, 24, 4


def head_of(kind: str, **settings):
    torch.manual_seed(1)
    how = {"depth": DEPTH, "num_layers": 1, "num_anchors": MOST}
    head = build_for({"kind": kind, **how, **settings}, tiny.base()).double()
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
    head = head_of("dflash")
    batch, settings = batch_of(), phase()
    drawn = drawn_labels(batch, head, settings, seed=5)
    assert drawn.sum(1).tolist() == [MOST] * 3
    assert not (drawn & ~whole_chains(batch.loss_mask, DEPTH)).any()
    assert torch.equal(drawn_labels(batch_of(1, 2), head, settings, seed=5), drawn[1:])
    assert not torch.equal(drawn_labels(batch, head, settings, seed=6), drawn)
    # validation uses the same anchors each time
    assert torch.equal(drawn_labels(batch, head, settings), drawn_labels(batch, head, settings))


def test_loss_covers_drawn_drafts_with_weights():
    base, head, batch = tiny.base(), head_of("dflash"), batch_of()
    settings = phase(loss="cross_entropy", decay=0.7788)
    features = base.read(batch.tokens, head.aux_layers)
    loss_mask = drawn_labels(batch, head, settings, seed=5)
    loss = Objective(head)(features, batch.tokens, loss_mask, base.logits_of, settings)
    # the first labels of a text count if every depth can draft them
    rows, first = (loss_mask & (torch.arange(TIME) > DEPTH)).nonzero(as_tuple=True)
    assert len(rows) > 8
    logits = offline_logits(head, features, batch.tokens)
    each = [
        F.cross_entropy(one[rows, first - 2], batch.tokens[rows, first + level])
        for level, one in enumerate(logits)
    ]
    torch.testing.assert_close(loss.by_depth, torch.stack(each).detach())
    wanted = sum(0.7788**level * one for level, one in enumerate(each))
    torch.testing.assert_close(loss.total, wanted)


def test_dspark_loss_includes_the_confidence_loss():
    base, head, batch = tiny.base(), head_of("dspark"), batch_of()
    settings = phase(loss="cross_entropy_l1", decay=0.7788)
    features = base.read(batch.tokens, head.aux_layers)
    loss_mask = drawn_labels(batch, head, settings, seed=5)
    call = features, batch.tokens, loss_mask, base.logits_of, settings
    loss = Objective(head)(*call)
    rows, first = (loss_mask & (torch.arange(TIME) > DEPTH)).nonzero(as_tuple=True)
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
