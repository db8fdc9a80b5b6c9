"""EAGLE-GRU: MTP's attention for the first level, and a gated recurrent cell for the others.

The first level reads EAGLE-3's layers of the base and attends to the whole text. Each further level
is one cell, which costs less than a layer: it reads one more drafted token and starts from the
state of the first level. Unless `text_attention` is off, every level also attends to the keys and
values that the first one has stored. No paper describes it; recipes/LOG.md has the comparison with
EAGLE-3, MTP and ReDrafter.
"""

from dataclasses import dataclass, field, replace

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
    AttentionContext,
    HeadCache,
    LlamaLayer,
)
from specheads.heads.layers.common import RMSNorm, pick_parents
from specheads.heads.layers.feedback import FeedbackHead, empty_path, split_documents


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
class GruDraft:
    """State of a draft: the states of a level's nodes, and the text that each level reads."""

    states: Float[Tensor, "batch node width"]
    level: int
    """Number of drafted tokens that the states have read."""
    newest: Int[Tensor, "batch 1"]
    """Position of the last committed token of each row."""
    context: AttentionContext | None
    """Committed positions; None if only the first level reads them."""


class Head(FeedbackHead):
    """cell_0 = norm(layer(W [root, hidden + fused aux])), cell_k = GRU(state_k-1, token k).

    They are the states; with `text_attention`, state_k = cell_k + attention(norm(cell_k)).
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
            self.text_attention = Attention(config, width, queries_only=True)
            # starts as a head without it
            nn.init.zeros_(self.text_attention.o_proj.weight)
        self.lm_head = nn.Linear(width, self.drafted_size, bias=False)

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Initialise the vocabulary projection from the base's."""
        self.lm_head.weight.data.copy_(projection)

    def blocks(self) -> list[LlamaLayer]:
        """Return the layer of the first level."""
        return [self.layer]

    def first_input(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the base's final hidden state plus the fused residual streams."""
        return self.fuse_streams(features).hidden

    def join_token(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the stream of the layer, from the base's state and the token after it."""
        inputs = [self.token_norm(embedded), self.state_norm(hidden)]
        return self.joint(torch.cat(inputs, dim=-1))

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield the states that read one token after each position, then two, and so on."""
        hidden, positions = self.first_input(features), features.positions()
        token_gates = self.project_token(tokens)
        stream = self.join_token(hidden, self.embed_in_layer_dtype(tokens).roll(-1, 1))
        inputs = self.layer.prepare(stream, positions)
        text = inputs.keys_values
        documents, window = split_documents(features), self.windows(0)[0]
        context = AttentionContext(text, None, empty_path(text), documents, window)
        state = self.attend_to_text(self.norm(self.layer(inputs, context)), positions, context)
        yield state
        for level in range(1, self.depth):
            gates = token_gates.roll(-1 - level, 1)
            state = self.attend_to_text(self.gru_cell(state, gates), positions + level, context)
            yield state

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection, the same at every level, without a bias."""
        return Projection(self.lm_head.weight)

    @torch.no_grad()
    def begin(self, committed: Committed, memory: HeadCache) -> Guesses:
        """Store keys and values of the committed positions; return the logits after the root."""
        hidden = self.first_input(committed.features)
        first = self.run_committed(hidden, committed.next_tokens, committed, memory)
        newest, context = memory.lengths[:, None] - 1, None
        if self.text_attention is not None:
            context = AttentionContext(memory.text(), memory.visible(window=self.windows(0)[0]))
        return self.finish_level(GruDraft(self.norm(first.hidden), 0, newest, context))

    @torch.no_grad()
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state."""
        cells = self.gru_cell(pick_parents(state.states, parents), self.project_token(tokens))
        return self.finish_level(replace(state, states=cells, level=state.level + 1))

    def finish_level(self, cells: GruDraft) -> Guesses:
        """Return the logits of a level, given the outputs of its cells, and its states."""
        positions = (cells.newest + cells.level).expand(cells.states.shape[:2])
        states = self.attend_to_text(cells.states, positions, cells.context)
        return self.logits(states, cells.level), replace(cells, states=states)

    def attend_to_text(
        self, cells: Tensor, positions: Tensor, context: AttentionContext | None
    ) -> Tensor:
        """Return the states of a level, given the outputs of its cells."""
        if self.text_attention is None or context is None:
            return cells
        return cells + self.text_attention(self.text_norm(cells), positions, context)

    def project_token(self, tokens: Tensor) -> Tensor:
        """Return the token's share of both gates and of the candidate."""
        return self.read_token(self.token_norm(self.embed_in_layer_dtype(tokens)))

    def gru_cell(self, state: Tensor, token_gates: Tensor) -> Tensor:
        """Return the output of the cell, given a state and `project_token` of one more token."""
        normed = self.state_norm(state)
        gates, candidate = token_gates.split([2 * self.width, self.width], dim=-1)
        reset, keep = (gates + self.gate(normed)).sigmoid().chunk(2, dim=-1)
        candidate = F.silu(candidate + reset * self.candidate(normed))
        return candidate + keep * (state - candidate)
