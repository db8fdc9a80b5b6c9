"""Flash attention with paths equals the plain attention of training rounds, gradients included."""

import math

import pytest
import torch
from torch import Tensor

from specheads.core.features import PackedDocuments
from specheads.heads.layers import path_attention
from specheads.heads.layers.attention import _mix, near

ROWS, TIME, WIDTH = 2, 11, 8
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])


def places() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [*range(TIME)]])


def scores_of(queries: Tensor, keys: Tensor, documents: path_attention.Bounds) -> Tensor:
    """Return masked scores (head, position, position), keys repeated for each head of a group."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("thd,shd->hts", queries, keys) / math.sqrt(queries.shape[-1])
    index = torch.arange(len(queries))
    number = (index[:, None] >= documents[0][1:]).sum(-1)
    visible = (number[:, None] == number) & (index[:, None] >= index)
    if documents[2] is not None:
        visible &= index > index[:, None] - documents[2]
    return scores.masked_fill(~visible, -math.inf)


def forward(documents: path_attention.Bounds, queries: Tensor, keys: Tensor, values: Tensor):
    """Replace the kernel's forward pass: return the output and its log-sum-exp."""
    scores = scores_of(queries, keys, documents)
    values = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


def backward(documents: path_attention.Bounds, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the kernel's backward pass, which gets only the log-sum-exp and the output."""
    grad, queries, keys, values, mixed, total = tensors
    group = queries.shape[1] // keys.shape[1]
    weights = (scores_of(queries, keys, documents) - total[..., None]).exp()
    wide_keys, wide_values = (one.repeat_interleave(group, dim=1) for one in (keys, values))
    meant = (grad * mixed).sum(-1).T[..., None]
    slopes = weights * (torch.einsum("thd,shd->hts", grad, wide_values) - meant)
    slopes = slopes / math.sqrt(queries.shape[-1])
    of_keys = torch.einsum("hts,thd->shd", slopes, queries).unflatten(1, (-1, group)).sum(2)
    of_values = torch.einsum("hts,thd->shd", weights, grad).unflatten(1, (-1, group)).sum(2)
    return torch.einsum("hts,shd->thd", slopes, wide_keys), of_keys, of_values


def problem(heads: int, shared: int, levels: int, how: dict) -> list[Tensor]:
    torch.manual_seed(levels)
    return [
        torch.randn(ROWS, heads, TIME, WIDTH, **how).requires_grad_(),
        torch.randn(ROWS, shared, 2, TIME, WIDTH, **how).requires_grad_(),
        torch.randn(ROWS, shared, 2, TIME, levels, WIDTH, **how).requires_grad_(),
    ]


def agree(leaves: list[Tensor], tolerance: float, window: int | None = None) -> None:
    device = leaves[0].device
    documents = DOCUMENTS.to(device)
    visible = near((documents[:, :, None] == documents[:, None]).tril(), window)
    mixed = path_attention.path_attention(
        leaves[0], leaves[1], leaves[2], PackedDocuments.of(places().to(device)), window
    )
    outer = torch.randn_like(mixed)
    found = [mixed, *torch.autograd.grad(mixed, leaves, outer, allow_unused=True)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    plain = _mix(wide[0], wide[1], visible, wide[2])
    wanted = [plain, *torch.autograd.grad(plain, wide, outer.double(), allow_unused=True)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize(("heads", "shared", "window"), [(2, 2, None), (4, 2, None), (4, 2, 3)])
def test_merged_softmax_and_its_gradients_equal_the_plain_ones(
    heads: int, shared: int, window: int | None, levels: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(path_attention, "_flash_forward", forward)
    monkeypatch.setattr(path_attention, "_flash_backward", backward)
    agree(problem(heads, shared, levels, {"dtype": torch.float64}), 1e-10, window)


def test_an_error_of_the_backward_pass_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    def shifted(documents: path_attention.Bounds, grad: Tensor, *rest: Tensor):
        return backward(documents, grad.roll(1, 0), *rest)

    monkeypatch.setattr(path_attention, "_flash_forward", forward)
    monkeypatch.setattr(path_attention, "_flash_backward", shifted)
    with pytest.raises(AssertionError):
        agree(problem(2, 2, 1, {"dtype": torch.float64}), 1e-10)
