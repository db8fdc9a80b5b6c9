"""The lookup index on the host finds what prompt lookup copies on the device."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.decoding.prompt_lookup import LookupIndex, continuation

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def on_device(text: list[int], copied: int, most: int, least: int) -> list[int]:
    last = torch.tensor([len(text) - 1])
    found = continuation(torch.tensor([text]), last, copied, most, least)[0]
    return [one for one in found.tolist() if one >= 0]


@given(text=TEXT, told=st.integers(0, 40), copied=st.integers(1, 8), most=st.integers(1, 4))
def test_the_index_finds_what_prompt_lookup_copies(
    text: list[int], told: int, copied: int, most: int
):
    for least in range(1, most + 1):
        found = LookupIndex(text[:told], max_ngram=most, min_ngram=least)
        found.extend(text[told:])
        matched, following = found.find(copied)
        assert following == on_device(text, copied, most, least)
        # exactly as many tokens come before; asking for fewer gives the same
        if matched:
            assert following == on_device(text, copied, most, matched)
        if matched < most:
            assert not on_device(text, copied, most, max(matched + 1, least))


def test_the_most_recent_full_continuation_is_copied_else_the_longest():
    # 7 8 occurs at 0, 4 and 8, and for the fourth time at the end
    found = LookupIndex([7, 8, 1, 2, 7, 8, 3, 4, 7, 8, 5, 7, 8])
    assert found.find(3) == (2, [5, 7, 8])
    assert found.find(4) == (2, [3, 4, 7, 8])
    assert found.find(20) == (2, [1, 2, 7, 8, 3, 4, 7, 8, 5, 7, 8])


def test_where_nothing_stood_before_nothing_is_found():
    assert LookupIndex([]).find(3) == (0, [])
    assert LookupIndex([1, 2, 3]).find(3) == (0, [])
    assert LookupIndex([1, 2, 1], min_ngram=2).find(3) == (0, [])
    assert LookupIndex([1, 2, 1]).find(3) == (1, [2, 1])
