"""Traces: token ids with a loss mask, as agents leave them, become documents, or are refused."""

import json
from typing import Any

import pytest
from datasets import Dataset

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data.prompts import held_out_prompts
from specheads.data.sources import SPLITS
from specheads.data.tokenise import tokenise_corpus
from specheads.data.traces import trace
from tests.data.conftest import write_jsonl

IDS, MASK = [5, 6, 7, 8, 9], [0, 0, 1, 1, 0]
ROW = {"input_ids": IDS, "loss_mask": MASK}
ASKED = {"role": "user", "token_ids": [5, 6]}
SAID = {"role": "assistant", "content": "so", "token_ids": [7, 8]}
TOOL = {"role": "tool", "token_ids": [9]}
TURNS = [ASKED, SAID, TOOL]


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"input_ids": IDS, "loss_mask": [False, False, True, True, False]},
        ROW
        | {"id": "t:branch-0", "tools": [], "conversations": [{"role": "user"}], "metadata": {}},
        {"tokens": TURNS},
        {"message_log": TURNS, "input_ids": None},
        {"tokens": [ASKED, SAID | {"token_loss_mask": [1, 1]}, TOOL | {"token_loss_mask": [0]}]},
        {"tokens": [ASKED, SAID | {"logprobs": [0.1, 0.2]}, TOOL], "extra": 1},
    ],
)
def test_published_form_gives_ids_and_mask(row: dict[str, Any]):
    assert trace(row, "a row", ["logprobs", "extra"]) == ROW


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": IDS}, "needs input_ids and loss_mask, .* has input_ids"),
        ({"input_ids": [], "loss_mask": []}, "needs input_ids and loss_mask"),
        ({"input_ids": None, "loss_mask": None, "id": "x"}, "needs input_ids .* has id"),
        ({"input_ids": IDS, "loss_mask": [0.0] * 5}, "lists of integers"),
        ({"input_ids": ["a"] * 5, "loss_mask": MASK}, "lists of integers"),
        ({"input_ids": IDS, "loss_mask": MASK[1:]}, "the same length; .* has 5 and 4"),
        ({"input_ids": IDS, "loss_mask": [0, 0, 2, 1, 0]}, "must hold 0 and 1 only; .* has 2"),
        ({"input_ids": IDS, "loss_mask": [0] * 5}, "a token in the loss; .* loss_mask of 0 only"),
        (ROW | {"attention_mask": MASK}, "neither: attention_mask .*data.ignore"),
        (
            {"tokens": [ASKED, {"role": "assistant"}]},
            "each turn of a trace needs role and token_ids",
        ),
        (
            {"tokens": [ASKED, SAID | {"token_loss_mask": [1]}]},
            "token_loss_mask of the same length",
        ),
        ({"tokens": [3]}, "each turn of a trace needs .* has 3"),
        ({"tokens": [ASKED, SAID | {"advantages": [1]}]}, "neither: advantages"),
    ],
)
def test_row_that_is_no_trace_is_refused_with_its_line(row: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message) as caught:
        trace(row, "line 7 of traces.jsonl")
    assert "line 7 of traces.jsonl" in str(caught.value)


def rows() -> list[dict[str, Any]]:
    """Return 200 traces of 100 questions."""
    return [
        {
            "input_ids": [*range(number % 100, number % 100 + 4), 9, number],
            "loss_mask": [0, 0, 0, 0, 1, 1],
        }
        for number in range(200)
    ]


def test_traces_are_documents_with_their_mask_and_give_held_out_prompts(tokenizer, tmp_path):
    Dataset.from_list(rows()).to_parquet(tmp_path / "a.parquet")
    paths = write_jsonl(tmp_path / "a.jsonl", rows()), str(tmp_path / "a.parquet")
    for data in (DataSettings(source="traces", path=path) for path in paths):
        starts = {}
        for split in SPLITS:
            documents = tokenise_corpus(data, split, tokenizer)
            ids = [documents.tokens(number).tolist() for number in range(len(documents))]
            starts[split] = {tuple(row_ids[:4]) for row_ids in ids}
            assert documents.loss_mask(0).tolist() == [False] * 4 + [True] * 2
            assert all(row_ids in [row["input_ids"] for row in rows()] for row_ids in ids)
        # all traces of a question are in one split
        assert sum(map(len, starts.values())) == 100
        prompts = held_out_prompts(data, "prompts", tokenizer, 64, 100)
        assert {tuple(prompt.tokens) for prompt in prompts} == starts["prompts"]
        with pytest.raises(InputError, match="thinking needs questions"):
            held_out_prompts(data, "prompts", tokenizer, 64, 100, thinking=[True])


def test_bad_traces_are_listed_or_left_out(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    write_jsonl(file, [*rows(), {"input_ids": [10**6], "loss_mask": [1]}, {"input_ids": [1]}])
    file.write_text(file.read_text() + json.dumps(3) + "\n")
    data = DataSettings(source="traces", path=str(file))
    top = len(tokenizer) - 1
    message = (
        rf"3 rows of .*loss_mask.*line 202.*tokenizer, 0 to {top} \(1: line 201 .* has 1000000"
    )
    with pytest.raises(InputError, match=message):
        tokenise_corpus(data, "train", tokenizer)
    dropped = DataSettings(source="traces", path=str(file), bad_rows="drop")
    with pytest.warns(UserWarning, match="3 rows of .*they are left out"):
        assert len(tokenise_corpus(dropped, "train", tokenizer)) > 100
