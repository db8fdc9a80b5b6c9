"""Prompts by number: windows of documents, turns of conversations."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers.processors import TemplateProcessing

from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings, MixtureSource
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.data import sources
from specheads.data.chat import Template
from specheads.data.tokenise import TokenisedDocuments
from specheads.training.distill.prompts import (
    ContinuationPrompts,
    ConversationPrompts,
    prompt_source,
)
from tests.export.trained import BASE

END = 0


def documents(*texts: list[int]) -> TokenisedDocuments:
    return TokenisedDocuments(pa.table({"tokens": pa.array(texts, pa.list_(pa.int32()))}))


def test_prompts_spread_over_a_document_without_its_end():
    #  document  1 2 3 4 5 6 7 8 9 0     windows of 2 + 3: 1 2, then 6 7
    prompts = ContinuationPrompts(documents([*range(1, 10), END]), prompt_tokens=2, new_tokens=3)
    assert sorted(prompts.first_prompt(number) for number in range(2)) == [[1, 2], [6, 7]]
    # a second lap shifts by the prompt length, if there is space
    assert sorted(prompts.first_prompt(number) for number in range(2, 4)) == [[3, 4], [8, 9]]
    assert prompts.next_prompt(0, [1, 2, 3], [[3]]) is None


def test_every_prompt_begins_with_the_tokens_before_every_text():
    text = documents([50, *range(1, 10), END])
    prompts = ContinuationPrompts(text, prompt_tokens=3, new_tokens=2, opening=[50])
    #  windows of 3 + 2: 50 1 2, then 5 6 7, whose first token makes room
    assert sorted(prompts.first_prompt(number) for number in range(2)) == [[50, 1, 2], [50, 6, 7]]
    assert (
        prompts.fingerprint != ContinuationPrompts(text, prompt_tokens=3, new_tokens=2).fingerprint
    )


def test_windows_of_a_document_begin_as_the_tokenizer_begins_a_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    base = FrozenBase.load(BASE, dtype="float32", device="cpu")
    tokenizer: Any = base.tokenizer
    first = [(tokenizer.eos_token, tokenizer.eos_token_id)]
    pieces = {"single": f"{tokenizer.eos_token} $A", "special_tokens": first}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**pieces)
    settings = DistillSettings(num_samples=20, prompt_tokens=8, new_tokens=8)
    prompts = prompt_source(DataSettings(source="files", path=str(tmp_path)), base, settings, 0)
    token_ids = [prompts.first_prompt(number) for number in range(20)]
    end_id = tokenizer.eos_token_id
    assert all(len(ids) == 8 and ids.count(end_id) == 1 for ids in token_ids)
    assert {ids[0] for ids in token_ids} == {end_id}
    assert len({*map(tuple, token_ids)}) == 20


def test_short_document_is_one_prompt_and_an_empty_one_none():
    prompts = ContinuationPrompts(
        documents([5, END], [END], [6, 7, END]), prompt_tokens=4, new_tokens=4
    )
    assert sorted(prompts.first_prompt(number) for number in range(2)) == [[5], [6, 7]]
    with pytest.raises(InputError, match="none of 1 documents"):
        ContinuationPrompts(documents([END]), prompt_tokens=4, new_tokens=4)


class Letters(Template):
    """A template with one letter per role, whose tokens are characters."""

    def __init__(self) -> None:
        pass

    @property
    def fingerprint(self) -> str:
        return "letters"

    def encode_prompt(self, messages, tools=None, where="") -> list[int]:
        assert (tools, where) == (None, "")
        text = "".join(f"{message['role'][0]}{message['content']}" for message in messages)
        return [ord(letter) for letter in f"{text}a"]

    def parse_answer(self, tokens) -> dict[str, str]:
        return message("assistant", "".join(map(chr, tokens)))

    def extend_prompt(self, tokens, messages, tools=None, where="") -> list[int]:
        assert (tools, where) == (None, "")
        assert messages[-2]["role"] == "assistant"
        return [*tokens, *self.encode_prompt(messages[-1:])]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompts_of_chat(messages: list[dict[str, str]], num_answers: int) -> list[str]:
    """Return the prompts of all turns; the base's answers are A, B, C."""
    chats = ConversationPrompts([json.dumps({"messages": messages})], Letters())
    tokens, prompts, answers = chats.first_prompt(0), [], []
    for number in range(num_answers):
        prompts.append("".join(map(chr, tokens)))
        answers.append([ord("A") + number])
        next_tokens = chats.next_prompt(0, tokens + answers[-1], answers)
        if next_tokens is None:
            break
        tokens = next_tokens
    return prompts


SYSTEM, ONE, TWO, THREE = message("system", "s"), *(message("user", number) for number in "123")
ANSWER = message("assistant", "theirs")


@pytest.mark.parametrize(
    ("messages", "prompts"),
    [
        (
            [SYSTEM, ONE, ANSWER, TWO, ANSWER, THREE, ANSWER],
            ["ssu1a", "ssu1aAu2a", "ssu1aAu2aBu3a"],
        ),
        # a greeting is no prompt
        ([SYSTEM, ANSWER, ONE], ["ssu1a"]),
        # a tool message ends the conversation
        ([ONE, ANSWER, message("tool", "9"), TWO], ["u1a"]),
        ([SYSTEM], [""]),
    ],
)
def test_user_turns_follow_the_bases_own_answers(messages, prompts):
    assert prompts_of_chat(messages, 9) == prompts


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((1, 1), (40, 20)), ((7, 7), (40, 20)), ((1, 2), (30, 30)), ((3, 1), (51, 9))],
)
def test_weights_of_a_mixture_decide_how_often_its_questions_are_asked(
    weights: tuple[int, int],
    counts: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sources, "split_of", lambda _: "train")
    weighted_sources = {}
    for name, size, weight in zip("ab", (40, 20), weights, strict=True):
        file = tmp_path / f"{name}.jsonl"
        rows = ({"messages": [message("user", f"{name} {number}")]} for number in range(size))
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        weighted_sources[name] = MixtureSource(source="chat", path=str(file), weight=float(weight))
    base = FrozenBase.load(BASE, dtype="float32", device="cpu")
    tokenizer: Any = base.tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data, settings = (
        DataSettings(source="mixture", sources=weighted_sources),
        DistillSettings(num_samples=60),
    )
    prompts = prompt_source(data, base, settings, 0)
    texts = Counter(str(tokenizer.decode(prompts.first_prompt(number))) for number in range(60))
    source_counts = Counter(text[0] for text in texts.elements())
    assert (source_counts["a"], source_counts["b"]) == counts
    # a source's questions are prompts equally often, up to one
    for name in "ab":
        times = [count for text, count in texts.items() if text[0] == name]
        size = 40 if name == "a" else 20
        times += [0] * (size - len(times))
        assert max(times) - min(times) <= 1
