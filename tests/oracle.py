"""A drafter that knows the text."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, refuse_scattering
from specheads.core.features import Committed


@dataclass(slots=True)
class TextPositions:
    """The text of each row, and its position in it."""

    texts: Int[Tensor, " batch"]
    roots: Int[Tensor, " batch"]
    """Position of each row's root."""

    def keep(self, rows: Int[Tensor, " kept"]) -> "TextPositions":
        """Return the positions of these rows."""
        return TextPositions(self.texts[rows], self.roots[rows])

    def join(self, other: "TextPositions") -> "TextPositions":
        """Return the positions of both batches."""
        return TextPositions(
            torch.cat([self.texts, other.texts]), torch.cat([self.roots, other.roots])
        )

    scatter = refuse_scattering


class Oracle(Drafter):
    """Draft the base's own text, right at a given rate; its memory is the position of each row.

    Rows get the texts in turn, in the order in which they begin, and start again after the last
    text. The oracle costs almost nothing, so a step takes the time of the loop and the base. Texts
    are prompts with the continuations of the base alone. Each position is right with probability
    `rate`, sampled once, so that every depth that reaches a position agrees.
    """

    def __init__(
        self,
        texts: list[list[int]],
        depth: int,
        vocab_size: int,
        *,
        rate: float = 1.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.depth, self.vocab_size = depth, vocab_size
        self.num_handed_out = 0
        # the last draft may reach past the end of the text
        width = max(map(len, texts)) + 2 * depth + 2
        token_ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.rand(token_ids.shape, generator=generator) >= rate
        self.guesses = ((token_ids + wrong.long()) % vocab_size).to(device)

    def memory(self, batch: int, capacity: int) -> TextPositions:
        """Return the text of each row and the position of its root."""
        del capacity
        first, self.num_handed_out = self.num_handed_out, self.num_handed_out + batch
        rows = torch.arange(first, first + batch, device=self.guesses.device) % len(self.guesses)
        return TextPositions(rows, torch.zeros_like(rows))

    def begin(
        self, committed: Committed, memory: TextPositions
    ) -> tuple[Float[Tensor, "batch 1 vocab"], TextPositions]:
        """Advance by the committed tokens and draft the token after the root."""
        memory.roots += committed.counts
        return self._after(memory, 1)

    def extend(
        self,
        state: TextPositions,
        tokens: Int[Tensor, "batch node"],
        parents: Int[Tensor, "batch node"],
    ) -> tuple[Float[Tensor, "batch node vocab"], TextPositions]:
        """Draft the same next token after every node."""
        del parents
        return self._after(state, tokens.shape[1])

    def _after(self, places: TextPositions, num_nodes: int) -> tuple[Tensor, TextPositions]:
        """Return logits for the token after these positions, and its position."""
        following = places.roots + 1
        # a row that has ended may continue while the others do
        guess = self.guesses[places.texts, following.clamp(max=self.guesses.shape[1] - 1)]
        logits = torch.zeros(len(guess), 1, self.vocab_size, device=guess.device)
        logits.scatter_(2, guess[:, None, None], 1.0)
        return logits.expand(-1, num_nodes, -1), TextPositions(places.texts, following)
