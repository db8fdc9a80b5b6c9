"""DSpark: DFlash with a correction by the previous token, and a confidence output.

Source: deepseek-ai/DeepSpec, DSpark_paper.pdf; vllm-project/speculators.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specheads.core.drafter import Bias, State, Weight
from specheads.core.ranges import Width
from specheads.core.weight_layout import product
from specheads.heads.layers.block import BlockConfig, BlockHead, filled, flat_settings, own_settings


@dataclass(kw_only=True, slots=True)
class Config(BlockConfig):
    """Settings of a DSpark head; the defaults are the published ones."""

    markov_rank: Width = 256
    """Rank of the correction by the previous token."""

    sample_from_anchor: bool = True
    """Whether the anchor's slot drafts the first level, and each slot the token after it. Otherwise
    each mask drafts the token at its own position."""


class MarkovHead(nn.Module):
    """A bias of the logits, given the previous token: W2 W1[token]."""

    def __init__(self, vocab_size: int, drafted_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted_size, bias=False)
        # starts with almost no correction
        nn.init.normal_(self.markov_w1.weight, std=0.01)


class ConfidenceHead(nn.Module):
    """The logit of the probability that the base accepts the token of a state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class Head(BlockHead):
    """A state is [h, e]: the hidden state of its level and the embedding of the previous token.

    Its logits are W h + W2 e, with the base's projection W, so its own projection is [W, W2].
    """

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.markov_head = MarkovHead(vocab_size, self.drafted_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(width + config.markov_rank)

    def answering(
        self, hidden: Float[Tensor, "batch time width"], tokens: Int[Tensor, "batch node"]
    ) -> Float[Tensor, "batch node answer"]:
        """Return the hidden states of a level, concatenated with those of the previous tokens."""
        before = self.markov_head.markov_w1(tokens)
        return torch.cat([hidden.expand(-1, tokens.shape[1], -1).to(before.dtype), before], dim=-1)

    def projection(self, level: int) -> tuple[Weight, Bias | None]:
        """Return the projections of the base and of the correction, concatenated."""
        del level
        corrects = self.markov_head.markov_w2.weight
        return torch.cat([self.lent().to(corrects.dtype), corrects], dim=1), None

    def projections(self) -> list[tuple[Weight, Bias | None]]:
        """Return the same projection for every level, concatenated once."""
        return [self.projection(0)] * self.depth

    def logits(
        self, state: Float[Tensor, "*batch width"], level: int
    ) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of a state of this level."""
        del level
        # two products, so that drafting does not concatenate the projection at every step
        hidden, before = state.split([self.width, self.config.markov_rank], dim=-1)
        return product(hidden, self.lent()) + self.markov_head.markov_w2(before)

    def confidence_logits(self, state: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """Return the logit of the probability that the base accepts the token of this state."""
        return self.confidence_head.proj(state)[..., 0]

    @torch.no_grad()
    def confidence(self, state: State) -> Float[Tensor, "batch node"]:
        """Return the probability that the base accepts a token after each last node."""
        return self.confidence_logits(state.states).sigmoid()


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead | None:
    """Read a folder of DeepSpec or speculators with a Markov and a confidence head."""
    settings = flat_settings(config)
    if settings is None or not settings.get("markov_rank"):
        return None
    own = Config(markov_rank=settings["markov_rank"], **own_settings(settings))
    return filled(Head(own, settings["hidden_size"], settings["vocab_size"]), tensors)
