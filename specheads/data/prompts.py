"""Prompts for evaluation. Text in prompts is never trained on."""

import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.data.chat import Template
from specheads.data.conversations import Conversation, first_answer, question
from specheads.data.documents import cut_windows
from specheads.data.encode import prompt_ids
from specheads.data.files import JSONL, PARQUET, SHOWN, located, rows_of
from specheads.data.settings import NO_PATH, Data, Source
from specheads.data.sources import hub_rows, read
from specheads.data.tokenise import EmptySplitError, tokenised

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


ON_HUB = {
    "humaneval": Source(source="hub", path="openai/openai_humaneval", split="test"),
    "mbpp": Source(source="hub", path="google-research-datasets/mbpp", config="full", split="test"),
    "gsm8k": Source(source="hub", path="openai/gsm8k", config="main", split="test"),
    "mt_bench": Source(source="hub", path="HuggingFaceH4/mt_bench_prompts"),
}
"""Public sets by name. A local file in the same format works too."""

SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/"
    "data/spec_bench/question.jsonl"
)
"""Spec-Bench is in its own repository and not on the Hub."""

NAMES = (*NO_PATH, "held_out", "spec_bench", *ON_HUB)

CONTINUED = {"prompt": "entry_point", "text": "test_list"}
"""Columns with text to continue. If the row has the second column too (HumanEval's, MBPP's), the
text is a question to a chat model."""


def load_prompts(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_prompts: int,
    prompt_tokens: int = 64,
    all_turns: bool = False,
    seed: int = 0,
    corpus: Data | None = None,
) -> PromptSet:
    """Load prompts by name or from a file, whole and tokenised.

    A name is "python_stdlib", "stdlib_instructions", "held_out" (the prompts of `corpus`, none of
    which is trained on), a named public set, or a JSON lines or parquet file. A row has `prompt`
    or `text` (to continue), `turns` (user turns), or any form of a conversation, whose last answer
    is left out. Conversations and questions use the chat template; a question also works without.
    A row with `turns` gives one prompt, its first turn. With `all_turns` every turn becomes a
    prompt that follows the earlier turns, without answers between them.
    A larger set is sampled by the seed. Windows cut from text have `prompt_tokens` tokens; other
    prompts are never cut. A row without a prompt is refused with its line.
    """
    if name in NO_PATH:
        corpus = Data(source=name)
    elif name != "held_out":
        corpus = None
    elif corpus is None:
        raise InputError("prompts=held_out are those of a run's data; name a run, or other prompts")
    if corpus is not None:
        prompts = held_out(corpus, "prompts", tokenizer, prompt_tokens, num_prompts, seed)
    else:
        rows = [
            prompt
            for where, row in _rows(name)
            for prompt in row_prompts(row, where, tokenizer, all_turns=all_turns)
        ]
        prompts = _some(rows, num_prompts, seed)
    return PromptSet.of(name if name in NAMES else Path(name).name, prompts)


def fitting(prompts: PromptSet, room: int, too_long: str) -> PromptSet:
    """Return the prompts of at most `room` tokens.

    Longer ones are refused by row if `too_long` is "stop", and counted and left out if it is
    "skip".
    """
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
    return PromptSet.of(prompts.name, [one for one in prompts.prompts if one not in longer])


def held_out(
    corpus: Data,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    num_prompts: int,
    seed: int = 0,
) -> list[Prompt]:
    """Return prompts from one split of a corpus: first questions of users, and windows of text.

    Windows have `prompt_tokens` tokens.

    Raises:
        InputError: The split has no text of that length and no conversation.
    """
    found = list[Prompt]()
    talks, texts = corpus.divided()
    with suppress(EmptySplitError):
        if texts:
            documents = tokenised(texts, split, tokenizer, seed)
            windows = cut_windows(documents, tokenizer, prompt_tokens, seed)
            found += [
                Prompt(ids, texts.source, str(tokenizer.decode(ids)), f"document {number}")
                for number, ids in islice(windows, num_prompts)
            ]
    if talks:
        for where, row in _some(list(read(talks, split, seed)), num_prompts, seed):
            # a greeting before the question is not an answer
            asked = {**row, "messages": row["messages"][: first_answer(row["messages"])]}
            found += row_prompts(asked, where, tokenizer, all_turns=False)
    if not found:
        raise InputError(
            f"no conversation and no text of {prompt_tokens} tokens of {corpus.source} is held "
            f"out for {split}; give more of them, or lower prompt_tokens"
        )
    return _some(found, num_prompts, seed)


def _some(items: list[T], most: int, seed: int) -> list[T]:
    """Return a sample of at most `most` items, in their order."""
    if len(items) <= most:
        return items
    return [items[place] for place in sorted(random.Random(seed).sample(range(len(items)), most))]


def _rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with its location, which error messages name."""
    if name == "spec_bench":
        yield from hub_rows(Source(source="hub", path="json", patterns=[SPEC_BENCH]), 0)
    elif name in ON_HUB:
        yield from hub_rows(ON_HUB[name], 0)
    elif not name.endswith((*JSONL, *PARQUET)) or not local_path(name).is_file():
        raise InputError(
            f"prompts must be {', '.join(NAMES)} or a .jsonl file that exists; got {name!r}"
        )
    else:
        yield from rows_of([local_path(name)])


def row_prompts(
    row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, *, all_turns: bool
) -> Iterator[Prompt]:
    """Yield the prompts of a row; error messages name its location."""
    turns, prompt = row.get("turns"), row.get("prompt")
    if isinstance(prompt, list) and all(isinstance(turn, str) for turn in prompt):
        # MT-bench's name for turns on the Hub
        turns = prompt
    with located(where):
        if turns is None:
            yield _prompt(question(row), row, where, tokenizer)
            return
        if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
            raise InputError("turns must be a list of texts that are not empty", fault="has others")
        rest = {name: value for name, value in row.items() if value is not turns}
        for last in range(len(turns) if all_turns else 1):
            asked = {**rest, "instruction": "\n\n".join(turns[: last + 1])}
            yield _prompt(question(asked), asked, where, tokenizer)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _prompt(
    asked: Conversation, row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase
) -> Prompt:
    """Return a prompt: text to continue, or a question or messages in the chat template."""
    text = asked.messages[0]["content"]
    needs_template = len(asked.messages) > 1 or asked.tools
    continues = any(row.get(name) == text and mark not in row for name, mark in CONTINUED.items())
    if not needs_template and (continues or tokenizer.chat_template is None):
        ids = prompt_ids(tokenizer, text)
    else:
        ids = Template(tokenizer).prompt(asked.messages, asked.tools)
        text = str(tokenizer.decode(ids))
    if not ids or ids[-1] == tokenizer.eos_token_id:
        raise InputError(
            "a prompt needs a token, and must not end with the end token",
            fault=f"gives {ids[-1:] or 'no token'}",
        )
    return Prompt(ids, str(row.get("category") or ""), text, where)
