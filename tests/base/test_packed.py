"""Packed documents do not see each other, in every architecture."""

from contextlib import nullcontext

import pytest
import torch

from specheads.base import attention
from tests import tiny
from tests.packed import alone, packed, pieces, texts


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_have_the_features_of_each_alone(architecture: str, attention: str):
    base, documents = tiny.base(architecture, attention), texts()
    batch, single = packed(documents), alone(documents)
    found = base.read(batch.tokens, (1, 2), batch.document_ids)
    wanted = base.read(single.tokens, (1, 2))
    assert found.aux is not None
    assert wanted.aux is not None
    for ours, theirs in ((found.hidden, wanted.hidden), (found.aux, wanted.aux)):
        for one, text, other in zip(pieces(ours, batch), documents, theirs, strict=True):
            torch.testing.assert_close(one, other[: len(text)], rtol=1e-10, atol=1e-10)
    # without the mask the features differ
    blind = base.read(batch.tokens, (1, 2)).hidden
    assert (blind[:, 12:30] - found.hidden[:, 12:30]).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_branches_have_the_states_of_their_texts_read_alone(architecture: str, is_packed: bool):
    base, batch = tiny.base(architecture), packed(texts())
    document_ids = batch.document_ids if is_packed else None
    rows, places = torch.tensor([0, 0, 0, 1]), torch.tensor([3, 28, 35, 19])
    drafts = torch.randint(tiny.VOCAB, (4, 3), generator=torch.manual_seed(2))
    found = base.forwards.read_branches(batch.tokens, document_ids, rows, places, drafts)
    assert batch.document_ids is not None
    for row, place, chain, states in zip(rows, places, drafts, found, strict=True):
        text, own = batch.tokens[row, : place + 1], batch.document_ids[row]
        text = text[own[: place + 1] == own[place]] if is_packed else text
        alone = base.read(torch.cat([text, chain])[None]).hidden[0, -3:]
        torch.testing.assert_close(states, alone, rtol=1e-9, atol=1e-9)


def test_gradients_equal_those_of_masked_attention(monkeypatch: pytest.MonkeyPatch):
    base, batch = tiny.base(), packed(texts())
    weight = base.model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    weight.requires_grad_(True)
    try:
        found = []
        for attending in (attention.attending_documents, lambda *_: nullcontext()):
            monkeypatch.setattr("specheads.base.forward.attending_documents", attending)
            read = base.read(batch.tokens, document_ids=batch.document_ids, gradients=True)
            found += torch.autograd.grad(read.hidden.pow(2).sum(), weight)
    finally:
        weight.requires_grad_(False)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
