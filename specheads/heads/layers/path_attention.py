"""Training attention on a GPU: flash attention over packed documents, and each position's own path.

A position attends to its document so far and to the few tokens drafted from it, under one softmax.
Flash attention computes the first part and returns its log-sum-exp, with which the path's part is
merged, so no weight of a pair of positions is stored.

Source: Dao 2023, arXiv:2307.08691, section 3.1. The backward kernel computes gradients from the
output and the log-sum-exp. Given those of the joint softmax, it returns the document's part of the
gradients; the path's part is written out here.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specheads.core.features import PackedDocuments
from specheads.core.kernels import product_dtype

Bounds = tuple[Tensor, int, int | None]
"""First position of each document and the end of the last one, in int32, the longest length, and
the number of positions that each one sees, itself included; None is all up to itself."""


def path_attention(
    queries: Float[Tensor, "batch head time width"],
    past: Float[Tensor, "batch shared 2 time width"],
    path: Float[Tensor, "batch shared 2 time level width"],
    documents: PackedDocuments,
    window: int | None = None,
) -> Float[Tensor, "batch head time width"]:
    """Attend to the document up to each position and to its path, as under one softmax.

    The last `window` positions of the document are seen; None is all.
    """
    dtype = product_dtype(queries)
    inputs = (queries, *past.unbind(2), *path.unbind(2))
    rows = (one.transpose(1, 2).flatten(0, 1).to(dtype) for one in inputs)
    bounds = documents.bounds, max(documents.lengths), window
    mixed = _PathAttention.apply(bounds, *rows)
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (len(queries), -1)).transpose(1, 2)


class _PathAttention(torch.autograd.Function):
    """Tensors are (position, head, width), paths (position, head, level, width)."""

    @staticmethod
    def forward(ctx: Any, documents: Bounds, *tensors: Tensor) -> Tensor:
        """Return the joint output; keep its log-sum-exp for the gradients."""
        queries, keys, values, own_keys, own_values = tensors
        mixed, total = _flash_forward(documents, queries, keys, values)
        if own_keys.shape[2]:
            # (position, shared head, head of its group, ...)
            scores = _scores(queries, own_keys)
            text = total.T.unflatten(1, (keys.shape[1], -1))[..., None]
            joint = torch.cat([text, scores], dim=-1).logsumexp(-1, keepdim=True)
            weights = (scores - joint).exp().to(values.dtype)
            share = (text - joint).exp().flatten(1, 2)
            alone = torch.einsum("tsgl,tsld->tsgd", weights, own_values).flatten(1, 2)
            mixed = (share * mixed + alone).to(values.dtype)
            total = joint.flatten(1).T.contiguous()
        ctx.documents = documents
        ctx.save_for_backward(*tensors, mixed, total)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of queries, keys and values, of the document and of the path."""
        queries, keys, values, own_keys, own_values, mixed, total = ctx.saved_tensors
        grad = grad_outputs[0].to(mixed.dtype).contiguous()
        found = _flash_backward(ctx.documents, grad, queries, keys, values, mixed, total)
        if not own_keys.shape[2]:
            return None, *found, torch.zeros_like(own_keys), torch.zeros_like(own_values)
        groups = keys.shape[1], -1
        joint = total.T.unflatten(1, groups)[..., None]
        weights = (_scores(queries, own_keys) - joint).exp()
        grouped, outer = queries.unflatten(1, groups), grad.unflatten(1, groups)
        meant = (_wide(grad) * _wide(mixed)).sum(-1).unflatten(1, groups)[..., None]
        slopes = _wide(torch.einsum("tsgd,tsld->tsgl", outer, own_values)) - meant
        slopes = (weights * slopes / math.sqrt(queries.shape[-1])).to(queries.dtype)
        weights = weights.to(grad.dtype)
        of_queries = torch.einsum("tsgl,tsld->tsgd", slopes, own_keys).flatten(1, 2)
        return (
            None,
            found[0] + of_queries,
            *found[1:],
            torch.einsum("tsgl,tsgd->tsld", slopes, grouped),
            torch.einsum("tsgl,tsgd->tsld", weights, outer),
        )


def _scores(queries: Tensor, own_keys: Tensor) -> Tensor:
    """Return the scores of each position's path, in float32 at least."""
    grouped = queries.unflatten(1, (own_keys.shape[1], -1))
    scores = torch.einsum("tsgd,tsld->tsgl", grouped, own_keys)
    return _wide(scores) / math.sqrt(queries.shape[-1])


def _wide(values: Tensor) -> Tensor:
    """Return values in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _flash_forward(documents: Bounds, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp (head, position) of causal attention by document.

    Takes queries, keys and values.
    """
    bounds, longest, window = documents
    found = torch.ops.aten._flash_attention_forward(
        *tensors, bounds, bounds, longest, longest, 0.0, True, False, **_sides(window)
    )
    return found[0], found[1]


def _flash_backward(documents: Bounds, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Takes the gradient of the output, queries, keys, values, the output and its log-sum-exp.
    """
    bounds, longest, window = documents
    # without dropout no random state is read
    seed = torch.zeros(2, dtype=torch.uint64, device=bounds.device)
    unused = torch.zeros((), dtype=torch.uint64, device=bounds.device)
    return torch.ops.aten._flash_attention_backward(
        *tensors, bounds, bounds, longest, longest, 0.0, True, seed, unused, **_sides(window)
    )


def _sides(window: int | None) -> dict[str, int]:
    """Return the kernel's arguments: the numbers of positions seen on both sides of each one."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
