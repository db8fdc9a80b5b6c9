"""MTP: one Llama layer, applied again and again to its own state and the next token's embedding.

Source: DeepSeek-V3, arXiv:2412.19437, 2.2; FastMTP, arXiv:2509.18362, which shares one layer among
all levels; Qwen3-Next's and MiMo's modules.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.config.ranges import Depth, Scale
from specheads.core.drafter import Committed, Features, State
from specheads.heads.fill import fill
from specheads.heads.layers.attention import AttentionShape, Slots
from specheads.heads.layers.attention_config import AttentionConfig
from specheads.heads.layers.embedding import BorrowingHead
from specheads.heads.layers.feedback import Branch, ProjectedLayer, branch, commit, rounds
from specheads.heads.layers.norm import RMSNorm
from specheads.heads.mtp_folders import interpret


@dataclass(kw_only=True, slots=True)
class Config(AttentionConfig):
    """Settings of an MTP head; the defaults are FastMTP's depth and DeepSeek-V3's order."""

    depth: Depth = 3
    """Number of levels it drafts, and rounds of its layer in training."""

    hidden_first: bool = False
    """Whether its projection reads the state before the token, as MiMo's, and not after it, as
    DeepSeek-V3's and Qwen3-Next's."""

    qk_norm: bool = False
    """Whether each head's queries and keys are normed, as Qwen3's."""

    attention_bias: bool = False
    """Whether queries, keys and values have biases, as Qwen2's and MiMo's."""

    rope_theta: Scale = 10_000.0
    """Base of the rotary position embedding."""

    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """How that one is stretched to longer texts, as a Llama's config.json says it, by rope_type:
    linear, llama3 or yarn. Empty is not at all."""

    epsilon: Scale = 1e-6
    """Epsilon of its norms."""


class Head(BorrowingHead):
    """The base's last hidden state and the token after it, then `depth` rounds of one layer.

    Each round reads the token drafted last and the normed output of the round before, and attends
    to the committed positions and to the earlier rounds on its path. Training runs the same rounds
    from every position at once. The base's own projection, never trained, turns states into logits.
    """

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.depth = config.depth
        shape = AttentionShape.of(
            width,
            config.attention_heads,
            config.key_value_heads,
            config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            norm_epsilon=config.epsilon if config.qk_norm else None,
            bias=config.attention_bias,
        )
        self.layer = ProjectedLayer(
            width,
            inner=config.inner_dim,
            epsilon=config.epsilon,
            shape=shape,
            hidden_first=config.hidden_first,
        )
        self.norm = RMSNorm(width, config.epsilon)

    def states(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        anchors: Bool[Tensor, "batch time"] | None = None,
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield each round's state, of every position at once."""
        del anchors
        embedded = (self._embed(tokens.roll(-1 - level, 1)) for level in range(self.depth))
        first = self._precise(features.hidden)
        for hidden in rounds([self.layer], first, embedded, features, self.norm):
            yield self.norm(hidden)

    def memory(self, batch: int, capacity: int) -> Slots:
        """Return room for the keys and values of committed positions."""
        return Slots.empty(self.layer.mtp_block.self_attn, batch, capacity)

    @torch.no_grad()
    def begin(
        self, committed: Committed, memory: Slots
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Commit every position's keys and values; answer from the last."""
        hidden = self._precise(committed.features.hidden)
        embedded = self._embed(committed.next_tokens)
        return self._answer(commit([self.layer], hidden, embedded, committed, memory))

    @torch.no_grad()
    def extend(
        self, state: State, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], State]:
        """Read each node on top of its parent's state, seeing the path that led to it."""
        return self._answer(branch([self.layer], state, self._embed(tokens), parents))

    def _answer(self, found: Branch) -> tuple[Tensor, State]:
        hidden = self.norm(found.hidden)
        logits = self.logits(hidden, found.paths[0].shape[4])
        return logits, Branch(hidden, found.paths, found.memory)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens, self.norm.weight)

    def _precise(self, hidden: Tensor) -> Tensor:
        """Return the base's states in the precision of the weights."""
        return hidden.to(self.norm.weight.dtype)


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read the MTP module of a base's own checkpoint, or a folder of speculators."""
    found = interpret(config, tensors)
    if found is None:
        return None
    settings, named = found
    width, vocab_size = settings.pop("width"), settings.pop("vocab_size")
    head = Head(Config(**settings), width, vocab_size)
    fill(head, named)
    return head
