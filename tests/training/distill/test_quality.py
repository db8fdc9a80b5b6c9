"""Faults of answers: loops, empty and truncated answers."""

import pytest

from specheads.training.distill.engine import Answer
from specheads.training.distill.run import fault

ALL = ("loop", "empty", "truncated")
PARAGRAPH = list(range(100, 160))


@pytest.mark.parametrize(
    ("tokens", "finish", "found"),
    [
        ([7, 8, 9, 2], "eos", ""),
        ([2], "eos", "empty"),
        ([], "eos", "empty"),
        ([0, 0, 2], "eos", "empty"),
        ([7, 8, 9], "length", "truncated"),
        ([1, 5, *[7, 8, 9] * 20], "length", "loop"),
        ([*[7, 8, 9] * 20, 2], "eos", "loop"),
        ([*PARAGRAPH * 2, 2], "eos", ""),
        ([*PARAGRAPH * 4, 2], "eos", "loop"),
        ([*[7] * 30, 2], "eos", ""),
    ],
)
def test_faults_are_found_whatever_ended_the_answer(tokens, finish, found):
    def decode(ids: list[int]) -> str:
        return "".join(" " if one == 0 else "x" for one in ids)

    assert fault(Answer(0, tokens, finish), ALL, (2,), decode) == found
    assert fault(Answer(0, tokens, finish), (), (2,), decode) == ""
