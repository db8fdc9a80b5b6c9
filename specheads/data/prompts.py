"""Prompts for evaluation. Text in prompts is never trained on."""

import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specheads.config.data import PATHLESS_SOURCES, DataSettings
from specheads.core.errors import InputError
from specheads.data.bad_rows import MAX_SHOWN, locate_errors
from specheads.data.chat import Template, refuse_fixed_thinking
from specheads.data.conversations import first_answer, last_message, question
from specheads.data.encode import QUESTION_TEXT, Tokenizer, affix_ids, encode_prompt
from specheads.data.files import Row
from specheads.data.prompt_sets import PROMPT_NAMES, read_prompt_rows
from specheads.data.sources import read_split
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
