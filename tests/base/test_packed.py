"""Packed documents do not see each other, in every architecture."""

import pytest
import torch

from specheads.base import attention
from tests import tiny
from tests.packed import alone, packed, pieces, texts
from tests.slow import ATTENTIONS


@pytest.mark.parametrize(("architecture", "attention"), ATTENTIONS)
def test_packed_documents_have_the_features_of_each_alone(architecture: str, attention: str):
    base, documents = tiny.base(architecture, attention), texts()
    batch, single = packed(documents), alone(documents)
    features = base.read(batch.tokens, (1, 2), batch.document_ids)
    expected = base.read(single.tokens, (1, 2))
    assert features.aux is not None
    assert expected.aux is not None
    for states, expected_states in (
        (features.hidden, expected.hidden),
        (features.aux, expected.aux),
    ):
        for piece, text, expected_piece in zip(
            pieces(states, batch), documents, expected_states, strict=True
        ):
            torch.testing.assert_close(piece, expected_piece[: len(text)], rtol=1e-10, atol=1e-10)
    # without the mask the features differ
    blind = base.read(batch.tokens, (1, 2)).hidden
    assert (blind[:, 12:30] - features.hidden[:, 12:30]).abs().max() > 1e-3


def test_gradients_equal_those_of_masked_attention(monkeypatch: pytest.MonkeyPatch):
    base, batch = tiny.base(), packed(texts())
    weight = base.model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    weight.requires_grad_(True)
    try:
        gradients = []
        for document_attention in (attention.document_attention, lambda *_: None):
            monkeypatch.setattr("specheads.base.forward.document_attention", document_attention)
            features = base.read(batch.tokens, document_ids=batch.document_ids, gradients=True)
            gradients += torch.autograd.grad(features.hidden.pow(2).sum(), weight)
    finally:
        weight.requires_grad_(False)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)
