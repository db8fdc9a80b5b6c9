"""Settings that DFlash and DSpark share: each kind's `Config` adds its own."""

from dataclasses import dataclass, field

from specheads.config.ranges import Depth, Layer, Positive, Scale, Token
from specheads.heads.layers.attention_config import AttentionConfig


@dataclass(kw_only=True, slots=True)
class BlockConfig(AttentionConfig):
    """Settings of a head that drafts a block; the defaults are those of DeepSpec for 7 tokens."""

    depth: Depth = 7
    """Number of levels it drafts, all of them in one forward."""

    num_layers: Depth = 5
    """Number of layers."""

    aux_layers: list[Layer] = field(default_factory=list)
    """Base layers it reads, in growing order: k is the residual stream after k layers. Empty takes
    as many as num_layers, evenly from 2 to n - 2 of n, or of a shallow base 1 to n - 1."""

    rope_theta: Scale = 1_000_000.0
    """Base of the rotary position embedding."""

    epsilon: Scale = 1e-6
    """Epsilon of its norms."""

    mask_token: Token = -1
    """Token whose embedding stands where one is to be drafted: any that text rarely has. -1 takes
    the vocabulary's last."""

    sample_from_anchor: bool = False
    """Whether the anchor's own slot drafts the first level, and each slot the token after it;
    otherwise masks draft the tokens in whose place they stand."""

    num_anchors: Positive = 512
    """Positions of a sequence that a training step drafts from, drawn anew each time."""

    def __post_init__(self) -> None:
        if isinstance(self.aux_layers, tuple):
            self.aux_layers = list(self.aux_layers)
        AttentionConfig.__post_init__(self)
