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


def path_attention(
    queries: Float[Tensor, "batch head time width"],
    text: Float[Tensor, "batch shared 2 time width"],
    path: Float[Tensor, "batch shared 2 time level width"],
    documents: PackedDocuments,
    window: int | None = None,
) -> Float[Tensor, "batch head time width"]:
    """Attend to the document up to each position and to its path, as under one softmax.

    The last `window` positions of the document are seen; None is all.
    """
    dtype = product_dtype(queries)
    rows = (
        values.transpose(1, 2).flatten(0, 1).to(dtype)
        for values in (queries, *text.unbind(2), *path.unbind(2))
    )
    mixed = _PathAttention.apply(documents, window, *rows)
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (len(queries), -1)).transpose(1, 2)


class _PathAttention(torch.autograd.Function):
    """Tensors are (position, head, width), paths (position, head, level, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        documents: PackedDocuments,
        window: int | None,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        path_keys: Tensor,
        path_values: Tensor,
    ) -> Tensor:
        """Return the joint output; store its log-sum-exp for the gradients."""
        mixed, total = _flash_forward(documents, window, queries, keys, values)
        if path_keys.shape[2]:
            # (position, shared head, head of its group, ...)
            scores = _path_scores(queries, path_keys)
            text_total = total.T.unflatten(1, (keys.shape[1], -1))[..., None]
            joint_total = torch.cat([text_total, scores], dim=-1).logsumexp(-1, keepdim=True)
            weights = (scores - joint_total).exp().to(values.dtype)
            text_share = (text_total - joint_total).exp().flatten(1, 2)
            path_mixed = torch.einsum("tsgl,tsld->tsgd", weights, path_values).flatten(1, 2)
            mixed = (text_share * mixed + path_mixed).to(values.dtype)
            total = joint_total.flatten(1).T.contiguous()
        ctx.documents, ctx.window = documents, window
        ctx.save_for_backward(queries, keys, values, path_keys, path_values, mixed, total)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of queries, keys and values, of the document and of the path."""
        queries, keys, values, path_keys, path_values, mixed, total = ctx.saved_tensors
        grad = grad_outputs[0].to(mixed.dtype).contiguous()
        gradients = _flash_backward(
            ctx.documents, ctx.window, grad, queries, keys, values, mixed, total
        )
        grad_queries, grad_keys, grad_values = gradients
        if not path_keys.shape[2]:
            no_path = torch.zeros_like(path_keys), torch.zeros_like(path_values)
            return None, None, grad_queries, grad_keys, grad_values, *no_path
        groups = keys.shape[1], -1
        joint_total = total.T.unflatten(1, groups)[..., None]
        weights = (_path_scores(queries, path_keys) - joint_total).exp()
        grouped, grouped_grad = queries.unflatten(1, groups), grad.unflatten(1, groups)
        mean = (_to_float32(grad) * _to_float32(mixed)).sum(-1).unflatten(1, groups)[..., None]
        slopes = _to_float32(torch.einsum("tsgd,tsld->tsgl", grouped_grad, path_values)) - mean
        slopes = (weights * slopes / math.sqrt(queries.shape[-1])).to(queries.dtype)
        weights = weights.to(grad.dtype)
        return (
            None,
            None,
            grad_queries + torch.einsum("tsgl,tsld->tsgd", slopes, path_keys).flatten(1, 2),
            grad_keys,
            grad_values,
            torch.einsum("tsgl,tsgd->tsld", slopes, grouped),
            torch.einsum("tsgl,tsgd->tsld", weights, grouped_grad),
        )


def _path_scores(queries: Tensor, path_keys: Tensor) -> Tensor:
    """Return the scores of each position's path, in float32 at least."""
    grouped = queries.unflatten(1, (path_keys.shape[1], -1))
    scores = torch.einsum("tsgd,tsld->tsgl", grouped, path_keys)
    return _to_float32(scores) / math.sqrt(queries.shape[-1])


def _to_float32(values: Tensor) -> Tensor:
    """Return values in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _flash_forward(
    documents: PackedDocuments, window: int | None, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp (head, position) of causal attention by document."""
    bounds, longest, sides = documents.bounds, max(documents.lengths), _window_sides(window)
    mixed, total, *_ = torch.ops.aten._flash_attention_forward(
        *(queries, keys, values, bounds, bounds, longest, longest, 0.0, True, False), **sides
    )
    return mixed, total


def _flash_backward(
    documents: PackedDocuments,
    window: int | None,
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given that of the output."""
    bounds, longest, sides = documents.bounds, max(documents.lengths), _window_sides(window)
    # without dropout no random state is read
    seed = torch.zeros(2, dtype=torch.uint64, device=bounds.device)
    unused = torch.zeros((), dtype=torch.uint64, device=bounds.device)
    tensors = grad, queries, keys, values, mixed, total
    return torch.ops.aten._flash_attention_backward(
        *(*tensors, bounds, bounds, longest, longest, 0.0, True, seed, unused), **sides
    )


def _window_sides(window: int | None) -> dict[str, int]:
    """Return the kernel's arguments: the numbers of positions seen on both sides of each one."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
