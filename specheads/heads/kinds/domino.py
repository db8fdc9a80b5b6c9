"""Domino: DFlash with a correction by all drafted tokens before a level, which a GRU reads.

Source: arXiv:2605.29707; sgl-project/SpecForge; nvidia-modelopt 0.47, modeling_domino.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specheads.core.drafter import Nodes
from specheads.core.errors import InputError
from specheads.core.ranges import NonNegativeInt, Probability, Width
from specheads.heads.layers.block import (
    BlockConfig,
    BlockHead,
    CorrectedHead,
    join_hidden,
    read_block,
)

GRU = ("weight_ih_l0", "weight_hh_l0")
"""Names of the weights of torch.nn.GRU, of its inputs and of its states."""


@dataclass(kw_only=True, slots=True)
class Config(BlockConfig):
    """Settings of a Domino head; the defaults are the published ones."""

    gru_hidden_dim: Width = 1024
    """Width of the GRU that reads the anchor and the drafted tokens."""
    emb_dim: Width = 256
    """Rank of the correction."""
    pure_draft_prefix_len: NonNegativeInt = 1
    """Number of first levels without the correction. SGLang reads 1 only."""
    sample_from_anchor: bool = True
    """Whether the anchor's slot drafts the first level, and each slot the token after it. Otherwise
    each mask drafts the token at its own position."""
    uncorrected_loss: Probability = 1.0
    """Share of the loss of the logits without the correction at the first step of a phase. It falls
    linearly to zero."""

    def __post_init__(self) -> None:
        BlockConfig.__post_init__(self)
        if self.pure_draft_prefix_len >= self.depth:
            raise InputError(
                f"head.pure_draft_prefix_len must be less than head.depth={self.depth}, got "
                f"{self.pure_draft_prefix_len}; lower it"
            )


class Head(CorrectedHead):
    """The correction reads the hidden state of a level and a GRU's summary of the path."""

    correction_name = "embed_proj.2"

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.uncorrected_loss = config.uncorrected_loss
        self.summary_size = size = config.gru_hidden_dim
        bound, inputs = size**-0.5, (width, size)
        weights = (torch.empty(3 * size, columns).uniform_(-bound, bound) for columns in inputs)
        self.prefix_gru = nn.ParameterDict(zip(GRU, weights, strict=True))
        first = nn.Linear(width + size, config.emb_dim, bias=False)
        last = nn.Linear(config.emb_dim, self.drafted_size, bias=False)
        self.embed_proj = nn.Sequential(first, nn.SiLU(), last)
        for layer in (first, last):
            nn.init.normal_(layer.weight, std=0.02)

    def read_tokens(self, tokens: Nodes, summary: Tensor) -> Float[Tensor, "batch node summary"]:
        """Return the states of the GRU after these tokens."""
        embedded, weights = self.embed(tokens, self.fc.weight), map(self.prefix_gru.get, GRU)
        states = torch.gru_cell(embedded.flatten(0, 1), summary.flatten(0, 1), *weights)
        return states.unflatten(0, tokens.shape)

    def node_states(
        self, hidden: Tensor, tokens: Nodes, summary: Tensor, level: int
    ) -> Float[Tensor, "batch node state"]:
        """Return the hidden states of a level, concatenated with the inputs of the correction."""
        inputs = self.embed_proj[:2](join_hidden(hidden, summary))
        is_corrected = level >= self.config.pure_draft_prefix_len
        return join_hidden(hidden, inputs if is_corrected else torch.zeros_like(inputs))


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead | None:
    """Read a folder of SpecForge or ModelOpt with a GRU."""
    return read_block(Head, Config, config, tensors)
