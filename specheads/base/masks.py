"""Attention masks of trees and packed documents, and the attention implementations that take them.

See docs/tree_verification.md.
"""

import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from specheads.base.cache import RowCache
from specheads.base.recurrent import STATEFUL, STATELESS
from specheads.core.errors import InputError
from specheads.core.features import within_documents

ATTENTION = ("sdpa", "eager")
"""Attention implementations that take an arbitrary 4D mask."""


def tree_mask(
    ancestors: Bool[Tensor, "batch node node"],
    depths: Int[Tensor, "batch node"],
    cache: RowCache,
    window: int | None,
    dtype: torch.dtype,
) -> Float[Tensor, "batch 1 node slot"]:
    """Return the additive mask under which each node sees the committed text and its path.

    A node sees the last `window` positions, itself included; None is all. Siblings share one.
    """
    batch, num_nodes, _ = ancestors.shape
    end = cache.extent(num_nodes)
    if cache.shared_length is not None and window is None:
        # every step takes this way with rows of one length
        blocked = torch.zeros(batch, num_nodes, end, dtype=dtype, device=ancestors.device)
        blocked[..., cache.shared_length :].masked_fill_(~ancestors, torch.finfo(dtype).min)
        return blocked[:, None]
    scratch = cache.scratch(num_nodes)
    slots = torch.arange(end, device=ancestors.device)
    visible = (slots < cache.lengths[:, None])[:, None].repeat(1, num_nodes, 1)
    visible.scatter_(-1, scratch[:, None].expand(-1, num_nodes, -1), ancestors)
    if window is not None:
        node_positions = cache.positions[:, None] + depths
        positions = cache.slot_positions(end).scatter(1, scratch, node_positions)
        visible = visible & (positions[:, None] > node_positions[..., None] - window)
    return additive(visible, dtype)


def document_mask(
    document_ids: Int[Tensor, "batch time"], window: int | None, dtype: torch.dtype
) -> Float[Tensor, "batch 1 time time"]:
    """Return the additive mask under which each packed document sees only itself.

    `window` is that of `tree_mask`. Documents are contiguous, so slot distance is the distance.
    """
    visible = within_documents(document_ids)
    return additive(visible if window is None else visible.triu(1 - window), dtype)


def additive(visible: Bool[Tensor, "batch node slot"], dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the scores."""
    blocked = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return blocked.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the window of each kind of layer; refuse kinds that cannot be rolled back."""
    config: Any = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True) or not _reads_window(model):
        window = None
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = set(getattr(config, "layer_types", None) or []) - {*STATEFUL, *STATELESS}
    if unknown := sorted(kinds - set(windows)):
        raise InputError(
            f"tree verification needs layers whose state can be rolled back; "
            f"{config.model_type!r} has layers of kind {', '.join(unknown)}; choose a base with "
            "full, sliding or linear attention, state spaces or short convolutions"
        )
    if "local" in (getattr(config, "attention_layers", None) or []):
        raise InputError(
            f"tree verification needs windows that follow the mask; {config.model_type!r} has "
            "attention_layers of kind local, which count slots, not positions; choose a base "
            "with global, full or sliding attention"
        )
    return {kind: windows[kind] for kind in kinds} or {"all": window}


MAX_LENGTH = 131_072
"""Length of the context of a base whose config has none, as those of Mamba."""
TO_ATTENTION = 'sliding_window=getattr(self.config, "sliding_window", None)'
"""Code that passes a window to the attention function, and not to its mask."""


def _reads_window(model: PreTrainedModel) -> bool:
    """Return whether the code of a model reads `sliding_window` of its config.

    Llama ignores it. OLMoE passes it to the attention function only, where sdpa and eager drop it.
    """
    codes = sources(map(type, (model, model.base_model, model.get_decoder())))
    return not codes or any("sliding_window" in code.replace(TO_ATTENTION, "") for code in codes)


def sources(classes: Iterable[type]) -> list[str]:
    """Return the code of transformers' modules that these classes and their bases are from."""
    modules = {parent.__module__ for cls in classes for parent in cls.__mro__}
    names = [name for name in modules if name.startswith("transformers.models.")]
    return [inspect.getsource(sys.modules[name]) for name in names]


def context_length(config: Any) -> int:
    """Return the longest text in which the encoding of a position does not change."""
    limits = [getattr(config, "max_position_embeddings", MAX_LENGTH)]
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # other angles are used beyond its original context, and cached keys keep the old ones
        if settings.get("rope_type") == "longrope":
            original = settings.get("original_max_position_embeddings")
            limits.append(original or config.original_max_position_embeddings)
    return min(limits)


def refuse_attention(name: str | None) -> None:
    """Refuse an attention implementation that takes no 4D mask: a node must see its path only."""
    if name not in ATTENTION:
        raise InputError(
            f"tree verification needs attention of {ATTENTION}, got {name!r}; load it with one"
        )
