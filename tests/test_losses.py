import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads import losses

ROWS, VOCAB, WIDTH, DEPTH = 23, 31, 6, 3


def _problem(num_rows: int = ROWS):
    torch.manual_seed(3)
    states = [
        torch.randn(num_rows, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(DEPTH)
    ]
    shared = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    own = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    base_weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    targets = losses.Targets(
        torch.randint(VOCAB, (num_rows,)),
        torch.randn(num_rows, WIDTH, dtype=torch.float64),
        lambda hidden: hidden @ base_weight.T,
    )
    # depths 0 and 2 share one projection, as a tied head's do
    return states, [(shared, None), (own, bias), (shared, None)], targets, [shared, own, bias]


def _dense(kind: str, states, projections, targets, decay: float) -> torch.Tensor:
    base_logits = targets.project(targets.base_hidden)
    labels = {
        "cross_entropy": targets.labels,
        "soft_cross_entropy": base_logits.softmax(-1),
        "argmax_cross_entropy": base_logits.argmax(-1),
    }[kind]
    by_depth = [
        decay**level * F.cross_entropy(F.linear(state, weight, bias), labels)
        for level, (state, (weight, bias)) in enumerate(zip(states, projections, strict=True))
    ]
    return torch.stack(by_depth).sum()


@pytest.mark.parametrize("kind", sorted(losses.KINDS))
@pytest.mark.parametrize("chunk_rows", [1, 7, ROWS, 100])
def test_value_and_gradients_equal_the_dense_loss(kind: str, chunk_rows: int):
    states, projections, targets, shared = _problem()
    fused = losses.depth_loss(
        states, projections, targets, kind=kind, decay=0.8, chunk_rows=chunk_rows
    )
    dense = _dense(kind, states, projections, targets, 0.8)
    torch.testing.assert_close(fused.total, dense, rtol=1e-12, atol=1e-12)
    # times three: what comes from above must reach every gradient
    ours = torch.autograd.grad(3 * fused.total, [*states, *shared])
    theirs = torch.autograd.grad(3 * dense, [*states, *shared])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_batch_without_counted_rows_gives_zero_and_no_gradient():
    states, projections, targets, shared = _problem(num_rows=0)
    fused = losses.depth_loss(states, projections, targets)
    assert fused.total.item() == 0.0
    for gradient in torch.autograd.grad(fused.total, [*states, *shared]):
        assert not gradient.any()


def test_a_frozen_projection_gets_no_gradient():
    states, projections, targets, _ = _problem()
    for weight, _ in projections:
        weight.requires_grad_(False)
    losses.depth_loss(states, projections, targets).total.backward()
    assert states[1].grad is not None
    assert projections[0][0].grad is None


def test_agreement_is_the_share_of_rows_where_draft_and_base_choose_alike():
    #  base chooses  0 1 2 2      the draft says 0 1 2 0 at depth 0: three of four
    eye = torch.eye(3)
    base_hidden = eye[[0, 1, 2, 2]]
    targets = losses.Targets(torch.zeros(4, dtype=torch.long), base_hidden, lambda rows: rows @ eye)
    states = [eye[[0, 1, 2, 0]], eye[[1, 2, 0, 2]]]
    found = losses.depth_loss(states, [(eye, None), (eye, None)], targets)
    assert found.agreement.tolist() == [0.75, 0.25]


def test_the_soft_loss_is_least_where_the_draft_has_the_base_s_own_law():
    """There it equals the entropy of that law."""
    states, _, targets, _ = _problem()
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    same = losses.Targets(targets.labels, states[0].detach(), lambda hidden: hidden @ weight.T)
    law = F.linear(states[0], weight).softmax(-1)
    entropy = -(law * law.log()).sum(-1).mean()
    at_law = losses.depth_loss([states[0]], [(weight, None)], same).total
    beside = losses.depth_loss([states[0]], [(weight * 1.1, None)], same).total
    torch.testing.assert_close(at_law, entropy, rtol=1e-12, atol=1e-12)
    assert beside > at_law


def test_no_more_than_a_chunk_of_logits_is_ever_alive(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    linear = F.linear

    def watched(*arguments):
        out = linear(*arguments)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(losses.F, "linear", watched)
    states, projections, targets, _ = _problem()
    losses.depth_loss(states, projections, targets, chunk_rows=5).total.backward()
    assert max(sizes) == 5 * VOCAB


def test_an_unknown_loss_is_refused_by_name():
    states, projections, targets, _ = _problem()
    with pytest.raises(ValueError, match="got 'hinge'"):
        losses.depth_loss(states, projections, targets, kind="hinge")
