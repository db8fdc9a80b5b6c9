"""Recomputed layers have the same gradients with fewer stored activations."""

import pytest
import torch
from torch import Tensor

from specheads.core.drafter import Head
from specheads.heads.load import build_for, kinds
from specheads.training.objective import Objective, whole_chains
from specheads.training.settings import Phase
from tests import tiny


def learned(head: Head, activation_checkpointing: bool) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of a loss and the bytes of stored activations."""
    base = tiny.base("llama")
    tokens = torch.arange(60).reshape(2, 30) % tiny.VOCAB
    phase = Phase(text="corpus", activation_checkpointing=activation_checkpointing)
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.data_ptr()] = value.nbytes
        return value

    head.zero_grad()
    loss_mask = whole_chains(torch.ones_like(tokens, dtype=torch.bool), head.depth)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        features = base.read(tokens, head.aux_layers)
        loss = Objective(head)(features, tokens, loss_mask, base.projection, phase)
        total = sum(kept.values())
        loss.total.backward()
    found = {name: value.grad for name, value in head.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}, total


@pytest.mark.parametrize("kind", kinds())
def test_gradients_are_the_same(kind: str):
    head = build_for({"kind": kind, "depth": 3}, tiny.base("llama")).double().train()
    plain, much = learned(head, False)
    again, less = learned(head, True)
    assert plain
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    assert (less < much) == (kind != "mlp_speculator")
    assert all("forward" not in vars(module) for module in head.modules())
