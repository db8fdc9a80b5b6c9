"""Settings of heads with attention layers; the `Config` of each kind adds its own."""

from dataclasses import dataclass

from specheads.config import check
from specheads.config.ranges import Count, Width


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Sizes of a head's layers, and its draft vocabulary."""

    attention_heads: Width = 0
    """Number of attention heads. Zero is one per 64 channels of the base."""

    key_value_heads: Width = 0
    """Number of key and value heads. Zero is the number of attention heads."""

    head_dim: Width = 0
    """Number of channels per attention head. Zero is the base's width divided by the heads."""

    inner_dim: Width = 0
    """Width of its MLPs. Zero is 8/3 of the base's width, rounded up to a multiple of 16."""

    draft_tokens: Count = 0
    """Size of the draft vocabulary: the most frequent tokens of the training text. Zero is all."""

    def __post_init__(self) -> None:
        check(self, "head")
