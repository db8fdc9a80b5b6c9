"""Settings of heads with layers of attention: each kind's `Config` adds its own."""

from dataclasses import dataclass

from specheads.config import check
from specheads.config.ranges import Count, Width


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Sizes of a head's layers, and what it can draft."""

    attention_heads: Width = 0
    """Number of attention heads. Zero takes one for each 64 channels of the base."""

    key_value_heads: Width = 0
    """Number of heads of keys and values. Zero takes as many as there are attention heads."""

    head_dim: Width = 0
    """Number of channels of an attention head. Zero divides the base's among them."""

    inner_dim: Width = 0
    """Width of its MLPs. Zero takes 8/3 of the base's, rounded up to a multiple of 16."""

    draft_tokens: Count = 0
    """Number of tokens it can draft, the most frequent ones of the training text. Zero is all."""

    def __post_init__(self) -> None:
        check(self, "head")
