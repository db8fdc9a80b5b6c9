"""Parameters of tests of which only some run by default."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

from specheads.heads.load import kinds
from tests import tiny

SOME_KINDS = ("redrafter", "eagle3", "dflash")
"""Heads of different structure: one with a recurrent state, one with attention, one of blocks."""


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, marked as slow where they are not in `fast`."""
    cases = list(cases)
    assert all(case in cases for case in fast)
    return [
        case
        if case in fast
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def each_kind(*fast: str) -> list[Any]:
    """Return all kinds of heads; those that are not named, or in `SOME_KINDS`, are slow."""
    return slow_except(fast or SOME_KINDS, kinds())


ATTENTIONS = slow_except(
    [*product(tiny.ARCHITECTURES, ["sdpa"]), ("gpt2", "eager"), ("gemma3", "eager")],
    product(tiny.ARCHITECTURES, ["sdpa", "eager"]),
)
"""Pairs of an architecture and the attention of transformers."""
