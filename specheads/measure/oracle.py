"""A drafter that knows the answer: for benchmarks of the loop, and for nothing else."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, Features


class Oracle(Drafter):
    """Guesses what will be said, right at a settable rate; its memory is how far each row is.

    It hands out its texts in turn, to rows in the order in which they begin, and after the last
    from the first again. It costs next to nothing, so what a step takes with it is what the loop
    and the base take.

    Args:
        texts: Prompt and continuation of each row, as the base alone says it.
        depth: Levels it drafts.
        vocab_size: Columns of its logits.
        rate: Share of the positions it guesses right. Which those are is drawn once for each
            position, so that every depth that reaches a position agrees about it.
        seed: Of that draw.
        device: Where its logits are wanted.

    Raises:
        ValueError: The rate is no probability.
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
            raise ValueError(f"an oracle's rate must lie in [0, 1], got {rate}")
        self.depth, self.vocab_size = depth, vocab_size
        self.num_handed_out = 0
        # the last draft may reach past the end of the text
        width = max(map(len, texts)) + 2 * depth + 2
        said = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.rand(said.shape, generator=generator) >= rate
        self.guesses = ((said + wrong.long()) % vocab_size).to(device)

    def memory(self, batch: int, capacity: int) -> Int[Tensor, "batch 2"]:
        """Return each row's text and the position of its root."""
        del capacity
        first, self.num_handed_out = self.num_handed_out, self.num_handed_out + batch
        rows = torch.arange(first, first + batch, device=self.guesses.device) % len(self.guesses)
        return torch.stack([rows, torch.zeros_like(rows)], dim=1)

    def keep_rows(self, memory: Tensor, index: Int[Tensor, " kept"]) -> Tensor:
        """Return where these rows are."""
        return memory[index]

    def join_rows(self, memory: Tensor, other: Tensor) -> Tensor:
        """Return where both batches' rows are."""
        return torch.cat([memory, other])

    def begin(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        count: Int[Tensor, " batch"],
        memory: Tensor | None,
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Tensor]:
        """Go on by as many positions as were committed; guess the token after the root."""
        del features, tokens
        assert memory is not None
        memory[:, 1] += count
        after = torch.stack([memory[:, 0], memory[:, 1] + 1], dim=1)
        return self._logits(after, 1), after

    def extend(
        self, state: Tensor, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], Tensor]:
        """Guess the next token after every node alike."""
        del parents
        after = torch.stack([state[:, 0], state[:, 1] + 1], dim=1)
        return self._logits(after, tokens.shape[1]), after

    def _logits(self, places: Tensor, num_nodes: int) -> Tensor:
        row, place = places.unbind(1)
        # a row that has ended may go on beside the others for a while
        guess = self.guesses[row, place.clamp(max=self.guesses.shape[1] - 1)]
        logits = torch.zeros(len(guess), 1, self.vocab_size, device=guess.device)
        logits.scatter_(2, guess[:, None, None], 1.0)
        return logits.expand(-1, num_nodes, -1)
