"""No head sees other documents of a packed row."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specheads.core.drafter import Head
from specheads.core.features import Features
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for, kinds
from tests import tiny
from tests.packed import alone, packed, pieces, texts

KINDS = kinds()
ATTENDING = ["dflash", "dspark", "eagle3", "eagle_gru", "hydra_heads", "mtp"]
"""Kinds with attention of their own; a new one that is missing here fails the control below."""

DEPTH = 2


def head_of(kind: str) -> Head:
    """Return a head in which every part has an effect."""
    head = build_for({"kind": kind, "depth": DEPTH}, tiny.base()).double()
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.3)
    return head


def read(head: Head, batch: TokenBatch) -> Features:
    return tiny.base().read(batch.tokens, head.aux_layers, batch.document_ids)


def states(head: Head, features: Features, batch: TokenBatch) -> list[Tensor]:
    with torch.no_grad():
        return list(head.states(features, batch.tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_states_equal_those_of_each_document_alone(kind: str):
    head, documents = head_of(kind), texts()
    batch, single = packed(documents), alone(documents)
    features = read(head, batch)
    found, wanted = states(head, features, batch), states(head, read(head, single), single)
    # the head's own mask matters, not only the base's
    blind = states(head, replace(features, document_ids=None, documents=None), batch)
    apart = 0.0
    for level, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        cut = [pieces(value, batch) for value in (ours, blind[level])]
        for one, unmasked, text, other in zip(*cut, documents, theirs, strict=True):
            # later states read tokens after the document
            known = len(text) - 1 - level
            torch.testing.assert_close(one[:known], other[:known], rtol=1e-10, atol=1e-10)
            apart = max(apart, (unmasked[:known] - other[:known]).abs().max().item())
    assert (apart > 1e-3) == (kind in ATTENDING)
