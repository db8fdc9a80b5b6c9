import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from specheads.config.data import DataSettings, MixtureSource
from specheads.core.errors import InputError
from specheads.data import sources, tokenise
from specheads.data.prompts import held_out_prompts
from specheads.data.sources import SPLITS, read_split, split_of
from specheads.data.tokenise import UnansweredError, tokenise_corpus
from tests.data.conftest import BASE, write_jsonl

TEXTS = [f"def f_{number}():\n    return {number}\n" * (number % 7 + 1) for number in range(300)]


def write(path: Path, texts: list[str] = TEXTS, column: str = "text") -> str:
    return write_jsonl(path, [{column: text} for text in texts])


def corpus(tmp_path: Path, **choices: Any) -> DataSettings:
    return DataSettings(source="jsonl", path=write(tmp_path / "a.jsonl"), **choices)


def contents(documents: Any) -> list[list[int]]:
    return [documents.tokens(number).tolist() for number in range(len(documents))]


def refuse_reading(*_: object, **__: object) -> None:
    raise AssertionError("read again")


# documents


def test_documents_are_the_tokenizers_ids_with_the_end_token(tokenizer, tmp_path):
    data, total = corpus(tmp_path), 0
    for split in SPLITS:
        documents = tokenise_corpus(data, split, tokenizer)
        texts = [row["text"] for _, row in read_split(data, split)]
        assert len(documents) == len(texts)
        for number, text in enumerate(texts):
            expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            assert documents.tokens(number).tolist() == expected
            assert documents.lengths[number] == len(expected)
            assert documents.loss_mask(number).all()
        total += len(documents)
    assert total == len(TEXTS)


def test_long_text_file_is_cut_at_blank_lines(tmp_path):
    paragraphs = ["word " * (number % 90 + 1) + "\n\n" for number in range(4000)]
    file = tmp_path / "a.txt"
    file.write_text("".join(paragraphs))
    pieces = {
        location: row["text"]
        for split in SPLITS
        for location, row in read_split(DataSettings(source="text", path=str(file)), split)
    }
    in_order = sorted(pieces, key=lambda location: int(location.split()[1]))
    assert "".join(pieces[location] for location in in_order) == "".join(paragraphs)
    assert all(8000 <= len(pieces[location]) < 9000 for location in in_order[:-1])
    assert all(pieces[location].endswith("\n\n") for location in in_order)


# the cache


def test_second_start_reads_the_cache(tokenizer, tmp_path, monkeypatch):
    data = corpus(tmp_path)
    first = tokenise_corpus(data, "train", tokenizer)
    monkeypatch.setattr(tokenise, "read_source", refuse_reading)
    again = tokenise_corpus(data, "train", AutoTokenizer.from_pretrained(BASE))
    assert contents(again) == contents(first)
    assert len(tokenise_corpus(data, "validation", tokenizer)) > 0


@pytest.mark.parametrize("change", ["text", "tokenizer", "seed", "bound"])
def test_changed_text_settings_or_tokenizer_is_tokenised_again(tokenizer, tmp_path, change):
    seed, data = 0, corpus(tmp_path, max_documents=200)
    first = tokenise_corpus(data, "train", tokenizer, seed)
    if change == "text":
        write(tmp_path / "a.jsonl", [text.replace("f_", "g_") for text in TEXTS])
    elif change == "tokenizer":
        tokenizer.add_tokens(["return"])
    elif change == "seed":
        seed = 1
    else:
        data = corpus(tmp_path, max_documents=150)
    assert contents(tokenise_corpus(data, "train", tokenizer, seed)) != contents(first)


def test_changed_documents_have_another_identity(tokenizer, tmp_path):
    def identity(texts: list[str]) -> str:
        data = DataSettings(source="jsonl", path=write(tmp_path / "data.jsonl", texts))
        return tokenise_corpus(data, "train", tokenizer).identity()

    texts = [f"a text with the number {number}" for number in range(40)]
    changed = [
        [*texts, "one more text"],
        texts[:-1],
        [texts[-1], *texts[1:-1], texts[0]],
        [texts[0].replace("a", "b"), *texts[1:]],
        [*texts[:-1], f"{texts[-1]} longer"],
        # a row of another split
        [*texts, next(text for text in map(str, range(100)) if split_of(text) == "prompts")],
        [*texts, texts[0]],
    ]
    identities = [identity(version) for version in [texts, *changed, texts]]
    assert identities[0] == identities[-1]
    assert len(set(identities)) == len(changed) + 1


def _stall(data: DataSettings) -> None:
    def slow(*args: Any) -> Any:
        for document in read_source(*args):
            time.sleep(0.05)
            yield document

    read_source, tokenise.read_source = tokenise.read_source, slow
    tokenise.BATCH_ROWS = 5
    tokenise_corpus(data, "train", AutoTokenizer.from_pretrained(BASE))


@pytest.mark.slow
def test_killed_process_leaves_nothing_in_use(tokenizer, tmp_path, cache_folder):
    data = corpus(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=_stall, args=(data,))
    process.start()
    while not any(file.stat().st_size > 9999 for file in cache_folder.glob("tokens/.*/*.arrow")):
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert list(cache_folder.glob("tokens/.*/*.arrow"))
    documents = tokenise_corpus(data, "train", tokenizer)
    assert len(documents) == len(list(read_split(data, "train")))
    assert [folder.name[0] != "." for folder in (cache_folder / "tokens").iterdir()] == [True]


def test_damaged_cache_is_refused_with_the_remedy(tokenizer, tmp_path, cache_folder):
    data = corpus(tmp_path)
    tokenise_corpus(data, "train", tokenizer)
    (file,) = cache_folder.glob("tokens/*/*.arrow")
    content = file.read_bytes()
    for size in (0, len(content) - 300, len(content) - 8):
        file.write_bytes(content[:size])
        with pytest.raises(InputError, match=r"is damaged; remove .* to have it written again"):
            tokenise_corpus(data, "train", tokenizer)


# mixtures


def mixture(tmp_path: Path, **weights: float) -> DataSettings:
    sources = {}
    for name, weight in weights.items():
        number = 300 if name == "long" else 100
        texts = [f"{name} {index} " + "word " * (index % 9) for index in range(number)]
        path = write(tmp_path / f"{name}.jsonl", texts)
        sources[name] = MixtureSource(source="jsonl", path=path, weight=float(weight))
    return DataSettings(source="mixture", sources=sources)


def shares(documents: Any, tokenizer: Any) -> dict[str, float]:
    tokens: dict[str, int] = {}
    for number in range(len(documents)):
        name = str(tokenizer.decode(documents.tokens(number))).split()[0]
        tokens[name] = tokens.get(name, 0) + int(documents.lengths[number])
    return {name: count / sum(tokens.values()) for name, count in tokens.items()}


@pytest.mark.parametrize(("long", "short"), [(3, 1), (1, 20), (1, 0)])
def test_mixture_weights_are_fractions_of_tokens(tokenizer, tmp_path, long, short):
    documents = tokenise_corpus(mixture(tmp_path, long=long, short=short), "train", tokenizer)
    measured = shares(documents, tokenizer)
    assert measured["long"] == pytest.approx(long / (long + short), abs=0.01)
    assert set(measured) == ({"long", "short"} if short else {"long"})


def test_small_source_of_a_mixture_repeats_evenly(tokenizer, tmp_path):
    documents = tokenise_corpus(mixture(tmp_path, long=1, short=9), "train", tokenizer)
    texts = [str(tokenizer.decode(documents.tokens(number))) for number in range(len(documents))]
    counts = np.unique([text for text in texts if text.startswith("short")], return_counts=True)[1]
    assert counts.max() - counts.min() == 1
    rare = [text for text in texts if text.startswith("long")]
    assert len(set(rare)) == len(rare)


def test_empty_source_of_a_mixture_is_refused(tokenizer, tmp_path):
    data = mixture(tmp_path, long=1, short=1)
    Path(data.sources["short"].path).write_text("")
    with pytest.raises(InputError, match=r"short\.jsonl holds no row"):
        tokenise_corpus(data, "train", tokenizer)
    Path(data.sources["short"].path).write_text('{"text": " "}\n')
    with pytest.raises(
        InputError, match=r"one document in its train split, and jsonl .*short\.jsonl has none"
    ):
        tokenise_corpus(data, "train", tokenizer)


# conversations


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)


def talk(number: int, answer: str = "no") -> dict:
    turns = [{"role": "user", "content": f"is it {number}?"}]
    return {"messages": turns + [{"role": "assistant", "content": answer}] * bool(answer)}


@pytest.mark.usefixtures("chat")
def test_answers_are_in_the_loss_and_a_question_is_in_one_split(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [talk(number, answer) for number in range(200) for answer in ("no", "yes, it is")]
    write_jsonl(file, rows)
    data = DataSettings(source="chat", path=str(file))
    questions = {
        split: {row["messages"][0]["content"] for _, row in read_split(data, split)}
        for split in SPLITS
    }
    assert sum(map(len, questions.values())) == len(set().union(*questions.values())) == 200
    documents = tokenise_corpus(data, "train", tokenizer)
    assert len(documents) == 2 * len(questions["train"])
    for number in range(len(documents)):
        answer = documents.tokens(number)[documents.loss_mask(number)]
        assert tokenizer.decode(answer[:-1]) in ("no", "yes, it is")
        assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.usefixtures("chat")
def test_no_conversation_that_is_learned_begins_with_a_held_out_question(tokenizer, tmp_path):
    """Some data sets have a row for every prefix of a conversation."""
    file = tmp_path / "a.jsonl"
    rows = []
    for number in range(100):
        messages = talk(number)["messages"]
        longer = [*messages, {"role": "user", "content": f"why {number}?"}, messages[1]]
        rows += [{"messages": messages}, {"messages": longer}]
    write_jsonl(file, rows)
    data = DataSettings(source="chat", path=str(file))
    prompts = [prompt.text for prompt in held_out_prompts(data, "prompts", tokenizer, 8, 1000)]
    learned = tokenise_corpus(data, "train", tokenizer)
    texts = [str(tokenizer.decode(learned.tokens(number))) for number in range(len(learned))]
    assert len(prompts) == len({*prompts}) > 1
    assert not any(text.startswith(prompt) for prompt in prompts for text in texts)


@pytest.mark.usefixtures("chat")
def test_mixture_has_conversations_and_text(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "split_of", lambda _: "prompts")
    file = tmp_path / "talk.jsonl"
    write_jsonl(file, [talk(number) for number in range(9)])
    data = mixture(tmp_path, short=1)
    data.sources["talk"] = MixtureSource(source="chat", path=str(file))
    counted = tokenise_corpus(data, "prompts", tokenizer)
    masks = [counted.loss_mask(number).all() for number in range(len(counted))]
    assert True in masks
    assert False in masks
    prompts = held_out_prompts(data, "prompts", tokenizer, 8, 1000)
    assert sum("is it" in prompt.text for prompt in prompts) == 9
    assert len(prompts) > 9
    assert all(len(prompt.tokens) == 8 for prompt in prompts if "is it" not in prompt.text)
    few_prompts = held_out_prompts(data, "prompts", tokenizer, 8, 10)
    assert {"is it" in prompt.text for prompt in few_prompts} == {True, False}
    # where no text is long enough there are conversations still
    assert len(held_out_prompts(data, "prompts", tokenizer, 10_000, 40)) == 9


@pytest.mark.usefixtures("chat")
def test_conversation_without_answer_is_refused_with_distill(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    write_jsonl(file, [talk(1), talk(2, "")])
    with pytest.raises(InputError, match=r"needs an answer .*line 2 of .* lacks one"):
        tokenise_corpus(DataSettings(source="chat", path=str(file)), "train", tokenizer)
    write_jsonl(file, [talk(1, ""), talk(2, "")])
    with pytest.raises(UnansweredError, match=r"line 1 of .* has no answer; .* specheads distill"):
        tokenise_corpus(DataSettings(source="chat", path=str(file)), "train", tokenizer)
