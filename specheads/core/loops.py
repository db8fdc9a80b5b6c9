"""Text that repeats itself: the one rule for what is measured and for what the base wrote."""

from collections.abc import Sequence


def loops(tokens: Sequence[int], *, max_period: int = 16, window: int = 48) -> bool:
    """Tell whether a text ended up repeating itself.

    The rule: the last `window` tokens are one block of at most `max_period` tokens written over
    and over, that is, for some period p <= max_period each of them equals the one p places
    before it within the window. Such text is trivially easy to draft, so results give figures
    with and without it. A text shorter than the window is never flagged.
    """
    tail = tokens[-window:]
    if len(tokens) < window:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, max_period + 1))
