"""Prompts for evaluation. Text in prompts is never trained on."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from urllib.request import urlopen

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.data.chat import Template
from specheads.data.conversations import conversation, first_answer
from specheads.data.documents import cut_windows
from specheads.data.encode import token_ids
from specheads.data.files import names, parse, read_jsonl
from specheads.data.sources import conversations_and_texts, load_from_hub, read
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


@dataclass(frozen=True, slots=True)
class _OnHub:
    dataset: str
    split: str
    column: str
    config: str | None = None


ON_HUB = {
    "humaneval": _OnHub("openai/openai_humaneval", "test", "prompt"),
    "mbpp": _OnHub("google-research-datasets/mbpp", "test", "text", config="full"),
    "gsm8k": _OnHub("openai/gsm8k", "test", "question", config="main"),
    "mt_bench": _OnHub("HuggingFaceH4/mt_bench_prompts", "train", "prompt"),
}
"""Public sets by name. A local .jsonl in its project's own format works too."""

SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/"
    "data/spec_bench/question.jsonl"
)
"""Spec-Bench is in its own repository and not on the Hub."""

OWN = ("python_stdlib", "stdlib_instructions")
"""Sources that are also names of prompts."""

NAMES = (*OWN, "held_out", "spec_bench", *ON_HUB)

TEXT_COLUMNS = {"prompt": "entry_point", "question": "question", "text": "test_list"}
"""Columns with a row's prompt (ours and HumanEval's, GSM8K's, MBPP's). If the row has the second
column too, the prompt is a question to a chat model, not text to continue."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz")


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
    which is trained on), a named public set, or a JSONL file (.gz too) whose rows have `prompt`
    (text), `turns` (user turns) or `messages` (chat), and maybe `category`. Messages go through the
    chat template, and so do turns and questions of public sets if the tokenizer has a template.
    A row with `turns` gives one prompt, its first turn. With `all_turns` every turn becomes a
    prompt that follows the earlier turns, without answers between them.
    A larger set is sampled by the seed. Windows cut from text have `prompt_tokens` tokens; other
    prompts are never cut. A row without a prompt is refused with its line.
    """
    if num_prompts < 1:
        raise InputError(f"num_prompts must be at least 1, got {num_prompts}")
    if name in OWN:
        corpus = Data(source=name)
    elif name != "held_out":
        corpus = None
    elif corpus is None:
        raise InputError("prompts=held_out are those of a run's data; name a run, or other prompts")
    if corpus is not None:
        prompts = list(held_out(corpus, "prompts", tokenizer, prompt_tokens, num_prompts, seed))
    else:
        rows = [
            prompt
            for where, row in _rows(name)
            for prompt in _row_prompts(row, where, tokenizer, all_turns)
        ]
        prompts = _some(rows, num_prompts, seed)
    return PromptSet.of(name if name in NAMES else Path(name).name, prompts)


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
    found, empty = list[Prompt](), None
    talks, texts = conversations_and_texts(corpus)
    try:
        if texts:
            found += _windows(texts, split, tokenizer, prompt_tokens, num_prompts, seed)
    except EmptySplitError as error:
        empty = error
    if talks:
        rows = [(row, where) for where, row in read(talks, split, seed)]
        for row, where in _some(rows, num_prompts, seed):
            found += _row_prompts(_question(row), where, tokenizer, all_turns=False)
    if not found:
        raise empty or EmptySplitError(
            f"no conversation of {corpus.source} is held out for {split}; give more of them"
        )
    return _some(found, num_prompts, seed)


def _windows(
    corpus: Data,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    num_prompts: int,
    seed: int,
) -> list[Prompt]:
    documents = tokenised(corpus, split, tokenizer, seed)
    windows = islice(cut_windows(documents, tokenizer, prompt_tokens, seed), num_prompts)
    found = [
        Prompt(ids, corpus.source, str(tokenizer.decode(ids)), f"document {number}")
        for number, ids in windows
    ]
    if found:
        return found
    raise EmptySplitError(
        f"no document of {corpus.source} held out for {split} has {prompt_tokens} tokens; lower "
        "prompt_tokens"
    )


def _some(items: list[T], most: int, seed: int) -> list[T]:
    """Return a sample of at most `most` items, in their order."""
    if len(items) <= most:
        return items
    return [items[place] for place in sorted(random.Random(seed).sample(range(len(items)), most))]


def _question(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a conversation up to its first answer; a greeting is not an answer."""
    messages = row["messages"]
    if all(message["role"] == "user" for message in messages):
        # turns also work for a base without a chat template
        turns = [message["content"] for message in messages]
        return {"turns": turns, "category": row.get("category")}
    return {**row, "messages": messages[: first_answer(messages)]}


def _rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with its location, which error messages name."""
    if name == "spec_bench":
        try:
            with urlopen(SPEC_BENCH, timeout=30) as answer:
                text = answer.read().decode()
        except (HTTPException, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"cannot reach {SPEC_BENCH}: {error}; pass a local .jsonl file instead"
            ) from error
        yield from parse(text.split("\n"), name)
    elif name not in ON_HUB:
        yield from _file_rows(name)
    else:
        source = ON_HUB[name]
        table = load_from_hub(source.dataset, name=source.config, split=source.split)
        for place, row in enumerate(table, start=1):
            value = row[source.column]
            turns = value if isinstance(value, list) else [value]
            rest = {"turns": turns, "category": row.get("category")}
            yield f"row {place} of {source.dataset}", rest


def _file_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = local_path(name)
    if not name.endswith(SUFFIXES):
        raise InputError(f"prompts must be {', '.join(NAMES)} or a .jsonl file; got {name!r}")
    if not path.is_file():
        raise InputError(f"prompts must be a file that exists, got {name!r}")
    return read_jsonl(path)


def _row_prompts(
    row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, all_turns: bool
) -> Iterator[Prompt]:
    row = {name: value for name, value in row.items() if value is not None}
    category = str(row.get("category") or "")
    column = next((name for name in TEXT_COLUMNS if name in row), "")
    plain = row.get(column)
    if "messages" in row:
        yield _chat(row, where, tokenizer, category)
    elif "turns" in row or (_is_text(plain) and TEXT_COLUMNS[column] in row):
        turns = row.get("turns", [plain])
        if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
            raise InputError(
                f"turns must be a list of texts that are not empty, {where} has no such list"
            )
        for last in range(len(turns) if all_turns else 1):
            text = "\n\n".join(turns[: last + 1])
            if tokenizer.chat_template is None:
                yield _prompt(token_ids(tokenizer, text), category, text, where)
            else:
                message = {"role": "user", "content": text}
                yield _chat({"messages": [message]}, where, tokenizer, category)
    elif _is_text(plain):
        yield _prompt(token_ids(tokenizer, plain), category, plain, where)
    else:
        need = "a prompt row needs text in prompt, turns or messages"
        raise InputError(f"{need}, {where} has none; it has {names(row)}")


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _chat(row: Any, where: str, tokenizer: PreTrainedTokenizerBase, category: str) -> Prompt:
    talk = conversation({"messages": row["messages"], "tools": row.get("tools")}, where)
    ids = Template(tokenizer, where).prompt(talk.messages, talk.tools, where)
    return _prompt(ids, category, str(tokenizer.decode(ids)), where)


def _prompt(tokens: list[int], category: str, text: str, where: str) -> Prompt:
    if not tokens:
        raise InputError(f"a prompt needs a token, and the tokenizer gives {where} no token")
    return Prompt(tokens, category, text, where)
