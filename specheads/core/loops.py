"""Detection of repetitive text, for results and for generated text."""

from collections.abc import Sequence


def loops(tokens: Sequence[int], *, max_period: int = 16, window: int = 48) -> bool:
    """Return whether a text ends in a repetition.

    The last `window` tokens must repeat one block of at most `max_period` tokens: for some period
    p <= max_period, each token of the window equals the one p positions before it. Such text is
    trivially easy to draft, so results have figures with and without it. A text shorter than the
    window never counts as repetitive.
    """
    tail = tokens[-window:]
    if len(tokens) < window:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, max_period + 1))
