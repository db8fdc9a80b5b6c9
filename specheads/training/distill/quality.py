"""Which answers of the base are not to be learned from."""

from collections.abc import Callable, Sequence

from specheads.core.loops import loops
from specheads.training.distill.engine import Answer

LONG_PERIOD, LONG_WINDOW = 64, 192
"""A paragraph that is written three times over is a loop too, which three short words are not."""


def fault(
    answer: Answer,
    drop: Sequence[str],
    min_tokens: int,
    eos_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> str:
    """Return the first of the faults to `drop` that an answer has; empty where it has none.

    Args:
        answer: What the base wrote.
        drop: Faults that count: loop, empty and truncated, in any order.
        min_tokens: Tokens below which an answer is empty; so is one of nothing but spaces.
        eos_ids: Tokens that may end an answer, and are no part of what it says.
        decode: Gives the text of token ids, without special tokens.
    """
    said = answer.tokens
    while said and said[-1] in eos_ids:
        said = said[:-1]
    found = {
        "empty": lambda: len(said) < min_tokens or not decode(said).strip(),
        "loop": lambda: loops(said) or loops(said, max_period=LONG_PERIOD, window=LONG_WINDOW),
        "truncated": lambda: answer.finish == "length",
    }
    return next((name for name, holds in found.items() if name in drop and holds()), "")
