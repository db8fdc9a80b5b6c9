"""A drafter whose guess depends on the last token alone."""

from jaxtyping import Float
from torch import Tensor

from specheads.core.drafter import Drafter
from specheads.core.features import Committed


class Markov(Drafter):
    """Guesses the next token from the last one by a table of logits."""

    def __init__(self, table: Float[Tensor, "vocab vocab"], depth: int) -> None:
        self.table, self.depth = table, depth

    def begin(self, committed: Committed, memory: None) -> tuple[Tensor, None]:
        del memory
        return self.table[committed.root()], None

    def extend(self, state: None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, None]:
        del state, parents
        return self.table[tokens], None
