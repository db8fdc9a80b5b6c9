"""Prompts by name and from files, with and without a chat template."""

import gzip
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers.processors import (
    BertProcessing,
    ByteLevel,
    RobertaProcessing,
    Sequence,
    TemplateProcessing,
)
from transformers import PreTrainedTokenizerBase

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data import files, sources
from specheads.data.prompts import (
    PromptSet,
    drop_long_prompts,
    held_out_prompts,
    load_prompts,
    prepend_context,
)
from specheads.data.sources import split_of
from tests.data.conftest import CATEGORIES, ENTROPIES, LENGTHS, speed_bench, write_jsonl

TEXTS = [f"document {number}: " + "word " * (number % 7 + 1) for number in range(120)]


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_every_held_out_file_gives_a_prompt_before_any_gives_two(tokenizer, tmp_path, monkeypatch):
    for number in range(6):
        lines = [f"value_{number} = {number}{line}" for line in range(60)]
        (tmp_path / f"{number}.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(sources, "split_of", lambda _: "prompts")

    def load(count: int) -> PromptSet:
        return load_prompts("python_stdlib", tokenizer, num_prompts=count, prompt_tokens=16)

    prompt_set = load(9)
    assert {len(prompt.tokens) for prompt in prompt_set.prompts} == {16}
    assert len({tuple(prompt.tokens) for prompt in prompt_set.prompts}) == 9
    numbers = [re.findall(r"value_(\d) =", prompt.text)[-1] for prompt in prompt_set.prompts]
    assert sorted(numbers[:6]) == list("012345")
    assert len(set(numbers[6:])) == 3
    assert load(9) == prompt_set
    assert load(6).prompts == prompt_set.prompts[:6]
    assert load(6).version != prompt_set.version


ROWS = [
    {"prompt": "def f(x):", "category": "code", "messages": None},
    {"turns": ["first question", "second question"], "category": "chat"},
    {"question": "how many?"},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_prompt_file_is_read_in_order(tokenizer, tmp_path, name):
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    opened = gzip.open if name.endswith("gz") else Path.open
    with opened(tmp_path / name, "wt") as file:
        file.write(text)
    prompt_set = load_prompts(str(tmp_path / name), tokenizer, num_prompts=10)
    assert prompt_set.name == name
    assert [prompt.text for prompt in prompt_set.prompts] == [
        "def f(x):",
        "first question",
        "how many?",
    ]
    assert [prompt.category for prompt in prompt_set.prompts] == ["code", "chat", ""]
    assert all(prompt.tokens == ids_of(prompt.text, tokenizer) for prompt in prompt_set.prompts)


def test_chat_rows_use_the_template(chat_tokenizer, tokenizer, tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}, {"turns": ["hi"]}])
    prompt_set = load_prompts(path, chat_tokenizer, num_prompts=10)
    assert [prompt.text for prompt in prompt_set.prompts] == [
        "<system>be brief<user>hello<assistant>",
        "<user>hi<assistant>",
    ]
    assert prompt_set.prompts[0].tokens == ids_of(prompt_set.prompts[0].text, chat_tokenizer)
    with pytest.raises(ValueError, match=r"need a tokenizer with a chat template"):
        load_prompts(path, tokenizer, num_prompts=10)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "how many?", "answer": "4"},
        {"prompt": "how many?", "entry_point": "count", "task_id": "HumanEval/0"},
        {"text": "how many?", "code": "4", "test_list": ["assert count() == 4"]},
        {"problem": "how many?", "solution": "one", "answer": "4", "subject": "c", "level": 2,
         "unique_id": "test/1.json"},
        {"problem": "how many?", "answer": "4", "id": "0"},
        {"instruction": "how many?", "input": "", "output": "4", "text": "ask: how many? 4"},
        {"uid": "x", "category": "c", "subcategory": "d", "language": "en", "prompt": "how many?"},
        {"question_title": "A", "question_content": "how many?", "platform": "atcoder",
         "question_id": "a", "contest_id": "b", "contest_date": "2025-01-01", "starter_code": "",
         "difficulty": "c", "public_test_cases": "[4]", "private_test_cases": "eJx",
         "metadata": "{}"},
    ],
    ids=["gsm8k", "humaneval", "mbpp", "math500", "aime", "alpaca", "arena_hard", "livecodebench"],
)  # fmt: skip
def test_question_of_a_public_set_uses_the_template(row, chat_tokenizer, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    (prompt,) = load_prompts(path, chat_tokenizer, num_prompts=1).prompts
    assert prompt.text == "<user>how many?<assistant>"
    assert prompt.tokens == ids_of(prompt.text, chat_tokenizer)
    assert prompt.category == ("c" if "c" in row.values() else "")
    (plain,) = load_prompts(path, tokenizer, num_prompts=1).prompts
    assert (plain.text, plain.tokens) == ("how many?", ids_of("how many?", tokenizer))


def test_larger_set_is_sampled_by_the_seed(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in TEXTS])
    first, again, another_seed = (
        load_prompts(path, tokenizer, num_prompts=20, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert len(first.prompts) == 20
    assert first.version != another_seed.version


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": " "}', "line 2 of .* has empty columns only"),
        ('{"output": "x"}', "prompt, turns or a question; line 2 of .* has empty"),
        ('{"turns": ["a", " "]}', "turns must be a list .* line 2 of"),
        ('{"prompt": "a", "hint": "b"}', "neither: hint .* line 2 of"),
        ("[1]", "one JSON object a line; line 2 of"),
    ],
)
def test_row_without_prompt_is_refused_with_its_line(tokenizer, tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), tokenizer, num_prompts=10)


def test_unknown_or_empty_prompts_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"python_stdlib, held_out.*spec_bench, .* got 'human'"):
        load_prompts("human", tokenizer, num_prompts=1)
    with pytest.raises(ValueError, match=r"file that exists; got '.*/a.jsonl'"):
        load_prompts(str(tmp_path / "a.jsonl"), tokenizer, num_prompts=1)
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(ValueError, match="holds no row"):
        load_prompts(str(tmp_path / "b.jsonl"), tokenizer, num_prompts=1)


U, A = ({"role": role} for role in ("user", "assistant"))
ASK, SAY, MORE = U | {"content": "ask"}, A | {"content": "SAY"}, U | {"content": "more"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "SAY"}]},
         "<user>ask<assistant>"),
        ({"messages": [ASK, SAY, MORE, SAY, SAY]}, "<user>ask<assistant>SAY<user>more<assistant>"),
        ({"messages": [SAY, ASK, SAY], "prompt": "ask"}, "<assistant>SAY<user>ask<assistant>"),
        ({"prompt": [ASK], "completion": [SAY]}, "<user>ask<assistant>"),
        ({"instruction": "ask", "input": "more", "output": "SAY"}, "<user>ask\n\nmore<assistant>"),
        ({"system": "be", "prompt": "ask", "response": "SAY"}, "<system>be<user>ask<assistant>"),
        ({"system": "be", "turns": ["ask"], "reference": ["S"]}, "<system>be<user>ask<assistant>"),
        ({"prompt": "ask", "canonical_solution": "SAY", "test": "SAY"}, "ask"),
        ({"messages": [ASK, A | {"tool_calls": [{"name": "SAY"}]}]}, "<user>ask<assistant>"),
        ({"problem": "ask", "reasoning": "SAY", "solution": "SAY"}, "<user>ask<assistant>"),
    ],
)  # fmt: skip
def test_prompt_never_holds_its_answer(chat_tokenizer, tmp_path, row, text):
    Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    for path in (write_jsonl(tmp_path / "a.jsonl", [row]), str(tmp_path / "a.parquet")):
        (prompt,) = load_prompts(path, chat_tokenizer, num_prompts=1).prompts
        assert prompt.text == text


END, PAD = ("<|endoftext|>", 0), ("<|pad|>", 1)


def framed(single: str) -> TemplateProcessing:
    single = single.format(end=END[0], pad=PAD[0])
    return TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=[END, PAD])


@pytest.mark.parametrize(
    ("processor", "before"),
    [
        (framed("$A {end}"), []),
        (framed("{pad} $A {end}"), [1]),
        (framed("$A {end} {end}"), []),
        (framed("$A {pad}"), []),
        (Sequence([ByteLevel(trim_offsets=False), framed("$A {end}")]), []),
        (BertProcessing(END, PAD), [1]),
        (RobertaProcessing(END, PAD), [1]),
    ],
)
@pytest.mark.parametrize("row", [{"prompt": "def f"}, {"turns": ["def f"]}, {"question": "def f"}])
def test_prompt_has_no_end_token(tokenizer, tmp_path, processor, before, row):
    plain = ids_of("def f", tokenizer)
    tokenizer.backend_tokenizer.post_processor = processor
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    (prompt,) = load_prompts(path, tokenizer, num_prompts=1).prompts
    assert prompt.tokens == [*before, *plain]


def test_end_token_at_the_end_of_a_text_or_of_a_template(chat_tokenizer, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "def f<|endoftext|>"}])
    assert load_prompts(path, tokenizer, num_prompts=1).prompts[0].tokens == ids_of(
        "def f", tokenizer
    )
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    path = write_jsonl(tmp_path / "a.jsonl", [{"turns": ["hi"]}])
    with pytest.raises(InputError, match="must not end with the end token; line 1 of"):
        load_prompts(path, chat_tokenizer, num_prompts=1)


@pytest.mark.parametrize("longer", [[2], [1], [5], [3, 5], [1, 2, 3, 4]])
def test_too_long_prompts_are_named_or_skipped_and_counted(tokenizer, tmp_path, longer):
    rows = [{"prompt": "word " * (40 if line in longer else 4)} for line in range(1, 6)]
    prompts = load_prompts(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, num_prompts=5)
    message = rf"{len(longer)} of 5 have more: \d+ in line {longer[0]} of .*a\.jsonl"
    with pytest.raises(InputError, match=f"leaves 20 tokens.*{message}.*too_long=skip"):
        drop_long_prompts(prompts, 20, "stop")
    with pytest.warns(UserWarning, match=f"{message}.*they are left out"):
        shorter = drop_long_prompts(prompts, 20, "skip")
    assert len(shorter.prompts) == 5 - len(longer)
    assert shorter.version != prompts.version
    assert drop_long_prompts(shorter, 20, "stop") is shorter
    for room in (2, -3):
        with pytest.raises(InputError, match=r"5 of 5 have more.* or lower \S*max_new_tokens$"):
            drop_long_prompts(prompts, room, "skip")


def test_context_is_text_before_the_question_and_a_longer_one_adds_to_its_front(
    chat_tokenizer, tokenizer, tmp_path
):
    rows = [{"turns": ["who knows?"]}, {"question": "how many are left?"}, {"prompt": "def f"}]
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(400))))
    for reader in (chat_tokenizer, tokenizer):
        questions = load_prompts(write_jsonl(tmp_path / "a.jsonl", rows), reader, num_prompts=3)
        near, far = prepend_context(questions, [40, 70], str(tmp_path / "a.txt"), reader)
        for plain, short, long in zip(questions.prompts, near.prompts, far.prompts, strict=True):
            assert (len(short.tokens), len(long.tokens)) == (40, 70)
            before, after = (
                plain.tokens[: plain.question_start],
                plain.tokens[plain.question_start :],
            )
            added = 40 - len(before)
            assert long.tokens[: len(before)] == short.tokens[: len(before)] == before
            assert long.tokens[-added:] == short.tokens[-added:]
            assert long.tokens[-len(after) :] == after
            assert str(reader.decode(after)).startswith(("who knows?", "how many", "def f"))
        assert len({tuple(prompt.tokens[10:30]) for prompt in far.prompts}) == 3
    for contexts, message in (([4, 70], "longest prompt and a blank line, .* got 4"),
                           ([40, 90000], "has .* tokens for 90000")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            prepend_context(questions, contexts, str(tmp_path / "a.txt"), tokenizer)


@pytest.mark.parametrize("layout", ["jsonl", "parquet"])
def test_speed_bench_folder_gives_categories_lengths_and_turns(chat_tokenizer, tmp_path, layout):
    folder = speed_bench(tmp_path / "speed", layout)
    # speculators' split of the same rows, and a file of something else
    write_jsonl(folder / "qualitative_coding.jsonl", [{"turns": "no"}])
    write_jsonl(folder / "other.jsonl", [{"turns": ["no"]}])
    prompt_set = load_prompts(str(folder), chat_tokenizer, num_prompts=100)
    assert prompt_set.name == "speed"
    expected = [(category, "") for category in CATEGORIES]
    expected += [(entropy, length) for length in LENGTHS for entropy in ENTROPIES]
    assert sorted(
        (prompt.category, prompt.input_length) for prompt in prompt_set.prompts
    ) == sorted(expected)
    assert {prompt.text for prompt in prompt_set.prompts} >= {
        "<user>qualitative roleplay<assistant>", "<user>throughput_16k mixed<assistant>",
    }  # fmt: skip
    turns = load_prompts(str(folder), chat_tokenizer, num_prompts=100, all_turns=True)
    assert len(turns.prompts) == len(expected) + 1
    assert "<user>qualitative roleplay\n\nand then?<assistant>" in [
        prompt.text for prompt in turns.prompts
    ]
    subset = "throughput_2k" if layout == "parquet" else "throughput_2k.jsonl"
    prompts = load_prompts(str(folder / subset), chat_tokenizer, num_prompts=100).prompts
    labels = [(prompt.category, prompt.input_length) for prompt in prompts]
    assert labels == [(entropy, "2k") for entropy in ENTROPIES]


def test_speed_bench_without_its_prompts_is_refused(chat_tokenizer, tmp_path):
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH {article}"
    write_jsonl(tmp_path / "qualitative.jsonl", [{"turns": ["a"]}, {"turns": [text]}])
    with pytest.raises(InputError, match=r"prepare script .*; line 2 of .* has a placeholder"):
        load_prompts(str(tmp_path), chat_tokenizer, num_prompts=1)
    (tmp_path / "qualitative.jsonl").unlink()
    with pytest.raises(InputError, match=r"a folder of SPEED-Bench with qualitative.jsonl"):
        load_prompts(str(tmp_path), chat_tokenizer, num_prompts=1)


@pytest.mark.usefixtures("few")
def test_thinking_asks_every_question_with_and_without(chat_tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"turns": ["hi"]}, {"turns": ["ho"]}])
    with pytest.raises(InputError, match="a chat template that reads enable_thinking"):
        load_prompts(path, chat_tokenizer, num_prompts=2, thinking=[True, False])
    chat_tokenizer.chat_template += "{% if enable_thinking is false %}<nothink>{% endif %}"
    prompts = load_prompts(
        path, chat_tokenizer, num_prompts=2, thinking=[False, True, True]
    ).prompts
    assert [(prompt.text, prompt.thinking) for prompt in prompts] == [
        ("<user>hi<assistant><nothink>", "off"), ("<user>hi<assistant>", "on"),
        ("<user>ho<assistant><nothink>", "off"), ("<user>ho<assistant>", "on"),
    ]  # fmt: skip
    assert [prompt.source for prompt in prompts][::2] == [prompt.source for prompt in prompts][1::2]
    questions = write_jsonl(
        tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "hey"}]}]
    )
    corpus = DataSettings(source="chat", path=questions)
    held_out = held_out_prompts(
        corpus, split_of('["hey"]'), chat_tokenizer, 16, 2, thinking=[False]
    )
    assert [prompt.text for prompt in held_out] == ["<user>hey<assistant><nothink>"]
    plain = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "def f():"}])
    for name in (plain, "python_stdlib"):
        with pytest.raises(InputError, match="thinking needs questions in the chat template"):
            load_prompts(name, chat_tokenizer, num_prompts=1, thinking=[True])
