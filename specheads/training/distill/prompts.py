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

from specheads.base.ends import BaseEnds
from specheads.config.data import DataSettings, SourceSettings
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.data.chat import Template
from specheads.data.encode import affix_ids
from specheads.data.sources import read_source
from specheads.data.tokenise import TokenisedDocuments, tokenise_corpus


class PromptSource:
    """Prompts by number; numbers are unlimited."""

    are_conversations = False
    """Whether prompts are conversations, whose answers the base ends itself."""
    max_tokens = 0
    """Maximum tokens of a text; zero if not known."""
    fingerprint = ""
    """Identifies all prompts and their order."""

    def first_prompt(self, number: int) -> list[int]:
        """Return the first prompt of a text; empty without one."""
        raise NotImplementedError

    def next_prompt(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return the text so far, with the last answer, and the next prompt; None at its end.

        If the chat template changes earlier turns, the result does not start with the text.
        """
        del number, tokens, answers
        return None


class ContinuationPrompts(PromptSource):
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
        self.max_tokens = prompt_tokens + new_tokens
        digest = hashlib.sha256(documents.lengths.astype(np.int64).tobytes())
        digest.update(np.array(self._opening, np.int64).tobytes())
        for number in range(len(documents)):
            digest.update(documents.tokens(number).tobytes())
        self.fingerprint = digest.hexdigest()[:32]
        # the last token ends a document, so it is not part of a prompt
        room = documents.lengths.astype(np.int64) - 1
        windows = np.where(room > 0, np.maximum(room - prompt_tokens, 0) // self.max_tokens + 1, 0)
        self._first_windows = np.cumsum([0, *windows])
        """Number of the first window of each document, and the number of windows at the end."""
        if not self._first_windows[-1]:
            raise InputError(
                "prompts from plain text need a document of at least two tokens, but none of "
                f"{len(documents)} documents has them; add longer text"
            )

    def first_prompt(self, number: int) -> list[int]:
        """Return the prompt of a text."""
        lap, window = _shuffled(number, int(self._first_windows[-1]), self._seed)
        document = int(np.searchsorted(self._first_windows, window, side="right")) - 1
        tokens = self._documents.tokens(document)[:-1]
        start = (window - int(self._first_windows[document])) * self.max_tokens
        shift = lap * self._prompt_tokens % self.max_tokens
        if start + shift + self._prompt_tokens <= len(tokens):
            start += shift
        prompt = tokens[start : start + self._prompt_tokens].tolist()
        # the documents begin with the same tokens
        return [*self._opening, *prompt[len(self._opening) :]] if start else prompt


class ConversationPrompts(PromptSource):
    """Prompts from conversations: every turn, following the base's own earlier answers.

    The answers in the rows are not used; messages between two of them form one turn. A conversation
    ends before a tool message, because the base may not have called the tool.

    `rows` are conversations as JSON, which takes a tenth of the memory of Python objects:
    `messages` and optional `tools`.
    """

    are_conversations = True

    def __init__(self, rows: Sequence[str], template: Template, seed: int = 0) -> None:
        assert rows
        self._rows, self._template, self._seed = rows, template, seed
        digest = hashlib.sha256("\n".join([*rows, ""]).encode()).hexdigest()[:32]
        self.fingerprint = f"{digest} {template.fingerprint}"

    def first_prompt(self, number: int) -> list[int]:
        """Return the first prompt; empty if the conversation has no user message."""
        turns, tools = self._turns(number)
        return self._template.encode_prompt(turns[0], tools) if turns else []

    def next_prompt(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return the text so far followed by the next turn."""
        turns, tools = self._turns(number)
        turn = len(answers)
        if turn >= len(turns):
            return None
        messages: list[Any] = []
        for turn_messages, answer in zip(turns, answers, strict=False):
            messages += [*turn_messages, self._template.parse_answer(answer)]
        return self._template.extend_prompt(tokens, [*messages, *turns[turn]], tools)

    def _turns(self, number: int) -> tuple[list[list[Any]], Any]:
        """Return the messages before each answer, and the tools."""
        _, index = _shuffled(number, len(self._rows), self._seed)
        row = json.loads(self._rows[index])
        turns: list[list[Any]] = [[]]
        for message in row["messages"]:
            if message["role"] == "tool":
                break
            if message["role"] != "assistant":
                turns[-1].append(message)
            elif _has_user(turns[-1]):
                turns.append([])
        return [turn for turn in turns if _has_user(turn)], row.get("tools")


def _has_user(messages: list[Any]) -> bool:
    return any(message["role"] == "user" for message in messages)


def _shuffled(number: int, count: int, seed: int) -> tuple[int, int]:
    """Return the lap of a number over `count` items, and its item: each lap has another order."""
    lap, position = divmod(number, count)
    return lap, int(_permutation(seed, lap, count)[position])


@lru_cache(maxsize=4)
def _permutation(seed: int, lap: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, lap)).permutation(count)


def prompt_source(
    data: DataSettings, base: BaseEnds, settings: DistillSettings, seed: int
) -> PromptSource:
    """Return the prompts of the training split.

    If it has conversations, only these are used, not its plain text. Traces are never used.
    """
    tokenizer = base.tokenizer_for("self-distilled text")
    chats, traces, texts = data.split_by_rows()
    if traces and not (chats or texts):
        raise InputError(
            "a distilled phase needs questions or text, and traces hold what the base wrote "
            "already; train on them in a corpus phase alone (~schedule.phases.distilled)"
        )
    if rows := _conversations(data, seed):
        return ConversationPrompts(rows, Template(tokenizer), seed)
    documents = tokenise_corpus(texts or data, "train", tokenizer, seed)
    opening, _ = affix_ids(tokenizer)
    return ContinuationPrompts(
        documents, settings.prompt_tokens, settings.new_tokens, seed, opening
    )


def _conversations(data: DataSettings, seed: int) -> list[str]:
    """Return the conversations of the training split as JSON, as often as weights require.

    With equal weights each conversation is there once.
    """
    weighted = [
        (list(_rows(source, seed)), getattr(source, "weight", 1.0))
        for source in data.active_sources
    ]
    weighted = [(rows, weight) for rows, weight in weighted if rows]
    if len({weight for _, weight in weighted}) < 2:
        return [row for rows, _ in weighted for row in rows]
    num_rows = sum(len(rows) for rows, _ in weighted)
    scale = num_rows / sum(len(rows) * weight for rows, weight in weighted)
    conversations: list[str] = []
    for number, (rows, weight) in enumerate(weighted):
        repeats, extra_share = divmod(weight * scale, 1)
        order = np.random.default_rng((seed, number)).permutation(len(rows))
        counts = (int(repeats) + (order < round(extra_share * len(rows)))).tolist()
        conversations += chain.from_iterable(map(repeat, rows, counts))
    return conversations


def _rows(source: SourceSettings, seed: int) -> Iterator[str]:
    """Yield the conversations of the training split of a source as JSON."""
    for split, _, row in read_source(source, seed):
        if "messages" not in row:
            # all rows of a source have the same columns
            return
        if split == "train":
            conversation = {"messages": row["messages"], "tools": row.get("tools")}
            yield json.dumps(conversation, ensure_ascii=False, sort_keys=True)


def decoder(base: BaseEnds) -> Callable[[list[int]], str]:
    """Return a function that decodes token ids without special tokens."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        # never empty
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
