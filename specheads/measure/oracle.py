"""A drafter that knows the answer: for benchmarks of the loop, and for nothing else."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, refuse_scattering
from specheads.core.errors import InputError
from specheads.core.features import Committed


@dataclass(slots=True)
class Places:
    """Which text each row follows, and how far."""

    texts: Int[Tensor, " batch"]
    roots: Int[Tensor, " batch"]
    """Position of each row's root."""

    def keep(self, rows: Int[Tensor, " kept"]) -> "Places":
        """Return where these rows are."""
        return Places(self.texts[rows], self.roots[rows])

    def join(self, other: "Places") -> "Places":
        """Return where both batches' rows are."""
        return Places(torch.cat([self.texts, other.texts]), torch.cat([self.roots, other.roots]))

    scatter = refuse_scattering


class Oracle(Drafter):
    """Guesses what will be said, right at a settable rate; its memory is how far each row is.

    It hands out its texts in turn, to rows in the order in which they begin, and after the last
    from the first again. It costs next to nothing, so what a step takes with it is what the loop
    and the base take. Texts are prompts and continuations as the base alone says them. Which
    positions it guesses right, a share of `rate`, is drawn once for each position, so that every
    depth that reaches a position agrees about it.
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
        if not 0 <= rate <= 1:
            raise InputError(f"an oracle's rate must lie in [0, 1], got {rate}")
        self.depth, self.vocab_size = depth, vocab_size
        self.num_handed_out = 0
        # the last draft may reach past the end of the text
        width = max(map(len, texts)) + 2 * depth + 2
        said = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.rand(said.shape, generator=generator) >= rate
        self.guesses = ((said + wrong.long()) % vocab_size).to(device)

    def memory(self, batch: int, capacity: int) -> Places:
        """Return each row's text and the position of its root."""
        del capacity
        first, self.num_handed_out = self.num_handed_out, self.num_handed_out + batch
        rows = torch.arange(first, first + batch, device=self.guesses.device) % len(self.guesses)
        return Places(rows, torch.zeros_like(rows))

    def begin(
        self, committed: Committed, memory: Places
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Places]:
        """Go on by as many positions as were committed; guess the token after the root."""
        memory.roots += committed.counts
        return self._after(memory, 1)

    def extend(
        self, state: Places, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], Places]:
        """Guess the next token after every node alike."""
        del parents
        return self._after(state, tokens.shape[1])

    def _after(self, places: Places, num_nodes: int) -> tuple[Tensor, Places]:
        """Return logits for the token after these places, and where that one stands."""
        following = places.roots + 1
        # a row that has ended may go on beside the others for a while
        guess = self.guesses[places.texts, following.clamp(max=self.guesses.shape[1] - 1)]
        logits = torch.zeros(len(guess), 1, self.vocab_size, device=guess.device)
        logits.scatter_(2, guess[:, None, None], 1.0)
        return logits.expand(-1, num_nodes, -1), Places(places.texts, following)
