"""Forwards of a base's own model: whole texts, trees, and prompts that are committed.

See docs/tree_verification.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from specheads.base.cache import RowCache, upload
from specheads.base.flex_attention import attending, reads_in_place, tree_block_mask
from specheads.base.masks import attention_windows, context_length, tree_mask
from specheads.base.projection import VocabularyProjection, vocabulary_projection
from specheads.core.features import Features
from specheads.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verification:
    """What one forward of the base says of every node of a tree."""

    logits: Float[Tensor, "batch node vocab"]
    features: Features
    ancestors: Bool[Tensor, "batch node node"]


def answer(
    model: PreTrainedModel, projection: VocabularyProjection, **inputs: Any
) -> tuple[Tensor, Any]:
    """Return the logits of every position and what the layers gave: the part that is compiled."""
    out = model.base_model(**inputs)
    return projection(out.last_hidden_state), out


def read(
    model: PreTrainedModel, tokens: Int[Tensor, "batch time"], aux_layers: tuple[int, ...] = ()
) -> Features:
    """Read whole sequences from their first token, without logits and without a cache."""
    inputs = {"input_ids": tokens, "use_cache": False}
    out = model.base_model(**inputs, output_hidden_states=bool(aux_layers))
    return _features(out, tokens, aux_layers)


@torch.no_grad()
def verify(
    model: PreTrainedModel,
    tree: TokenTree,
    cache: RowCache,
    aux_layers: tuple[int, ...] = (),
    run: Callable[..., tuple[Tensor, Any]] = answer,
) -> Verification:
    """Run every node of a tree in one forward, each seeing the committed text and its path.

    Args:
        model: Any that `selfcheck.check` accepts.
        tree: Nodes of every row.
        cache: Keys and values of the committed text; those of the nodes go to its scratch.
        aux_layers: Layers whose residual stream is wanted too.
        run: `answer`, or what it was compiled to.

    Raises:
        ValueError: The rows of a contiguous cache have no room for the tree.
        PoolFullError: The pool of a paged one has too few free blocks; nothing has changed.
    """
    ancestors = tree.ancestors()
    cache.reserve(tree.tokens.shape[1])
    inputs = _inputs(model, tree.tokens, ancestors, ancestors.sum(-1) - 1, cache)
    with attending(model.config.get_text_config(), cache):
        projection = vocabulary_projection(model)
        logits, out = run(model, projection, **inputs, output_hidden_states=bool(aux_layers))
    return Verification(logits, _features(out, tree.tokens, aux_layers), ancestors)


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    tokens: Int[Tensor, "batch time"],
    cache: RowCache,
    counts: list[int],
    aux_layers: tuple[int, ...],
    chunk: int,
) -> tuple[Float[Tensor, "batch vocab"], Features]:
    """Read and commit prompts of different lengths: chunk by chunk, each a tree without branches.

    Args:
        model: As in `verify`.
        tokens: Prompts, padded on the right; row b counts its first `counts[b]`, at least one.
        cache: Keys and values of earlier text of the same rows, or none.
        counts: Tokens of each row; the padding after them is never attended to.
        aux_layers: As in `verify`.
        chunk: Positions a forward reads at most: masks and activations grow with it and not
            with the prompt.

    Returns:
        The logits after each row's last token, and the features of every position.

    Raises:
        ValueError: As in `verify`.
        PoolFullError: As in `verify`; the chunks before stay committed.
    """
    config, pieces = model.config.get_text_config(), []
    for first in range(0, tokens.shape[1], chunk):
        piece = tokens[:, first : first + chunk]
        batch, length = piece.shape
        left = [min(max(count - first, 0), length) for count in counts]
        depths = torch.arange(length, device=tokens.device)
        ancestors = (depths[:, None] >= depths).expand(batch, -1, -1)
        cache.reserve(length, left)
        inputs = _inputs(model, piece, ancestors, depths.expand(batch, -1), cache)
        with attending(config, cache):
            out = model.base_model(**inputs, output_hidden_states=bool(aux_layers))
        pieces.append(_features(out, piece, aux_layers))
        cache.commit([list(range(count)) for count in left])
    features = Features.consecutive(pieces)
    last = upload([count - 1 for count in counts], model.device)
    return vocabulary_projection(model)(features.at(last[:, None]).hidden[:, 0]), features


def _inputs(
    model: PreTrainedModel, tokens: Tensor, ancestors: Tensor, depths: Tensor, cache: RowCache
) -> dict[str, Any]:
    """Return what the model is given: tokens, their masks and positions, and the cache."""
    config = model.config.get_text_config()
    windows = attention_windows(config)
    masks = {
        window: _mask(ancestors, depths, cache, window, model.dtype)
        for window in set(windows.values())
    }
    by_type = {kind: masks[window] for kind, window in windows.items()}
    limit = context_length(config) - 1
    return {
        "input_ids": tokens,
        # models that mix kinds of layer take one mask a kind; the others take the mask
        "attention_mask": by_type if len(by_type) > 1 else next(iter(masks.values())),
        # a tree may reach past the context at its end, with nodes never asked for
        "position_ids": (cache.positions[:, None] + depths).clamp(max=limit),
        "past_key_values": cache,
        "use_cache": True,
    }


def _mask(
    ancestors: Tensor, depths: Tensor, cache: RowCache, window: int | None, dtype: torch.dtype
) -> Tensor | BlockMask:
    if reads_in_place(cache):
        return tree_block_mask(ancestors, depths, cache, window)
    return tree_mask(ancestors, depths, cache, window, dtype)


def _features(out: Any, tokens: Tensor, aux_layers: tuple[int, ...]) -> Features:
    streams = [out.hidden_states[layer] for layer in aux_layers]
    return Features(out.last_hidden_state, torch.cat(streams, -1) if streams else None, tokens)
