"""A head that drafts all levels in one forward, for the tests alone: the contract must carry it.

As DFlash does, a block of mask tokens stands behind each position it drafts from; they see the
text up to there, and one another. What a state costs grows with those positions, so it makes the
states that `scored` asks for and no others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specheads.base.model import FrozenBase
from specheads.core.drafter import Bias, State, Weight
from specheads.core.drafter import Head as BaseHead
from specheads.core.features import Committed, Features
from specheads.heads import load
from specheads.heads.layers.attention import Attention, AttentionShape, Slots
from specheads.heads.layers.embedding import EmbeddingHead

KIND = "block_parallel"


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of the head."""

    depth: int = 3
    """Mask tokens of a block, one a level."""


class Head(EmbeddingHead):
    """Reads each position's state beside its next token, and answers with a block of masks."""

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.depth = config.depth
        self.num_anchors = 0
        self.masks = nn.Parameter(torch.randn(self.depth, width))
        self.fc = nn.Linear(2 * width, width)
        self.attention = Attention(width, width, AttentionShape.of(width, 4, 2, theta=1e4))
        self.lm_head = nn.Linear(width, self.drafted_size, bias=False)

    def anchors(self, scored: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
        """Return the positions from which some level predicts a scored token."""
        return torch.stack([scored.roll(-2 - level, 1) for level in range(self.depth)]).any(0)

    def states(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        scored: Bool[Tensor, "batch time"] | None = None,
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Draft one block from each position that is asked for; other states are zero."""
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        rows, at = (everywhere if scored is None else self.anchors(scored)).nonzero(as_tuple=True)
        self.num_anchors = len(rows)
        places = features.places()
        past = self._context(features.hidden, tokens.roll(-1, 1), places)
        visible = features.visible().expand(len(tokens), -1, -1)[rows, at]
        block = self._block(past[rows], visible[:, None], places.expand_as(tokens)[rows, at])
        for level in range(self.depth):
            empty = block.new_zeros(*tokens.shape, self.width)
            yield empty.index_put((rows, at), block[:, level])

    def projection(self, level: int) -> tuple[Weight, Bias | None]:
        """Return the one vocabulary projection."""
        del level
        return self.lm_head.weight, None

    def memory(self, batch: int, capacity: int) -> Slots:
        """Return room for the keys and values of committed positions."""
        return Slots.empty(self.attention, batch, capacity)

    def begin(
        self, committed: Committed, memory: Slots
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Draft the whole block at once."""
        places = memory.following(committed.next_tokens.shape[1])
        fresh = self._context(committed.features.hidden, committed.next_tokens, places)
        memory.append(fresh, committed.counts)
        block = self._block(*memory.past(), memory.lengths - 1)
        return self.logits(block[:, :1], 0), (block, 0)

    def extend(
        self, state: State, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], State]:
        """Give every node of the level the same answer, which the block has already."""
        del parents
        block, level = state[0], state[1] + 1
        logits = self.logits(block[:, level : level + 1], level)
        return logits.expand(-1, tokens.shape[1], -1), (block, level)

    def _context(self, hidden: Tensor, following: Tensor, places: Tensor) -> Tensor:
        read = self.fc(torch.cat([hidden, self.embed(following, hidden)], dim=-1))
        return self.attention.keys_values(read, places)

    def _block(self, past: Tensor, visible: Tensor, at: Int[Tensor, " anchor"]) -> Tensor:
        """Return the states of one block for each position in `at`: (anchor, level, width)."""
        masks = self.masks.expand(len(at), -1, -1)
        places = at[:, None] + 1 + torch.arange(self.depth)
        # every mask sees all masks of its block
        seen = self.attention.keys_values(masks, places)[:, :, :, None]
        path = seen.expand(-1, -1, -1, self.depth, -1, -1)
        return masks + self.attention(masks, places, past, visible, path)


def build_for(settings: dict[str, Any], base: FrozenBase, *counts: Tensor) -> BaseHead:
    """Make an untrained head of any kind, or this one, which is no kind of the package."""
    if settings["kind"] != KIND:
        return load.build_for(settings, base, *counts)
    head = Head(Config(depth=settings.get("depth", 3)), base.width, base.vocab_size)
    head.bind(base.embedding)
    return head
