"""Prompts for evaluation. Text in prompts is never trained on."""

import hashlib
import json
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specheads.config.data import PATHLESS_SOURCES, DataSettings, SourceSettings
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.data.bad_rows import MAX_SHOWN, BadRows, locate_errors
from specheads.data.chat import Template, refuse_fixed_thinking
from specheads.data.conversations import first_answer, last_message, question
from specheads.data.encode import QUESTION_TEXT, Tokenizer, affix_ids, encode_prompt, encode_text
from specheads.data.files import JSONL, TABLES, Row, rows_of
from specheads.data.sources import HubDataset, read_source, read_split
from specheads.data.tokenise import cut_windows, tokenise_corpus

T = TypeVar("T")
GROUPS = ("input_length", "category", "thinking")
CATEGORY_COLUMNS = ("category", "subject", "difficulty")
"""Columns that name a row's category; the first that a row has is used."""
CONTINUED_COLUMNS = {"prompt": ("entry_point", "uid"), "text": ("test_list",)}
"""Columns with text to continue. If the row has another of these columns too (HumanEval's,
Arena-Hard's, MBPP's), the text is a question to a chat model."""
NO_QUESTIONS = (
    "evaluation.thinking needs questions in the chat template, got text to continue; choose "
    "evaluation.prompts with questions, or leave thinking out"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to continue: `tokens` for the base, `text` for people."""

    tokens: list[int]
    category: str
    text: str
    source: str = ""
    """The file, conversation or row it comes from; prompts of one source are similar. Empty means
    a source of its own."""
    question_start: int = 0
    """Index of the first token of the question, before which `prepend_context` puts text."""
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
        return {name: [getattr(prompt, name) for prompt in self.prompts] for name in GROUPS}


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the base, and the row that describes it."""

    conversation: Row
    row: Mapping[str, Any]
    location: str


def load_prompts(
    name: str,
    tokenizer: Tokenizer,
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
        limits = prompt_tokens, num_prompts, seed
        prompts = held_out_prompts(corpus, "prompts", tokenizer, *limits, thinking=thinking)
    else:
        rows = read_prompt_rows(name)
        questions = [
            asked for location, row in rows for asked in _questions(row, location, all_turns)
        ]
        # tokenise what is used only: sets of long prompts are large
        prompts = _encode_questions(_sample(questions, num_prompts, seed), tokenizer, thinking)
    return PromptSet.of(name if name in PROMPT_NAMES else Path(name).name, prompts)


def drop_long_prompts(prompts: PromptSet, room: int, too_long: str) -> PromptSet:
    """Return the prompts of at most `room` tokens; `too_long` is "stop" or "skip" for others."""
    longer = [prompt for prompt in prompts.prompts if len(prompt.tokens) > room]
    if not longer:
        return prompts
    sizes = ", ".join(f"{len(prompt.tokens)} in {prompt.source}" for prompt in longer[:MAX_SHOWN])
    line = (
        "a prompt and its new tokens must fit into the context, which leaves "
        f"{max(room, 0)} tokens for a prompt; {len(longer)} of {len(prompts.prompts)} have more: "
        f"{sizes}"
    )
    if too_long == "stop" or len(longer) == len(prompts.prompts):
        remedy = "shorten them, or lower evaluation.max_new_tokens"
        skip = ", or set evaluation.too_long=skip" * (len(longer) < len(prompts.prompts))
        raise InputError(f"{line}; {remedy}{skip}")
    warnings.warn(f"{line}; they are left out", stacklevel=2)
    shorter = [prompt for prompt in prompts.prompts if len(prompt.tokens) <= room]
    return PromptSet.of(prompts.name, shorter)


def held_out_prompts(
    corpus: DataSettings,
    split: str,
    tokenizer: Tokenizer,
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
    conversations, traces, texts = corpus.split_by_rows()
    if thinking and (traces or texts):
        raise InputError(NO_QUESTIONS)
    prompts = list[Prompt]()
    if traces:
        prompts += _trace_starts(traces, split, tokenizer, num_prompts, seed)
    if texts:
        documents = tokenise_corpus(texts, split, tokenizer, seed)
        windows = cut_windows(documents, tokenizer, prompt_tokens, seed)
        first = len(affix_ids(tokenizer)[0])
        prompts += [
            Prompt(ids, texts.source, str(tokenizer.decode(ids)), f"document {number}", first)
            for number, ids in islice(windows, num_prompts)
        ]
    if conversations:
        questions = _sample(_first_questions(conversations, split, seed), num_prompts, seed)
        prompts += _encode_questions(questions, tokenizer, thinking)
    if not prompts:
        raise InputError(
            f"no conversation and no text of {prompt_tokens} tokens of {corpus.source} is held "
            f"out for {split}; give more of them, or lower prompt_tokens"
        )
    return _sample(prompts, num_prompts * max(len({*thinking}), 1), seed)


def _trace_starts(
    traces: DataSettings, split: str, tokenizer: Tokenizer, num_prompts: int, seed: int
) -> list[Prompt]:
    """Return the tokens of traces before their first answer, each start once."""
    documents = tokenise_corpus(traces, split, tokenizer, seed)
    starts = dict[tuple[int, ...], int]()
    for number in range(len(documents)):
        ids = documents.tokens(number)[: documents.loss_mask(number).argmax()]
        starts.setdefault(tuple(ids.tolist()), number)
    starts.pop((), None)
    return [
        Prompt([*ids], traces.source, str(tokenizer.decode([*ids])), f"trace {number}")
        for ids, number in _sample(list(starts.items()), num_prompts, seed)
    ]


def _first_questions(conversations: DataSettings, split: str, seed: int) -> list[Question]:
    """Return what is before the first answer of each conversation, each question once."""
    questions = dict[str, Question]()
    for location, row in read_split(conversations, split, seed):
        # a greeting before the question is not an answer
        messages = row["messages"][: first_answer(row["messages"])]
        row = {**row, "messages": messages}
        key = json.dumps([messages, row["tools"]], sort_keys=True)
        if key not in questions:
            (questions[key],) = _questions(row, location)
    return list(questions.values())


def _sample(population: list[T], size: int, seed: int) -> list[T]:
    """Return a random sample of at most `size`, in the order of the population."""
    if len(population) <= size:
        return population
    indices = random.Random(seed).sample(range(len(population)), size)
    return [population[index] for index in sorted(indices)]


def _questions(
    row: Mapping[str, Any], location: str, all_turns: bool = False
) -> Iterator[Question]:
    """Yield the questions of a row."""
    turns, prompt = row.get("turns"), row.get("prompt")
    if isinstance(prompt, list) and all(isinstance(turn, str) for turn in prompt):
        # MT-bench's name for turns on the Hub
        turns = prompt
    with locate_errors(location):
        if turns is None:
            yield Question(question(row), row, location)
            return
        are_texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
        if not turns or not are_texts or not all(map(str.strip, turns)):
            raise InputError("turns must be a list of texts that are not empty", fault="has others")
        columns = {name: value for name, value in row.items() if value is not turns}
        for last in range(len(turns) if all_turns else 1):
            turn_row = {**columns, "instruction": "\n\n".join(turns[: last + 1])}
            yield Question(question(turn_row), turn_row, location)


def _encode_questions(
    questions: Sequence[Question], tokenizer: Tokenizer, thinking: Sequence[bool]
) -> list[Prompt]:
    """Return each question once for each value of `thinking`; none leaves it to the template."""
    # a question with and without thinking is timed side by side
    values = [*dict.fromkeys(thinking)] or [None]
    return [_encode_question(asked, tokenizer, value) for asked in questions for value in values]


def _encode_question(asked: Question, tokenizer: Tokenizer, thinking: bool | None) -> Prompt:
    """Return a prompt: text to continue, or a question or messages in the chat template."""
    messages, row = asked.conversation["messages"], asked.row
    text = messages[0]["content"]
    needs_template = len(messages) > 1 or asked.conversation["tools"]
    is_continued = any(
        row.get(name) == text and not {*marks} & {*row} for name, marks in CONTINUED_COLUMNS.items()
    )
    with locate_errors(asked.location):
        if not needs_template and (is_continued or tokenizer.chat_template is None):
            if thinking is not None:
                raise InputError(NO_QUESTIONS)
            ids, first = encode_prompt(tokenizer, text), len(affix_ids(tokenizer)[0])
        else:
            ids, first = _apply_template(Template(tokenizer, thinking), asked.conversation)
            text = str(tokenizer.decode(ids))
        if not ids or ids[-1] == tokenizer.eos_token_id:
            raise InputError(
                "a prompt needs a token, and must not end with the end token",
                fault=f"gives {ids[-1:] or 'no token'}",
            )
    return Prompt(
        tokens=ids,
        category=next((str(row[name]) for name in CATEGORY_COLUMNS if row.get(name)), ""),
        text=text,
        source=asked.location,
        question_start=first,
        input_length=str(row.get("input_length") or ""),
        thinking={True: "on", False: "off", None: ""}[thinking],
    )


def _apply_template(template: Template, conversation: Row) -> tuple[list[int], int]:
    """Return the token ids of a prompt in the chat template, and where its last question begins."""
    messages, tools = conversation["messages"], conversation["tools"]
    render, prompt_only = template.renderer.render, {"add_generation_prompt": True}
    ids, offsets = template.renderer.encode(render(messages, tools, **prompt_only))
    last = last_message(messages, "user")
    located = messages[last] | {"content": QUESTION_TEXT + messages[last]["content"]}
    text = render([*messages[:last], located, *messages[last + 1 :]], tools, **prompt_only)
    return ids, int(np.searchsorted(offsets[:, 0], text.find(QUESTION_TEXT)))


# --- public sets and users' files --------------------------------------------------------------


def _hub_set(path: str, **settings: Any) -> SourceSettings:
    return SourceSettings(source="hub", path=path, **settings)


PUBLIC_PROMPT_SETS = {
    "humaneval": _hub_set("openai/openai_humaneval", split="test"),
    "mbpp": _hub_set("google-research-datasets/mbpp", config="full", split="test"),
    "gsm8k": _hub_set("openai/gsm8k", config="main", split="test"),
    "math500": _hub_set("HuggingFaceH4/MATH-500", split="test"),
    "aime": _hub_set("math-ai/aime25", split="test"),
    "mt_bench": _hub_set("HuggingFaceH4/mt_bench_prompts"),
    "alpaca": _hub_set("tatsu-lab/alpaca"),
    "arena_hard": _hub_set(
        "lmarena-ai/arena-hard-auto", patterns=["data/arena-hard-v2.0/question.jsonl"]
    ),
    # datasets does not run this set's script, so its newest file (release_v6) is read
    "livecodebench": _hub_set(
        "json",
        patterns=[
            "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/"
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505/test6.jsonl"
        ],
    ),
    # this one is in its own repository and not on the Hub
    "spec_bench": _hub_set(
        "json",
        patterns=[
            "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
            "fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
        ],
    ),
}
"""Public sets by name. A local file in the same format works too."""
PROMPT_NAMES = (*PATHLESS_SOURCES, "held_out", *PUBLIC_PROMPT_SETS)
SPEED_BENCH = re.compile(r"qualitative|throughput_(\d+k)")
"""Names of SPEED-Bench's subsets: files or folders, as its scripts write them."""
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Replaces text that may not be redistributed in SPEED-Bench's rows on the Hub."""


def read_prompt_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row of a set, file or folder with its location, which error messages name."""
    if name in PUBLIC_PROMPT_SETS:
        yield from HubDataset(PUBLIC_PROMPT_SETS[name]).rows(0, BadRows())
        return
    path = local_path(name)
    candidates = sorted(filter(_match_subset, path.rglob("*"))) if path.is_dir() else [path]
    files = [
        file for file in candidates if file.name.endswith((*JSONL, *TABLES)) and file.is_file()
    ]
    if not files:
        raise InputError(
            f"prompts must be {', '.join(PROMPT_NAMES)}, a folder of SPEED-Bench with "
            "qualitative.jsonl or throughput_1k.jsonl, or a .jsonl or .parquet file that exists; "
            f"got {name!r}"
        )
    for file in files:
        subset = _match_subset(file)
        for location, row in rows_of([file]):
            yield location, _with_turns(row, location, subset[1] or "") if subset else row


def _match_subset(file: Path) -> re.Match[str] | None:
    """Match the subset of SPEED-Bench that a file holds: NAME.jsonl, or NAME/test.parquet."""
    stem = file.name.partition(".")[0]
    return SPEED_BENCH.fullmatch(stem) or SPEED_BENCH.fullmatch(file.parent.name)


def _with_turns(row: dict[str, Any], location: str, input_length: str) -> dict[str, Any]:
    """Return a row of SPEED-Bench with `turns`, which its scripts also write as `messages`."""
    messages, turns = row.get("messages"), row.get("turns")
    if isinstance(messages, list) and all(
        isinstance(message, dict) and message.get("role") == "user" for message in messages
    ):
        turns = [message.get("content") for message in messages]
    with locate_errors(location):
        if UNRESOLVED in str(turns):
            raise InputError(
                "rows of SPEED-Bench must hold their prompts (write the folder with the prepare "
                "script of NeMo-Skills or ModelOpt, which fetches them)",
                fault="has a placeholder",
            )
    columns = {name: value for name, value in row.items() if name != "messages"}
    return columns | {"turns": turns, "input_length": input_length}


# --- prompts at several lengths ----------------------------------------------------------------


def prepend_context(
    prompts: PromptSet, contexts: Sequence[int], source: str, tokenizer: Tokenizer
) -> list[PromptSet]:
    """Return the prompts at each of these lengths, filled with text in front of their questions.

    Every question has a stretch of the text of its own. A longer context adds text before the same
    end of that stretch, so the prompts of two lengths are paired. `contexts` ascend. `source` is a
    file or folder of text, or "python_stdlib", of which files are used that are never trained on.
    """
    separator = encode_text(tokenizer, "\n\n", add_special_tokens=False)
    needed = max(len(prompt.tokens) for prompt in prompts.prompts) + len(separator)
    if contexts[0] < needed:
        raise InputError(
            f"a context must hold the longest prompt and a blank line, {needed} tokens, got "
            f"{contexts[0]}; leave it out, or choose shorter prompts"
        )
    longest, gaps = contexts[-1], max(len(prompts.prompts) - 1, 1)
    ids = _read_tokens(source, tokenizer, longest * (gaps + 1))
    if len(ids) < longest:
        raise InputError(
            f"the text in front of the questions must fill the longest context, {source} has "
            f"{len(ids)} tokens for {longest}; name more text in context_text, or lower contexts"
        )
    num_prompts = len(prompts.prompts)
    ends = [longest + index * (len(ids) - longest) // gaps for index in range(num_prompts)]

    def fill(prompt: Prompt, length: int, end: int) -> Prompt:
        begin = end - (length - len(prompt.tokens) - len(separator))
        text, question = ids[begin:end] + separator, prompt.question_start
        return replace(prompt, tokens=prompt.tokens[:question] + text + prompt.tokens[question:])

    return [
        PromptSet.of(
            prompts.name,
            [fill(prompt, length, end) for prompt, end in zip(prompts.prompts, ends, strict=True)],
        )
        for length in contexts
    ]


def _read_tokens(source: str, tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Return the first tokens of a source: at least `num_tokens`, or all that it has."""
    is_stdlib, ids = source == "python_stdlib", list[int]()
    files = SourceSettings(
        source=source if is_stdlib else "files", path="" if is_stdlib else source
    )
    for split, _, document in read_source(files):
        if split == "prompts" or not is_stdlib:
            ids += encode_text(tokenizer, f"{document['text']}\n\n", add_special_tokens=False)
        if len(ids) >= num_tokens:
            break
    return ids
