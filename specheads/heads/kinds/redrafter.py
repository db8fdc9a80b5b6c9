"""ReDrafter: one small recurrent cell over the base's embeddings, shared by all levels.

Source: Cheng et al. 2024, arXiv:2403.09919; apple/ml-recurrent-drafter.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Projection
from specheads.core.foreign import refuse_unused
from specheads.core.ranges import Depth, DepthOrZero, LayerIndex, NonNegativeInt, WidthOrZero
from specheads.heads.checkpoint import fill_head
from specheads.heads.layers.common import RecurrentHead, ResidualBlock


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of a recurrent drafter; the defaults are the published ones."""

    depth: Depth = 5
    """Number of levels it trains and drafts; its size does not depend on this."""
    num_layers: DepthOrZero = 2
    """Number of residual blocks before the vocabulary projection."""
    exit_dim: WidthOrZero = 0
    """Width of blocks and projection. Zero is twice the base's width, which needs no adapter."""
    rnn: bool = True
    """Whether a recurrent cell reads the drafted tokens. Otherwise their embeddings are summed."""
    aux_layers: list[LayerIndex] | None = None
    """Base layers that it reads next to the final hidden state: k is the residual stream after k
    layers. Null is none; empty selects 2, n // 2 and n - 3 of n, or others for a shallow base."""
    draft_tokens: NonNegativeInt = 0
    """Size of the draft vocabulary: the most frequent tokens of the training text. Zero is all."""


class Head(RecurrentHead):
    """state <- SiLU(W embedding + U state + b), starting at zero; logits from [hidden, state]."""

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        exit_dim = config.exit_dim or 2 * width
        self.rnn_w = nn.Linear(width, width, bias=False) if config.rnn else None
        self.rnn_u = nn.Linear(width, width) if config.rnn else None
        self.input_proj = nn.Linear(2 * width, exit_dim) if exit_dim != 2 * width else None
        self.blocks = nn.Sequential(*(ResidualBlock(exit_dim) for _ in range(config.num_layers)))
        self.head = nn.Linear(exit_dim, self.drafted_size, bias=False)

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Start from the base's next-token distribution, and scale the cell to the embeddings.

        With an `exit_dim` below the base's width the projection starts randomly.
        """
        width = self.width
        if self.rnn_w is not None:
            # scales the embeddings, which are often small, to unit size
            size = embedding.pow(2).mean().sqrt().item() * math.sqrt(width)
            nn.init.normal_(self.rnn_w.weight, std=1 / size)
        if self.head.in_features < width:
            return
        if self.input_proj is not None:
            nn.init.eye_(self.input_proj.weight)
            nn.init.zeros_(self.input_proj.bias)
        nn.init.zeros_(self.head.weight)
        self.head.weight.data[:, :width].copy_(projection)

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection, the same at every level, without a bias."""
        return Projection(self.head.weight)

    def first_state(self, hidden: Tensor) -> Tensor:
        """Return a state of zeros."""
        return torch.zeros_like(hidden)

    def read_token(self, state: Tensor, embedded: Tensor, level: int) -> Tensor:
        """Return the state after one more token."""
        if self.rnn_w is None or self.rnn_u is None:
            return state + embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def output(self, state: Tensor, hidden: Tensor, level: int) -> Tensor:
        """Return the output of the blocks, which read the base's hidden state and this one."""
        joined = torch.cat([hidden.expand_as(state), state], dim=-1)
        return self.blocks(joined if self.input_proj is None else self.input_proj(joined))


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read Apple's layout: `rnn_*`, `input_proj`, `lm_head.{layer}.linear`, `lm_head.{layers}`."""
    if config.get("model_type") != "recurrent_drafting_drafter":
        return None
    refuse_unused(
        "redrafter",
        config,
        used=(
            *("num_draft_layers", "exit_dim", "rnn", "hidden_size", "vocab_size"),
            # the number of tokens that training looks back
            "num_lookback_tokens",
        ),
    )
    settings = Config(
        num_layers=config["num_draft_layers"], exit_dim=config["exit_dim"], rnn=config["rnn"]
    )
    head = Head(settings, width=config["hidden_size"], vocab_size=config["vocab_size"])
    fill_head(head, {_rename(name, settings.num_layers): value for name, value in tensors.items()})
    return head


def _rename(name: str, num_layers: int) -> str:
    if name == f"lm_head.{num_layers}.weight":
        return "head.weight"
    return name.replace("lm_head.", "blocks.", 1)
