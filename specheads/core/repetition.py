"""Detection of repetitive text."""

from collections.abc import Sequence


def is_repetitive(tokens: Sequence[int], *, max_period: int = 16, window: int = 48) -> bool:
    """Return whether the last `window` tokens repeat one block of at most `max_period` tokens.

    Such text is trivially easy to draft, so results have figures with and without it. A text
    shorter than the window never counts as repetitive.
    """
    tail = tokens[-window:]
    if len(tokens) < window:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, max_period + 1))
