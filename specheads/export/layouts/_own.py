"""Our own layout, as `save_pretrained` writes it; the plug-ins read it."""

from collections.abc import Collection
from typing import Any

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
