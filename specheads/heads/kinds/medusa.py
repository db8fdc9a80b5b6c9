"""Medusa: independent heads that read the same hidden state.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.1; FasterDecoding/Medusa.
"""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specheads.core.drafter import Anchors, Guesses, Nodes, Projection, State, States, Tokens
from specheads.core.features import Committed, Features
from specheads.core.foreign import LAYERS, refuse_unused
from specheads.core.ranges import Depth, DepthOrZero, NonNegativeInt, Width, one_of
from specheads.heads.checkpoint import fill_head
from specheads.heads.layers.common import BorrowingHead, ResidualBlock


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of Medusa heads; the defaults are the published ones."""

    depth: Depth = 5
    """Number of levels it drafts, each with its own head."""
    num_layers: DepthOrZero = 1
    """Number of residual blocks of each head."""
    projection: Annotated[str, one_of("own", "shared", "low_rank")] = "own"
    """Vocabulary projection: own (one matrix per head), shared (the base's, frozen and not saved)
    or low_rank (the base's, plus a low-rank update per head)."""
    rank: Width = 64
    """Rank of the update, with projection=low_rank."""
    draft_tokens: NonNegativeInt = 0
    """Size of the draft vocabulary: the most frequent tokens of the training text. Zero is all."""


@dataclass(frozen=True, slots=True)
class MedusaDraft:
    """State of a draft."""

    hidden: Float[Tensor, "batch 1 width"]
    """The base's last hidden state."""
    level: int


class Head(BorrowingHead):
    """`depth` heads, each with residual blocks and a vocabulary projection.

    With a low rank, the logits are W h + U (D h), with the base's projection W. States are then
    [h, D h] and projections [W, U], so the loss uses one matrix and W + U D is never rounded.
    """

    borrows_embedding = False

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.borrows_projection = config.projection != "own"
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.num_layers)))
            for _ in range(self.depth)
        )

        def linear_layers(inputs: int, outputs: int, projection: str) -> nn.ModuleList:
            count = self.depth if config.projection == projection else 0
            return nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for _ in range(count))

        self.head = linear_layers(width, self.drafted_size, "own")
        self.down = linear_layers(width, config.rank, "low_rank")
        self.up = linear_layers(config.rank, self.drafted_size, "low_rank")
        for up in self.up:
            nn.init.zeros_(up.get_parameter("weight"))

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Start from the base's next-token distribution: the blocks start as identities."""
        for head in self.head:
            head.get_parameter("weight").data.copy_(projection)

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield each head's state; no head reads a drafted token."""
        for level in range(self.depth):
            yield self.level_state(features.hidden, level)

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection of a level, without a bias."""
        if self.head:
            return Projection(self.head[level].get_parameter("weight"))
        return self.corrected_projection(self.up[level]) if self.up else super().projection(level)

    def logits(
        self, state: Float[Tensor, "*batch width"], level: int
    ) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of a state of this level."""
        if self.up:
            return self.corrected_logits(state, self.up[level])
        return super().logits(state, level)

    def begin(self, committed: Committed, memory: None) -> Guesses:
        """Return the logits after the root, from the base's last hidden state."""
        hidden = committed.last_hidden()
        return self.logits(self.level_state(hidden, 0), 0), MedusaDraft(hidden, 0)

    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Return the same logits for every node of the level: Medusa ignores the path."""
        level = state.level + 1
        logits = self.logits(self.level_state(state.hidden, level), level)
        return logits.expand(-1, tokens.shape[1], -1), replace(state, level=level)

    def level_state(self, hidden: Tensor, level: int) -> Tensor:
        """Return the state of a level's head."""
        state = self.blocks[level](hidden)
        return torch.cat([state, self.down[level](state)], dim=-1) if self.down else state


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read FasterDecoding's layout: `{head}.{layer}.linear.*`, then `{head}.{layers}.weight`.

    In vLLM's layout these are `blocks.{head}.layers.{layer}.*`, without biases unless
    `medusa_fc_bias` is set, and `lm_heads.{head}.weight`.
    """
    by_vllm = config.get("model_type") == "medusa" and "num_heads" in config
    if "medusa_num_heads" not in config and not by_vllm:
        return None
    refuse_unused(
        "medusa",
        config,
        # the heads have no attention, and engines choose trees of their own
        used=(
            *("medusa_num_heads", "medusa_num_layers", "max_paths", "topk", "medusa_choices"),
            *("num_heads", "medusa_fc_bias", *LAYERS),
        ),
        fixed={"original_lm_head": False, "logit_scale": 1}
        | {"truncated_vocab_size": config.get("vocab_size")}
        | ({} if by_vllm else {"medusa_fc_bias": True}),
    )
    depth = config["num_heads" if by_vllm else "medusa_num_heads"]
    num_layers = config.get("num_hidden_layers" if by_vllm else "medusa_num_layers", 1)
    weights = {
        _rename(name.removeprefix("medusa_heads."), num_layers): value
        for name, value in tensors.items()
    }
    for name, weight in list(weights.items()):
        if name.endswith("linear.weight") and not config.get("medusa_fc_bias", not by_vllm):
            weights.setdefault(name.replace("weight", "bias"), weight.new_zeros(len(weight)))
    rows, width = weights["head.0.weight"].shape
    head = Head(Config(depth=depth, num_layers=num_layers), width=width, vocab_size=rows)
    fill_head(head, weights)
    return head


def _rename(name: str, num_layers: int) -> str:
    """Return our name of a tensor in either layout."""
    name = name.replace("lm_heads.", "head.")
    if name.startswith("blocks."):
        return re.sub(r"\.layers\.(\d+)\.", r".\1.linear.", name)
    head, layer, suffix = (*name.split(".", 2), "")[:3]
    if head == "head":
        return name
    if layer == str(num_layers):
        return f"head.{head}.{suffix}"
    return f"blocks.{head}.{layer}.{suffix}"
