"""Hydra, the MLP speculator and ReDrafter: the state of each level reads one more token."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from specheads.core.drafter import Anchors, Guesses, Nodes, State, States, Tokens
from specheads.core.features import Committed, Features
from specheads.heads.layers.common import BorrowingHead, pick_parents


@dataclass(frozen=True, slots=True)
class RecurrentDraft:
    """State of a draft."""

    states: Float[Tensor, "batch node state"]
    """States of the nodes of a level."""
    hidden: Float[Tensor, "batch 1 width"]
    """The base's last hidden state, encoded."""
    level: int


class RecurrentHead(BorrowingHead):
    """state_0 follows from the base's hidden state, and state_k+1 from state_k and a token."""

    num_embeddings: int = 1
    """Number of embeddings; later levels share the last one."""

    def encode_text(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the base's hidden states that the first states follow from."""
        return self.fuse_streams(features).hidden

    def encode_committed(self, committed: Committed, memory: Any) -> Float[Tensor, "batch 1 width"]:
        """Return the same for the last committed position of each row."""
        return self.fuse_committed(committed).last_hidden()

    @abstractmethod
    def first_state(self, hidden: Tensor) -> Tensor:
        """Return the state before any token."""

    @abstractmethod
    def read_token(self, state: Tensor, embedded: Tensor, level: int) -> Tensor:
        """Return the state after one more embedded token."""

    @abstractmethod
    def output(self, state: Tensor, hidden: Tensor, level: int) -> Tensor:
        """Return the input of the vocabulary projection."""

    def embed_level(self, tokens: Tensor, like: Tensor, level: int) -> Tensor:
        """Return the embeddings that a level reads."""
        return self.embed(tokens, like)

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield the states that read one token after each position, then two, and so on."""
        hidden = self.encode_text(features)
        state = self.first_state(hidden)
        # one lookup for all levels: the gradient of each lookup is as large as the table
        tables = [self.embed_level(tokens, hidden, level) for level in range(self.num_embeddings)]
        for level in range(self.depth):
            embedded = entry_of_level(tables, level).roll(-1 - level, 1)
            state = self.read_token(state, embedded, level)
            yield self.output(state, hidden, level)

    def begin(self, committed: Committed, memory: Any) -> Guesses:
        """Read the root after the base's last hidden state."""
        hidden = self.encode_committed(committed, memory)
        return self.guess(RecurrentDraft(self.first_state(hidden), hidden, 0), committed.root())

    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state."""
        states = pick_parents(state.states, parents)
        return self.guess(RecurrentDraft(states, state.hidden, state.level + 1), tokens)

    def guess(self, parents: RecurrentDraft, tokens: Nodes) -> Guesses:
        """Return the logits after the tokens of a level, given their parents' states."""
        hidden, level = parents.hidden, parents.level
        states = self.read_token(parents.states, self.embed_level(tokens, hidden, level), level)
        logits = self.logits(self.output(states, hidden, level), level)
        return logits, RecurrentDraft(states, hidden, level)


def entry_of_level(modules: nn.ModuleList | list[Tensor], level: int) -> Any:
    """Return the entry of a level, or the last one, which later levels share."""
    return modules[min(level, len(modules) - 1)]
