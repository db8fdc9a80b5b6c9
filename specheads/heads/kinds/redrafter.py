"""ReDrafter: one small recurrent cell over the base's embeddings, shared by all levels.

Source: Cheng et al. 2024, arXiv:2403.09919; apple/ml-recurrent-drafter.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Anchors, Guesses, Nodes, Projection, State, States, Tokens
from specheads.core.features import Committed, Features
from specheads.core.foreign import refuse_unused
from specheads.core.ranges import Depth, DepthOrZero, LayerIndex, NonNegativeInt, WidthOrZero
from specheads.heads.checkpoint import fill_head
from specheads.heads.layers.common import BorrowingHead, ResidualBlock, pick_parents


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


@dataclass(frozen=True, slots=True)
class RecurrentDraft:
    """State of a draft."""

    hidden: Float[Tensor, "batch 1 width"]
    """The base's last hidden state."""
    states: Float[Tensor, "batch node width"]
    """States of a level's nodes."""


class Head(BorrowingHead):
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

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield the states that read one token after each position, then two, and so on."""
        hidden = self.fuse_streams(features).hidden
        embedded = self.embed(tokens, hidden)
        state, next_embedded = torch.zeros_like(hidden), embedded.roll(-1, 1)
        for level in range(self.depth):
            state = self.recurrent_cell(state, next_embedded)
            yield self.exit_state(hidden, state)
            next_embedded = embedded.roll(-2 - level, 1)

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection, the same at every level, without a bias."""
        return Projection(self.head.weight)

    def begin(self, committed: Committed, memory: None) -> Guesses:
        """Read the root from a zero state, next to the base's last hidden state."""
        hidden = self.fuse_committed(committed).last_hidden()
        return self.read_tokens(hidden, torch.zeros_like(hidden), committed.root())

    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state."""
        return self.read_tokens(state.hidden, pick_parents(state.states, parents), tokens)

    def read_tokens(self, hidden: Tensor, states: Tensor, tokens: Tensor) -> Guesses:
        """Return the logits after the tokens of a level, given their parents' states."""
        states = self.recurrent_cell(states, self.embed(tokens, hidden))
        outputs = self.exit_state(hidden.expand_as(states), states)
        return self.logits(outputs, 0), RecurrentDraft(hidden, states)

    def recurrent_cell(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the state after one more token."""
        if self.rnn_w is None or self.rnn_u is None:
            return state + embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def exit_state(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Return the input of the vocabulary projection."""
        joined = torch.cat([hidden, state], dim=-1)
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
