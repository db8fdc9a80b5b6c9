"""Packing: every token once, and rows by sample number."""

import itertools
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.core.errors import InputError
from specheads.data.packing import PackedText, TokenBatch, pack_best_fit, pack_end_to_end
from specheads.data.tokenise import TokenisedDocuments

PACKINGS = "best_fit", "stream", "none"
LENGTHS = [3, 9, 1, 16, 5, 0, 40, 2, 7, 11, 4, 30, 6, 8, 13]


def documents(tokens: list[Any], masks: list[Any]) -> TokenisedDocuments:
    columns = {
        "tokens": pa.array(tokens, pa.list_(pa.int32())),
        "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
    }
    return TokenisedDocuments(pa.table(columns))


def numbered(lengths: list[int]) -> TokenisedDocuments:
    """Return documents of which every token is another number, from 1 on; odd ones count."""
    first = np.cumsum([1, *lengths]).tolist()
    tokens = [list(range(begin, end)) for begin, end in itertools.pairwise(first)]
    return documents(tokens, [[token % 2 for token in row] for row in tokens])


def pack(packing: str, lengths: list[int] = LENGTHS, **choices: Any) -> PackedText:
    sizes: dict[str, Any] = {"sequence_length": 16, "batch_size": 2} | choices
    return PackedText(numbered(lengths), packing=packing, **sizes)


def epoch(text: PackedText) -> TokenBatch:
    return text.batch(range(text.rows_per_epoch))


# rows


def best_fit_one_by_one(lengths: list[int], length: int) -> list[int]:
    """Return the room left in each row: the definition, a document at a time."""
    rooms: list[int] = []
    for size in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= size]
        if not fitting:
            fitting.append(len(rooms))
            rooms.append(length)
        rooms[min(fitting, key=rooms.__getitem__)] -= size
    return sorted(rooms)


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(30, 40))
def test_best_fit_equals_placing_documents_one_by_one(sizes: list[int], length: int):
    rows = pack_best_fit(np.array(sizes, dtype=np.int64), length)
    row_sizes = [
        sum(stop - start for _, start, stop in rows.pieces(row)) for row in range(len(rows))
    ]
    assert sorted(length - size for size in row_sizes) == best_fit_one_by_one(sizes, length)


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 20))
def test_best_fit_has_every_token_once_and_no_overfull_row(sizes: list[int], length: int):
    rows = pack_best_fit(np.array(sizes, dtype=np.int64), length)
    counts: Counter[tuple[int, int]] = Counter()
    for row in range(len(rows)):
        pieces = list(rows.pieces(row))
        assert 0 < sum(stop - start for _, start, stop in pieces) <= length
        counts.update(
            (document, at) for document, start, stop in pieces for at in range(start, stop)
        )
    assert counts == Counter(
        (document, at) for document, size in enumerate(sizes) for at in range(size)
    )


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 20), st.randoms())
def test_stream_has_all_documents_in_order_without_the_short_last_row(
    sizes: list[int], length: int, chance
):
    order = list(range(len(sizes)))
    chance.shuffle(order)
    rows = pack_end_to_end(np.array(sizes, dtype=np.int64), length, np.array(order, dtype=np.int64))
    flat = [(document, at) for document in order for at in range(sizes[document])]
    packed = [
        (document, at)
        for row in range(len(rows))
        for document, start, stop in rows.pieces(row)
        for at in range(start, stop)
    ]
    assert len(rows) == len(flat) // length
    assert packed == flat[: len(rows) * length]


# batches


@pytest.mark.parametrize("packing", PACKINGS)
def test_epoch_has_every_token_once_with_its_loss_mask(packing: str):
    text = pack(packing)
    batch = epoch(text)
    real = batch.tokens > 0
    tokens = sorted(batch.tokens[real].tolist())
    assert len(set(tokens)) == len(tokens)
    assert len(tokens) == {"best_fit": 155, "stream": 144, "none": 117}[packing]
    assert torch.equal(batch.loss_mask, real & (batch.tokens % 2 == 1))


@pytest.mark.parametrize("packing", ["best_fit", "stream"])
def test_each_piece_of_a_document_begins_as_the_document(packing: str):
    """Many bases have read every text after <bos>."""
    opened = [90, *range(1, 11)]
    text = documents([opened, list(range(20, 31))], [None, None])
    sizes: dict[str, Any] = {"sequence_length": 4, "batch_size": 1, "opening": [90]}
    batch = epoch(PackedText(text, packing=packing, **sizes))
    rows = batch.tokens.tolist()
    later = [
        mask
        for row, mask in zip(rows, batch.loss_mask.tolist(), strict=True)
        if row[1] > 1 and row[0] == 90
    ]
    assert later
    assert all(mask[:2] == [False, True] for mask in later)
    if packing == "best_fit":
        # the second document has no opening
        pieces = [[90, 1, 2, 3], [90, 5, 6, 7], [90, 9, 10], [20, 21, 22, 23], [24, 25, 26, 27]]
        assert all(piece in [row[: len(piece)] for row in rows] for piece in pieces)


@pytest.mark.parametrize(
    ("packing", "lengths"), [("best_fit", [16, 16, 9]), ("stream", LENGTHS), ("none", LENGTHS)]
)
def test_rows_of_one_document_have_no_document_ids(packing: str, lengths: list[int]):
    assert epoch(pack(packing, lengths)).document_ids is None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_the_batches_of_one_process(packing: str, world_size: int):
    alone = pack(packing, batch_size=4).batches()
    ranks = [
        pack(packing, batch_size=4, rank=rank, world_size=world_size).batches()
        for rank in range(world_size)
    ]
    for _ in range(9):
        (batch, cursor), rank_batches = next(alone), [next(rank) for rank in ranks]
        assert torch.equal(
            batch.tokens, torch.cat([rank_batch.tokens for rank_batch, _ in rank_batches])
        )
        assert torch.equal(
            batch.loss_mask, torch.cat([rank_batch.loss_mask for rank_batch, _ in rank_batches])
        )
        assert [number for rank_batch, _ in rank_batches for number in rank_batch.samples] == [
            *batch.samples
        ]
        assert [rank_cursor for _, rank_cursor in rank_batches] == [cursor] * world_size


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("stop", [1, 5, 17])
def test_cursor_resumes_bit_for_bit_with_any_number_of_ranks(packing: str, stop: int):
    batches = list(itertools.islice(pack(packing, batch_size=4).batches(), 25))
    cursor = json.loads(json.dumps(batches[stop - 1][1]))
    assert cursor == {"sample": 4 * stop}
    for world_size in (1, 2):
        rank = pack(packing, batch_size=4, world_size=world_size)
        resumed = itertools.islice(rank.batches(cursor), 25 - stop)
        for (batch, next_cursor), (expected, expected_cursor) in zip(
            resumed, batches[stop:], strict=True
        ):
            assert torch.equal(batch.tokens, expected.tokens[: 4 // world_size])
            assert batch.first_sample == expected.first_sample
            assert next_cursor == expected_cursor


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_epoch_has_its_own_order_from_the_seed(packing: str):
    def orders(seed: int) -> list[list[list[int]]]:
        text = pack(packing, seed=seed)
        count = text.rows_per_epoch
        return [text.batch(range(n * count, (n + 1) * count)).tokens.tolist() for n in range(3)]

    first = orders(0)
    assert first == orders(0)
    assert first != orders(1)
    assert first[0] != first[1] != first[2]
    if packing != "stream":
        assert sorted(first[0]) == sorted(first[1]) == sorted(first[2])


@pytest.mark.parametrize("packing", PACKINGS)
def test_too_little_text_for_one_batch_is_refused_with_numbers(packing: str):
    message = "a batch of 6 x 16 tokens needs as many rows, and 2 documents of 20 tokens fill"
    with pytest.raises(InputError, match=re.escape(message)):
        pack(packing, [12, 8], batch_size=6)
    with pytest.raises(InputError, match="needs as many rows, and 0 documents of 0 tokens fill 0"):
        pack(packing, [])


def test_batch_parts_are_nearly_equal_and_know_their_samples():
    batch = pack("best_fit").batch(range(7, 12))
    batches = list(batch.split(3))
    assert [list(piece.samples) for piece in batches] == [[7], [8, 9], [10, 11]]
    for name in ("tokens", "loss_mask", "document_ids"):
        assert torch.equal(
            torch.cat([getattr(piece, name) for piece in batches]), getattr(batch, name)
        )


@pytest.mark.parametrize(
    ("packing", "length", "answer"),
    [("none", 8, 9), ("none", 2, 3), ("none", 12, 16), ("best_fit", 16, 0), ("stream", 16, 0)],
)
def test_rows_without_a_token_in_the_loss_are_refused(packing: str, length: int, answer: int):
    text = documents([range(20)] * 3, [[int(position >= answer > 0) for position in range(20)]] * 3)

    def packed(length: int) -> PackedText:
        return PackedText(text, sequence_length=length, batch_size=1, packing=packing)

    with pytest.raises(InputError, match=f"in its first {length} tokens, .* answer is cut off"):
        packed(length)
    if answer:
        packed(answer + 1)
