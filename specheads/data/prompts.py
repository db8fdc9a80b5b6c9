"""Prompts for evaluation. Text in prompts is never trained on."""

import hashlib
import json
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config.data import PATHLESS_SOURCES, DataSettings, SourceSettings
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.data.chat import QUESTION_TEXT, Template, refuse_fixed_thinking
from specheads.data.conversations import first_answer, last_message, question
from specheads.data.documents import cut_windows
from specheads.data.encode import affix_ids, encode_prompt
from specheads.data.files import JSONL, PARQUET, SHOWN, Row, located, rows_of
from specheads.data.sources import hub_rows, read_split
from specheads.data.tokenise import tokenise_corpus

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to continue: `tokens` for the base, `text` for people."""

    tokens: list[int]
    category: str
    text: str
    source: str = ""
    """The file, conversation or row it comes from; prompts of one source are similar. Empty means
    a source of its own."""
    question: int = 0
    """Index of the first token of the question, before which `contexts.with_context` puts
    text."""
    input_length: str = ""
    """The set's own name for its length, such as "8k"."""
    thinking: str = ""
    """Whether the chat template asks the base to think: "on" or "off". Empty: its default."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Named prompts. `version` is a hash of their token ids: equal versions are comparable."""

    name: str
    version: str
    prompts: list[Prompt]

    @classmethod
    def of(cls, name: str, prompts: list[Prompt]) -> "PromptSet":
        """Name prompts; refuse an empty list."""
        if not prompts:
            raise InputError(f"prompts {name!r} hold no prompt; give a set that has some")
        ids = json.dumps([prompt.tokens for prompt in prompts]).encode()
        return cls(name, hashlib.sha256(ids).hexdigest()[:12], prompts)

    @property
    def groups(self) -> dict[str, list[str]]:
        """The groups of each prompt, by which rates are reported."""
        return {name: [getattr(one, name) for one in self.prompts] for name in GROUPS}


GROUPS = ("input_length", "category", "thinking")

PUBLIC_PROMPT_SETS = {
    "humaneval": SourceSettings(source="hub", path="openai/openai_humaneval", split="test"),
    "mbpp": SourceSettings(
        source="hub", path="google-research-datasets/mbpp", config="full", split="test"
    ),
    "gsm8k": SourceSettings(source="hub", path="openai/gsm8k", config="main", split="test"),
    "math500": SourceSettings(source="hub", path="HuggingFaceH4/MATH-500", split="test"),
    "aime": SourceSettings(source="hub", path="math-ai/aime25", split="test"),
    "mt_bench": SourceSettings(source="hub", path="HuggingFaceH4/mt_bench_prompts"),
    "alpaca": SourceSettings(source="hub", path="tatsu-lab/alpaca"),
    "arena_hard": SourceSettings(
        source="hub",
        path="lmarena-ai/arena-hard-auto",
        patterns=["data/arena-hard-v2.0/question.jsonl"],
    ),
    # datasets does not run this set's script, so its newest file (release_v6) is read
    "livecodebench": SourceSettings(
        source="hub",
        path="json",
        patterns=[
            "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/"
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505/test6.jsonl"
        ],
    ),
    # this one is in its own repository and not on the Hub
    "spec_bench": SourceSettings(
        source="hub",
        path="json",
        patterns=[
            "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
            "fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
        ],
    ),
}
"""Public sets by name. A local file in the same format works too."""
NAMES = (*PATHLESS_SOURCES, "held_out", *PUBLIC_PROMPT_SETS)
SPEED_BENCH = re.compile(r"qualitative|throughput_(\d+k)")
"""Names of SPEED-Bench's parts: files or folders, as its scripts write them."""
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Replaces text that may not be redistributed in SPEED-Bench's rows on the Hub."""
CATEGORIES = ("category", "subject", "difficulty")
"""Columns that name a row's category; the first that a row has is used."""
CONTINUED = {"prompt": ("entry_point", "uid"), "text": ("test_list",)}
"""Columns with text to continue. If the row has another of these columns too (HumanEval's,
Arena-Hard's, MBPP's), the text is a question to a chat model."""


def load_prompts(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_prompts: int,
    prompt_tokens: int = 64,
    all_turns: bool = False,
    thinking: Sequence[bool] = (),
    seed: int = 0,
    corpus: DataSettings | None = None,
) -> PromptSet:
    """Load prompts by name or from a file, whole and tokenised.

    docs/data.md describes names and rows. "held_out" has the prompts of `corpus`. With `all_turns`
    every turn becomes a prompt that follows the earlier turns, without answers between them. With
    `thinking` every question is asked once for each value, which the chat template reads as
    `enable_thinking`. A larger set is sampled by the seed. Windows cut from text have
    `prompt_tokens` tokens; other prompts are never cut.
    """
    if name in PATHLESS_SOURCES:
        corpus = DataSettings(source=name)
    elif name != "held_out":
        corpus = None
    elif corpus is None:
        raise InputError("prompts=held_out are those of a run's data; name a run, or other prompts")
    if thinking:
        refuse_fixed_thinking(tokenizer)
    if corpus is not None:
        wanted = corpus, "prompts", tokenizer, prompt_tokens, num_prompts, seed
        prompts = held_out_prompts(*wanted, thinking=thinking)
    else:
        rows = [one for where, row in _rows(name) for one in _questions(row, where, all_turns)]
        # tokenise what is used only: sets of long prompts are large
        some = _some(rows, num_prompts, seed)
        # a question with and without thinking is timed side by side
        prompts = [_prompt(*one, tokenizer, value) for one in some for value in _values(thinking)]
    return PromptSet.of(name if name in NAMES else Path(name).name, prompts)


def drop_long_prompts(prompts: PromptSet, room: int, too_long: str) -> PromptSet:
    """Return the prompts of at most `room` tokens; `too_long` is "stop" or "skip" for others."""
    longer = [prompt for prompt in prompts.prompts if len(prompt.tokens) > room]
    if not longer:
        return prompts
    named = ", ".join(f"{len(one.tokens)} in {one.source}" for one in longer[:SHOWN])
    line = (
        "a prompt and its new tokens must fit into the context, which leaves "
        f"{max(room, 0)} tokens for a prompt; {len(longer)} of {len(prompts.prompts)} have more: "
        f"{named}"
    )
    if too_long == "stop" or len(longer) == len(prompts.prompts):
        remedy = "shorten them, or lower evaluation.max_new_tokens"
        skip = ", or set evaluation.too_long=skip" * (len(longer) < len(prompts.prompts))
        raise InputError(f"{line}; {remedy}{skip}")
    warnings.warn(f"{line}; they are left out", stacklevel=2)
    shorter = [one for one in prompts.prompts if len(one.tokens) <= room]
    return PromptSet.of(prompts.name, shorter)


def held_out_prompts(
    corpus: DataSettings,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    num_prompts: int,
    seed: int = 0,
    *,
    thinking: Sequence[bool] = (),
) -> list[Prompt]:
    """Return prompts from one split of a corpus: questions, starts of traces, windows of text.

    A conversation gives its first question, once for each value of `thinking`, and a trace its
    tokens before the first answer. Several conversations or traces of one question give one prompt.
    """
    found = list[Prompt]()
    talks, traces, texts = corpus.split_by_rows()
    if thinking and (traces or texts):
        raise InputError(UNASKED)
    if traces:
        documents, starts = tokenise_corpus(traces, split, tokenizer, seed), dict[Ids, int]()
        for number in range(len(documents)):
            ids = documents.tokens(number)[: documents.loss_mask(number).argmax()]
            starts.setdefault(tuple(ids.tolist()), number)
        starts.pop((), None)
        found += [
            Prompt([*ids], traces.source, str(tokenizer.decode([*ids])), f"trace {number}")
            for ids, number in _some(list(starts.items()), num_prompts, seed)
        ]
    if texts:
        documents = tokenise_corpus(texts, split, tokenizer, seed)
        windows = cut_windows(documents, tokenizer, prompt_tokens, seed)
        first = len(affix_ids(tokenizer)[0])
        found += [
            Prompt(ids, texts.source, str(tokenizer.decode(ids)), f"document {number}", first)
            for number, ids in islice(windows, num_prompts)
        ]
    if talks:
        rows = dict[str, tuple[Row, str]]()
        for where, row in read_split(talks, split, seed):
            # a greeting before the question is not an answer
            asked = {**row, "messages": row["messages"][: first_answer(row["messages"])]}
            rows.setdefault(json.dumps(asked, sort_keys=True), (asked, where))
        for asked, where in _some(list(rows.values()), num_prompts, seed):
            found += [
                _prompt(*one, tokenizer, value)
                for one in _questions(asked, where)
                for value in _values(thinking)
            ]
    if not found:
        raise InputError(
            f"no conversation and no text of {prompt_tokens} tokens of {corpus.source} is held "
            f"out for {split}; give more of them, or lower prompt_tokens"
        )
    return _some(found, num_prompts * len(_values(thinking)), seed)


def _values(thinking: Sequence[bool]) -> list[bool | None]:
    """Return each value of `enable_thinking` once; none leaves it to the template."""
    return [*dict.fromkeys(thinking)] or [None]


def _some(items: list[T], most: int, seed: int) -> list[T]:
    """Return a sample of at most `most` items, in their order."""
    if len(items) <= most:
        return items
    return [items[place] for place in sorted(random.Random(seed).sample(range(len(items)), most))]


Ids = tuple[int, ...]
Question = tuple[Row, Mapping[str, Any], str]
"""A question, its row and the location of the row."""


def _rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with its location, which error messages name."""
    if name in PUBLIC_PROMPT_SETS:
        yield from hub_rows(PUBLIC_PROMPT_SETS[name], 0)
        return
    path = local_path(name)
    inside = sorted(one for one in path.rglob("*") if _part(one)) if path.is_dir() else [path]
    files = [one for one in inside if one.name.endswith((*JSONL, *PARQUET)) and one.is_file()]
    if not files:
        raise InputError(
            f"prompts must be {', '.join(NAMES)}, a folder of SPEED-Bench with qualitative.jsonl "
            f"or throughput_1k.jsonl, or a .jsonl or .parquet file that exists; got {name!r}"
        )
    for file in files:
        part = _part(file)
        for where, row in rows_of([file]):
            yield where, _resolved(row, where, part[1] or "") if part else row


def _part(file: Path) -> re.Match[str] | None:
    """Match the part of SPEED-Bench that a file holds: NAME.jsonl, or NAME/test.parquet."""
    stem = file.name.partition(".")[0]
    return SPEED_BENCH.fullmatch(stem) or SPEED_BENCH.fullmatch(file.parent.name)


def _resolved(row: dict[str, Any], where: str, input_length: str) -> dict[str, Any]:
    """Return a row of SPEED-Bench with `turns`, which its scripts also write as `messages`."""
    messages, turns = row.get("messages"), row.get("turns")
    if isinstance(messages, list) and all(
        isinstance(one, dict) and one.get("role") == "user" for one in messages
    ):
        turns = [one.get("content") for one in messages]
    with located(where):
        if UNRESOLVED in str(turns):
            raise InputError(
                "rows of SPEED-Bench must hold their prompts (write the folder with the prepare "
                "script of NeMo-Skills or ModelOpt, which fetches them)",
                fault="has a placeholder",
            )
    rest = {name: value for name, value in row.items() if name != "messages"}
    return rest | {"turns": turns, "input_length": input_length}


def _questions(row: Mapping[str, Any], where: str, all_turns: bool = False) -> Iterator[Question]:
    """Yield the questions of a row, each with the row that describes it."""
    turns, prompt = row.get("turns"), row.get("prompt")
    if isinstance(prompt, list) and all(isinstance(turn, str) for turn in prompt):
        # MT-bench's name for turns on the Hub
        turns = prompt
    with located(where):
        if turns is None:
            yield question(row), row, where
            return
        if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
            raise InputError("turns must be a list of texts that are not empty", fault="has others")
        rest = {name: value for name, value in row.items() if value is not turns}
        for last in range(len(turns) if all_turns else 1):
            asked = {**rest, "instruction": "\n\n".join(turns[: last + 1])}
            yield question(asked), asked, where


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


UNASKED = (
    "evaluation.thinking needs questions in the chat template, got text to continue; choose "
    "evaluation.prompts with questions, or leave thinking out"
)


def _prompt(
    asked: Row,
    row: Mapping[str, Any],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None = None,
) -> Prompt:
    """Return a prompt: text to continue, or a question or messages in the chat template."""
    text = asked["messages"][0]["content"]
    needs_template = len(asked["messages"]) > 1 or asked["tools"]
    continues = any(
        row.get(name) == text and not {*marks} & {*row} for name, marks in CONTINUED.items()
    )
    with located(where):
        if not needs_template and (continues or tokenizer.chat_template is None):
            if thinking is not None:
                raise InputError(UNASKED)
            ids, first = encode_prompt(tokenizer, text), len(affix_ids(tokenizer)[0])
        else:
            ids, first = _asked(Template(tokenizer, thinking), asked)
            text = str(tokenizer.decode(ids))
        if not ids or ids[-1] == tokenizer.eos_token_id:
            raise InputError(
                "a prompt needs a token, and must not end with the end token",
                fault=f"gives {ids[-1:] or 'no token'}",
            )
    return Prompt(
        tokens=ids,
        category=next((str(row[name]) for name in CATEGORIES if row.get(name)), ""),
        text=text,
        source=where,
        question=first,
        input_length=str(row.get("input_length") or ""),
        thinking={True: "on", False: "off", None: ""}[thinking],
    )


def _asked(template: Template, asked: Row) -> tuple[list[int], int]:
    """Return the token ids of a prompt in the chat template, and where its last question begins."""
    messages, tools = asked["messages"], asked["tools"]
    ids, places = template.encode(template.render(messages, tools, ask=True))
    last = last_message(messages, "user")
    marked = messages[last] | {"content": QUESTION_TEXT + messages[last]["content"]}
    text = template.render([*messages[:last], marked, *messages[last + 1 :]], tools, ask=True)
    return ids, int(np.searchsorted(places[:, 0], text.find(QUESTION_TEXT)))
