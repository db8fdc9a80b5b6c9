"""Prompts for self-distilled text: plain text to continue, or conversations to answer.

Each prompt depends on the number of its text only, not on processes or the order of requests.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from specheads.base.model import FrozenBase
from specheads.config import Data
from specheads.core.errors import InputError
from specheads.data.chat import Template
from specheads.data.documents import Documents
from specheads.data.encode import tokenizer_fingerprint
from specheads.data.sources import read
from specheads.data.tokenise import tokenised
from specheads.training.settings import Distill


@runtime_checkable
class PromptSource(Protocol):
    """Prompts by number; numbers are unlimited."""

    conversations: bool
    """Whether prompts are conversations, whose answers the base ends itself."""
    longest: int
    """Maximum tokens of a text; zero if not known."""
    fingerprint: str
    """Identifies all prompts and their order."""

    def first(self, number: int) -> list[int]:
        """Return the first prompt of a text; empty without one."""
        ...

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return the text so far followed by the next prompt, None after the last turn.

        The text ends with the last answer. If the chat template changes earlier turns, the result
        does not start with the text.
        """
        ...


class Continuations:
    """First tokens of windows of documents, in an order from the seed.

    A window has the length of prompt and continuation, so prompts spread over a long document. A
    document shorter than a prompt is one window. After all windows, the next round shifts them by
    the prompt length.

    Raises:
        ValueError: No document has two tokens.
    """

    conversations = False

    def __init__(
        self, documents: Documents, *, prompt_tokens: int, new_tokens: int, seed: int = 0
    ) -> None:
        self._documents, self._prompt_tokens, self._seed = documents, prompt_tokens, seed
        self.longest = prompt_tokens + new_tokens
        self.fingerprint = _digest(documents)
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
        return tokens[start : start + self._prompt_tokens].tolist()

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return None: continuations have one turn."""
        del number, tokens, answers
        return None


@runtime_checkable
class ChatTemplate(Protocol):
    """Chat template of a tokenizer: see `specheads.data.chat`."""

    @property
    def fingerprint(self) -> str:
        """Identifies the template."""
        ...

    def prompt(self, messages: Any, tools: Any = None) -> list[int]:
        """Return a conversation as token ids, up to the start of the answer."""
        ...

    def next_prompt(self, tokens: list[int], messages: Any, tools: Any = None) -> list[int]:
        """Return a text that ends with an answer, followed by the next messages."""
        ...


class Conversations:
    """Prompts from conversations: every turn, following the base's own earlier answers.

    The answers in the rows are not used; messages between two of them form one turn. A conversation
    ends before a tool message, because the base may not have called the tool.

    Args:
        rows: Conversations with `messages` and optional `tools`.
        template: Chat template of the base.
        decode: Decodes token ids without special tokens.
        fingerprint: Identifies the rows and their order.
        seed: Seed of the order.

    Raises:
        ValueError: There are no conversations.
    """

    conversations = True
    longest = 0

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        template: ChatTemplate,
        decode: Callable[[list[int]], str],
        *,
        fingerprint: str = "",
        seed: int = 0,
    ) -> None:
        self._rows, self._template, self._decode, self._seed = rows, template, decode, seed
        self.fingerprint = f"{fingerprint} {template.fingerprint}"
        if not len(rows):
            raise InputError("at least one conversation is needed, got none; add conversations")

    def first(self, number: int) -> list[int]:
        """Return the first prompt; empty if the conversation has no user message."""
        turns, tools = self._turns(number)
        return self._template.prompt(turns[0], tools) if turns else []

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
            messages += [*part, {"role": "assistant", "content": self._decode(answer)}]
        return self._template.next_prompt(tokens, [*messages, *turns[turn]], tools)

    def _turns(self, number: int) -> tuple[list[list[Any]], Any]:
        """Return the messages before each answer, and the tools."""
        lap, place = divmod(number, len(self._rows))
        row = self._rows[int(_order(self._seed, lap, len(self._rows))[place])]
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


def _digest(documents: Documents) -> str:
    """Return a hash of 32 hex digits of all tokens in their order."""
    digest = hashlib.sha256(documents.lengths.astype(np.int64).tobytes())
    for number in range(len(documents)):
        digest.update(documents.tokens(number).tobytes())
    return digest.hexdigest()[:32]


@lru_cache(maxsize=4)
def _order(seed: int, lap: int, count: int) -> np.ndarray:
    """Return a permutation of `count` items, another one each lap."""
    return np.random.default_rng((seed, lap)).permutation(count)


def prompt_source(data: Data, base: FrozenBase, settings: Distill, seed: int) -> PromptSource:
    """Return the prompts of the training split.

    If it has conversations, only these are used, not its plain text.

    Raises:
        ValueError: There are no prompts, or the tokenizer has no chat template for conversations.
    """
    tokenizer = base.tokenizer
    if tokenizer is None:
        raise InputError(
            f"self-distilled text needs a tokenizer, but the base {base.name} has none; add one"
        )
    rows = Rows(_conversations(data, seed))
    if rows:
        template, decode = Template(tokenizer), decoder(base)
        return Conversations(rows, template, decode, fingerprint=rows.fingerprint, seed=seed)
    documents = tokenised(data, "train", tokenizer, seed)
    lengths = {"prompt_tokens": settings.prompt_tokens, "new_tokens": settings.new_tokens}
    return Continuations(documents, **lengths, seed=seed)


def identity_of(
    data: Data, base: FrozenBase, fingerprint: str, prompts: PromptSource
) -> dict[str, Any]:
    """Return what determines the text, except the settings; `fingerprint` is the base's."""
    assert base.tokenizer is not None
    return {
        "base": fingerprint,
        "tokenizer": tokenizer_fingerprint(base.tokenizer),
        "corpus": asdict(data),
        # the same settings may select other documents later
        "documents": prompts.fingerprint,
    }


class Rows(Sequence[Mapping[str, Any]]):
    """Rows stored as JSON text: Python objects would take ten times the memory."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        written = (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in rows)
        self._rows = pa.array(written, pa.large_string())
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(row.as_buffer())
            digest.update(b"\n")
        self.fingerprint = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return json.loads(self._rows[number].as_py())


def _conversations(data: Data, seed: int) -> Iterable[Mapping[str, Any]]:
    for _, row in read(data, "train", seed):
        if "messages" in row:
            yield {"messages": row["messages"], "tools": row.get("tools")}
        elif data.source != "mixture":
            # all rows of a source have the same columns
            return


def decoder(base: FrozenBase) -> Callable[[list[int]], str]:
    """Return a function that decodes token ids without special tokens."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        # never empty
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
