"""Our own layout, as `save_pretrained` writes it; the plug-ins read it."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from torch import Tensor

from specheads.core.drafter import Head

Values = dict[str, Collection[Any] | None]


def _every(*names: str) -> Values:
    return dict.fromkeys(names)


SETTINGS: dict[str, Values] = {
    "medusa": _every("depth", "num_layers", "projection", "rank", "draft_tokens"),
    "mlp_speculator": _every(
        "depth", "inner_dim", "state", "tie_weights", "scale_input", "draft_tokens"
    ),
    "hydra_heads": _every("depth", "num_layers", "draft_tokens", "prefix")
    | _every("attention_heads", "key_value_heads", "inner_dim", "rope_theta"),
    "redrafter": _every("depth", "num_layers", "exit_dim", "rnn", "draft_tokens"),
}
"""What the gate's readers know of each kind's settings: every value."""


def config(head: Head) -> dict[str, Any]:
    """Return the kind, its settings and the base's sizes."""
    sizes = {"width": head.width, "vocab_size": head.vocab_size}
    return {"kind": head.kind, **asdict(head.config), **sizes}


def tensors(head: Head) -> dict[str, Tensor]:
    """Return what the head owns; what it borrows from its base is never among it."""
    return head.state_dict()
