"""Prompts for self-distilled text: plain text to continue, or conversations to answer.

Each prompt depends on the number of its text only, not on processes or the order of requests.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

import numpy as np

from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings, SourceSettings
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.data.chat import Template
from specheads.data.documents import TokenisedDocuments
from specheads.data.encode import affix_ids
from specheads.data.sources import read_source
from specheads.data.tokenise import tokenise_corpus


class PromptSource:
    """Prompts by number; numbers are unlimited."""

    conversations = False
    """Whether prompts are conversations, whose answers the base ends itself."""
    longest = 0
    """Maximum tokens of a text; zero if not known."""
    fingerprint = ""
    """Identifies all prompts and their order."""

    def first(self, number: int) -> list[int]:
        """Return the first prompt of a text; empty without one."""
        raise NotImplementedError

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return the text so far, with the last answer, and the next prompt; None at its end.

        If the chat template changes earlier turns, the result does not start with the text.
        """
        del number, tokens, answers
        return None


class Continuations(PromptSource):
    """First tokens of windows of documents, in an order from the seed.

    A window has the length of prompt and continuation, so prompts spread over a long document. A
    document shorter than a prompt is one window. After all windows, the next round shifts them by
    the prompt length. Every prompt begins with `opening`, the tokens before every text.
    """

    def __init__(
        self,
        documents: TokenisedDocuments,
        prompt_tokens: int,
        new_tokens: int,
        seed: int = 0,
        opening: Sequence[int] = (),
    ) -> None:
        self._documents, self._prompt_tokens, self._seed = documents, prompt_tokens, seed
        self._opening = [*opening]
        self.longest = prompt_tokens + new_tokens
        digest = hashlib.sha256(documents.lengths.astype(np.int64).tobytes())
        digest.update(np.array(self._opening, np.int64).tobytes())
        for number in range(len(documents)):
            digest.update(documents.tokens(number).tobytes())
        self.fingerprint = digest.hexdigest()[:32]
        # the last token ends a document, so it is not part of a prompt
        room = documents.lengths.astype(np.int64) - 1
        windows = np.where(room > 0, np.maximum(room - prompt_tokens, 0) // self.longest + 1, 0)
        self._first = np.cumsum([0, *windows])
        if not self._first[-1]:
            raise InputError(
                "prompts from plain text need a document of at least two tokens, but none of "
                f"{len(documents)} documents has them; add longer text"
            )

    def first(self, number: int) -> list[int]:
        """Return the prompt of a text."""
        lap, place = divmod(number, int(self._first[-1]))
        window = int(_order(self._seed, lap, int(self._first[-1]))[place])
        row = int(np.searchsorted(self._first, window, side="right")) - 1
        tokens = self._documents.tokens(row)[:-1]
        start = (window - int(self._first[row])) * self.longest
        shift = lap * self._prompt_tokens % self.longest
        if start + shift + self._prompt_tokens <= len(tokens):
            start += shift
        prompt = tokens[start : start + self._prompt_tokens].tolist()
        # the documents begin with the same tokens
        return [*self._opening, *prompt[len(self._opening) :]] if start else prompt


class Conversations(PromptSource):
    """Prompts from conversations: every turn, following the base's own earlier answers.

    The answers in the rows are not used; messages between two of them form one turn. A conversation
    ends before a tool message, because the base may not have called the tool.

    `rows` are conversations as JSON, which takes a tenth of the memory of Python objects:
    `messages` and optional `tools`.
    """

    conversations = True

    def __init__(self, rows: Sequence[str], template: Template, seed: int = 0) -> None:
        assert rows
        self._rows, self._template, self._seed = rows, template, seed
        digest = hashlib.sha256("\n".join([*rows, ""]).encode()).hexdigest()[:32]
        self.fingerprint = f"{digest} {template.fingerprint}"

    def first(self, number: int) -> list[int]:
        """Return the first prompt; empty if the conversation has no user message."""
        turns, tools = self._turns(number)
        return self._template.encode_prompt(turns[0], tools) if turns else []

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return the text so far followed by the next turn."""
        turns, tools = self._turns(number)
        turn = len(answers)
        if turn >= len(turns):
            return None
        messages: list[Any] = []
        for part, answer in zip(turns, answers, strict=False):
            messages += [*part, self._template.parse_answer(answer)]
        return self._template.extend_prompt(tokens, [*messages, *turns[turn]], tools)

    def _turns(self, number: int) -> tuple[list[list[Any]], Any]:
        """Return the messages before each answer, and the tools."""
        lap, place = divmod(number, len(self._rows))
        row = json.loads(self._rows[int(_order(self._seed, lap, len(self._rows))[place])])
        turns: list[list[Any]] = [[]]
        for message in row["messages"]:
            if message["role"] == "tool":
                break
            if message["role"] != "assistant":
                turns[-1].append(message)
            elif _has_user(turns[-1]):
                turns.append([])
        return [part for part in turns if _has_user(part)], row.get("tools")


def _has_user(messages: list[Any]) -> bool:
    return any(message["role"] == "user" for message in messages)


@lru_cache(maxsize=4)
def _order(seed: int, lap: int, count: int) -> np.ndarray:
    """Return a permutation of `count` items, another one each lap."""
    return np.random.default_rng((seed, lap)).permutation(count)


def prompt_source(
    data: DataSettings, base: FrozenBase, settings: DistillSettings, seed: int
) -> PromptSource:
    """Return the prompts of the training split.

    If it has conversations, only these are used, not its plain text. Traces are never used.
    """
    tokenizer = base.tokenizer_for("self-distilled text")
    talks, traces, texts = data.split_by_rows()
    if traces and not (talks or texts):
        raise InputError(
            "a distilled phase needs questions or text, and traces hold what the base wrote "
            "already; train on them in a corpus phase alone (~schedule.phases.distilled)"
        )
    if rows := _conversations(data, seed):
        return Conversations(rows, Template(tokenizer), seed)
    documents = tokenise_corpus(texts or data, "train", tokenizer, seed)
    lengths, (opening, _) = (settings.prompt_tokens, settings.new_tokens), affix_ids(tokenizer)
    return Continuations(documents, *lengths, seed, opening)


def _conversations(data: DataSettings, seed: int) -> list[str]:
    """Return the conversations of the training split as JSON, as often as weights require.

    With equal weights each conversation is there once.
    """
    parts = [(list(_rows(one, seed)), getattr(one, "weight", 1.0)) for one in data.active_sources]
    parts = [(rows, weight) for rows, weight in parts if rows]
    if len({weight for _, weight in parts}) < 2:
        return [row for rows, _ in parts for row in rows]
    scale = sum(len(rows) for rows, _ in parts) / sum(len(rows) * one for rows, one in parts)
    found: list[str] = []
    for number, (rows, weight) in enumerate(parts):
        whole, rest = divmod(weight * scale, 1)
        order = np.random.default_rng((seed, number)).permutation(len(rows))
        times = (int(whole) + (order < round(rest * len(rows)))).tolist()
        found += chain.from_iterable(map(repeat, rows, times))
    return found


def _rows(source: SourceSettings, seed: int) -> Iterator[str]:
    """Yield the conversations of the training split of a source as JSON."""
    for split, _, row in read_source(source, seed):
        if "messages" not in row:
            # all rows of a source have the same columns
            return
        if split == "train":
            kept = {"messages": row["messages"], "tools": row.get("tools")}
            yield json.dumps(kept, ensure_ascii=False, sort_keys=True)


def decoder(base: FrozenBase) -> Callable[[list[int]], str]:
    """Return a function that decodes token ids without special tokens."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        # never empty
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
