"""EAGLE-GRU: MTP's attention for the first level, and a gated recurrent cell for the others.

The first level reads EAGLE-3's layers of the base and attends to the whole text. Each further level
is one cell, which costs less than a layer: it reads one more drafted token and starts from the
state of the first level. Unless `text_attention` is off, every level also attends to the keys and
values that the first one has stored. No paper describes it; recipes/LOG.md has the comparison with
EAGLE-3, MTP and ReDrafter.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Anchors, Guesses, Nodes, Projection, State, States, Tokens
from specheads.core.features import Committed, Features
from specheads.core.ranges import Depth, LayerIndex, PositiveFloat, PositiveInt
from specheads.heads.layers.attention import (
    Attention,
    AttentionConfig,
    HeadCache,
    LlamaLayer,
    near,
)
from specheads.heads.layers.common import RMSNorm, pick_parents
from specheads.heads.layers.feedback import FeedbackHead, no_path


@dataclass(kw_only=True, slots=True)
class Config(AttentionConfig):
    """Settings of an EAGLE-GRU head."""

    depth: Depth = 5
    """Number of levels it trains and drafts; its size does not depend on this."""
    aux_layers: list[LayerIndex] = field(default_factory=list)
    """Base layers it reads next to the final hidden state: k is the residual stream after k layers.
    Empty selects 2, n // 2 and n - 3 of n, or others for a shallow base."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    epsilon: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    sliding_window: PositiveInt | None = None
    """Number of positions of the text that it sees. Null is all."""
    attention_sink: bool = False
    """Whether each attention head learns a logit without a value, its sink."""
    text_attention: bool = True
    """Whether all levels attend to the text. False is only the first, whose drafts take less
    time."""


@dataclass(frozen=True, slots=True)
class Draft:
    """State of a draft: the states of a level's nodes, and the text that each level reads."""

    state: Float[Tensor, "batch node width"]
    level: int
    """Number of drafted tokens that the states have read."""
    newest: Int[Tensor, "batch 1"]
    """Position of the last committed token of each row."""
    text: tuple[Tensor, ...]
    """Keys and values of committed positions and a mask of the visible ones, if they are read: see
    `HeadCache.past`."""


class Head(FeedbackHead):
    """read_0 = norm(layer(W [root, hidden + fused aux])), read_k = GRU(state_k-1, token k).

    They are the states; with `text_attention`, state_k = read_k + attention(norm(read_k)).
    """

    feeds_normed = True

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.token_norm, self.state_norm, self.norm = (
            RMSNorm(width, config.epsilon) for _ in range(3)
        )
        self.joint = nn.Linear(2 * width, width, bias=False)
        self.layer = LlamaLayer(config, width)
        self.read_token = nn.Linear(width, 3 * width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.candidate = nn.Linear(width, width, bias=False)
        self.text_attention = None
        if config.text_attention:
            self.text_norm = RMSNorm(width, config.epsilon)
            self.text_attention = Attention(config, width, only_reads=True)
            # starts as a head without it
            nn.init.zeros_(self.text_attention.o_proj.weight)
        self.lm_head = nn.Linear(width, self.drafted_size, bias=False)

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Initialise the vocabulary projection from the base's."""
        self.lm_head.weight.data.copy_(projection)

    def blocks(self) -> list[LlamaLayer]:
        """Return the layer of the first level."""
        return [self.layer]

    def first(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the base's final hidden state plus the fused residual streams."""
        return self.fused(features).hidden

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the stream of the layer, from the base's state and the token after it."""
        parts = [self.token_norm(embedded), self.state_norm(hidden)]
        return self.joint(torch.cat(parts, dim=-1))

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield the states that read one token after each position, then two, and so on."""
        hidden, places, window = self.first(features), features.positions(), self.window(0)
        visible, documents = self.attended(features, hidden)
        visible = visible if visible is None else near(visible, window)
        read = self._token(tokens)
        stream = self.enter(hidden, self.embedded(tokens).roll(-1, 1))
        stream, inputs, past = self.layer.read(stream, places)
        seen = past, visible, no_path(past), documents, window
        state = self._attend(self.norm(self.layer(stream, inputs, places, *seen)), places, *seen)
        sent = yield state
        for level in range(1, self.depth):
            last = read.roll(-1 - level, 1) if sent is None else self._token(sent)
            state = self._attend(self._read(state, last), places + level, *seen)
            sent = yield state

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection, the same at every level, without a bias."""
        return self.lm_head.weight, None

    @torch.no_grad()
    def begin(self, committed: Committed, memory: HeadCache) -> Guesses:
        """Store keys and values of the committed positions; return the logits after the root."""
        hidden = self.first(committed.features)
        branch = self.commit(hidden, committed.next_tokens, committed, memory)
        newest, text = memory.lengths[:, None] - 1, ()
        if self.text_attention is not None:
            text = memory.past(window=self.window(0))
        return self._finish(Draft(self.norm(branch.hidden), 0, newest, text))

    @torch.no_grad()
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state."""
        below = self._read(pick_parents(state.state, parents), self._token(tokens))
        return self._finish(replace(state, state=below, level=state.level + 1))

    def _finish(self, read: Draft) -> Guesses:
        """Return the logits of a level, given what it has read, and its states."""
        positions = (read.newest + read.level).expand(read.state.shape[:2])
        state = self._attend(read.state, positions, *read.text)
        return self.logits(state, read.level), replace(read, state=state)

    def _attend(self, read: Tensor, positions: Tensor, *text: Any) -> Tensor:
        """Return the states of a level; `text` are further arguments of `Attention`."""
        if self.text_attention is None:
            return read
        return read + self.text_attention(self.text_norm(read), positions, *text)

    def _token(self, tokens: Tensor) -> Tensor:
        """Return what the cell reads of tokens: both gates and the candidate."""
        return self.read_token(self.token_norm(self.embedded(tokens)))

    def _read(self, state: Tensor, read: Tensor) -> Tensor:
        """Return what the cell makes of a state and of one more token."""
        normed = self.state_norm(state)
        gates, new = read.split([2 * self.width, self.width], dim=-1)
        reset, keep = (gates + self.gate(normed)).sigmoid().chunk(2, dim=-1)
        new = F.silu(new + reset * self.candidate(normed))
        return new + keep * (state - new)
