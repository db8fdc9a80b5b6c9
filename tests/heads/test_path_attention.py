"""Flash attention with paths equals the plain attention of training rounds, gradients included."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.core.features import PackedDocuments, document_positions
from specheads.heads.layers import path_attention
from specheads.heads.layers.attention import AttentionContext, _mix, limit_to_window

ROWS, TIME, WIDTH = 2, 11, 8
DOCUMENT_IDS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])


def masked_scores(
    documents: PackedDocuments, window: int | None, queries: Tensor, keys: Tensor
) -> Tensor:
    """Return masked scores (head, position, position), keys repeated for each head of a group."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("thd,shd->hts", queries, keys) / math.sqrt(queries.shape[-1])
    index = torch.arange(len(queries))
    document = (index[:, None] >= documents.bounds[1:]).sum(-1)
    visible = (document[:, None] == document) & (index[:, None] >= index)
    if window is not None:
        visible &= index > index[:, None] - window
    return scores.masked_fill(~visible, -math.inf)


def forward(
    documents: PackedDocuments, window: int | None, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace the kernel's forward pass: return the output and its log-sum-exp."""
    scores = masked_scores(documents, window, queries, keys)
    values = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


def backward(
    documents: PackedDocuments,
    window: int | None,
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the kernel's backward pass, which gets only the log-sum-exp and the output."""
    group = queries.shape[1] // keys.shape[1]
    weights = (masked_scores(documents, window, queries, keys) - total[..., None]).exp()
    wide_keys, wide_values = (shared.repeat_interleave(group, dim=1) for shared in (keys, values))
    mean = (grad * mixed).sum(-1).T[..., None]
    slopes = weights * (torch.einsum("thd,shd->hts", grad, wide_values) - mean)
    slopes = slopes / math.sqrt(queries.shape[-1])
    grad_keys = torch.einsum("hts,thd->shd", slopes, queries).unflatten(1, (-1, group)).sum(2)
    grad_values = torch.einsum("hts,thd->shd", weights, grad).unflatten(1, (-1, group)).sum(2)
    return torch.einsum("hts,shd->thd", slopes, wide_keys), grad_keys, grad_values


def random_leaves(heads: int, shared: int, levels: int, options: dict[str, Any]) -> list[Tensor]:
    """Return queries, text and paths of random values."""
    torch.manual_seed(levels)
    return [
        torch.randn(ROWS, heads, TIME, WIDTH, **options).requires_grad_(),
        torch.randn(ROWS, shared, 2, TIME, WIDTH, **options).requires_grad_(),
        torch.randn(ROWS, shared, 2, TIME, levels, WIDTH, **options).requires_grad_(),
    ]


def check_agreement(leaves: list[Tensor], tolerance: float, window: int | None = None) -> None:
    """Compare with plain attention in float64."""
    document_ids = DOCUMENT_IDS.to(leaves[0].device)
    visible = (document_ids[:, :, None] == document_ids[:, None]).tril()
    documents = PackedDocuments.of(document_positions(document_ids))
    queries, text, path = leaves
    mixed = path_attention.path_attention(queries, text, path, documents, window)
    grad = torch.randn_like(mixed)
    results = [mixed, *torch.autograd.grad(mixed, leaves, grad, allow_unused=True)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    queries, text, path = doubles
    plain = _mix(queries, AttentionContext(text, limit_to_window(visible, window), path))
    expected = [plain, *torch.autograd.grad(plain, doubles, grad.double(), allow_unused=True)]
    for result, expected_result in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), expected_result, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize(("heads", "shared", "window"), [(2, 2, None), (4, 2, None), (4, 2, 3)])
def test_merged_softmax_and_its_gradients_equal_the_plain_ones(
    heads: int, shared: int, window: int | None, levels: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(path_attention, "_flash_forward", forward)
    monkeypatch.setattr(path_attention, "_flash_backward", backward)
    leaves = random_leaves(heads, shared, levels, {"dtype": torch.float64})
    check_agreement(leaves, 1e-10, window)


def test_an_error_of_the_backward_pass_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    def shifted(documents: PackedDocuments, window: int | None, grad: Tensor, *tensors: Any):
        return backward(documents, window, grad.roll(1, 0), *tensors)

    monkeypatch.setattr(path_attention, "_flash_forward", forward)
    monkeypatch.setattr(path_attention, "_flash_backward", shifted)
    with pytest.raises(AssertionError):
        check_agreement(random_leaves(2, 2, 1, {"dtype": torch.float64}), 1e-10)
