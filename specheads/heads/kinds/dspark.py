"""DSpark: DFlash with a correction by the previous token, and a confidence output.

Source: deepseek-ai/DeepSpec, DSpark_paper.pdf; vllm-project/speculators.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specheads.core.drafter import Hidden, Nodes, State
from specheads.core.ranges import Width
from specheads.heads.layers.block import (
    BlockConfig,
    BlockHead,
    CorrectedHead,
    join_hidden,
    read_block,
)


@dataclass(kw_only=True, slots=True)
class Config(BlockConfig):
    """Settings of a DSpark head; the defaults are the published ones."""

    markov_rank: Width = 256
    """Rank of the correction by the previous token."""
    confidence_head: bool = True
    """Whether it estimates the acceptance of each token."""
    sample_from_anchor: bool = True
    """Whether the anchor's slot drafts the first level, and each slot the token after it. Otherwise
    each mask drafts the token at its own position."""


class Head(CorrectedHead):
    """The correction reads an embedding of the previous token.

    The confidence head gives the logit of the probability that the base accepts the token of a
    state.
    """

    correction_name = "markov_head.markov_w2"

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        rank = config.markov_rank
        first = nn.Embedding(vocab_size, rank)
        second = nn.Linear(rank, self.drafted_size, bias=False)
        # starts with almost no correction
        nn.init.normal_(first.weight, std=0.01)
        self.markov_head = nn.ModuleDict({"markov_w1": first, "markov_w2": second})
        self.confidence_head = None
        if config.confidence_head:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + rank, 1)})

    def node_states(
        self, hidden: Tensor, tokens: Nodes, summary: Tensor, level: int
    ) -> Float[Tensor, "batch node state"]:
        """Return the hidden states of a level, concatenated with those of the previous tokens."""
        return join_hidden(hidden, self.markov_head["markov_w1"](tokens))

    def confidence_logits(self, state: Hidden) -> Float[Tensor, "*batch"] | None:
        """Return the logit of the probability that the base accepts the token of this state."""
        return self.confidence_head["proj"](state)[..., 0] if self.confidence_head else None

    @torch.no_grad()
    def confidence(self, state: State) -> Float[Tensor, "batch node"] | None:
        """Return the probability that the base accepts a token after each last node."""
        logits = self.confidence_logits(state.states)
        return None if logits is None else logits.sigmoid()


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead | None:
    """Read a folder of DeepSpec, speculators or ModelOpt with a Markov head."""
    return read_block(Head, Config, config, tensors)
