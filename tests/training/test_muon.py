import pytest
import torch
from torch import nn

from specheads.training import optimizers
from specheads.training.optimizers import Muon


def test_float32_muon_equals_torchs_within_bfloat16_rounding():
    ours, theirs = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.empty(24, 16))
    theirs.data.copy_(ours.data)
    start = ours.detach().clone()
    walkers = (
        (ours, Muon([ours], lr=0.02, weight_decay=0.1)),
        (theirs, torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)),
    )
    for _ in range(5):
        gradient = torch.randn(24, 16)
        for parameter, optimizer in walkers:
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_muon_equals_torchs_on_bfloat16_cpus(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.empty(24, 16))
    theirs.data.copy_(ours.data)
    ours.grad = torch.randn(24, 16)
    theirs.grad = ours.grad.clone()
    monkeypatch.setattr(optimizers, "computes_bfloat16", lambda: True)
    for walker in (Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02)):
        walker.step()
    assert torch.equal(ours, theirs)
