"""What the base is asked: beginnings of plain text to continue, or conversations to answer.

Everything follows from a text's number, so that it does not matter who asks, when and in which
order.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specheads.core.errors import InputError
from specheads.data.documents import Documents


@runtime_checkable
class Prompts(Protocol):
    """What is asked, by number; as many numbers as one likes."""

    conversations: bool
    """Whether the base answers somebody, and so ends each answer itself."""
    longest: int
    """Most tokens that a text may come to have; zero is not known."""
    fingerprint: str
    """Names all that they say, and their order."""

    def first(self, number: int) -> list[int]:
        """Return what the base reads first."""
        ...

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return a text, which ends with the last of the base's answers, and what is said next.

        None where nothing is. Where a chat template changes what was said before, the result does
        not begin with the text.
        """
        ...


class Continuations:
    """Beginnings of windows cut from documents, in an order drawn from the seed.

    A window is as long as its prompt and what is written together, so that prompts spread over a
    long document. A document that is shorter than a prompt is one whole. Once all windows were
    taken, the next round takes them a prompt further on.

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
        # the last token ends a document: nobody continues what is over
        room = documents.lengths.astype(np.int64) - 1
        windows = np.where(room > 0, np.maximum(room - prompt_tokens, 0) // self.longest + 1, 0)
        self._first = np.cumsum([0, *windows])
        if not self._first[-1]:
            raise InputError(
                f"text to be continued needs a document of two tokens, and none of {len(documents)}"
                " has them; give more text"
            )

    def first(self, number: int) -> list[int]:
        """Return what the base reads first."""
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
        """Return None: nobody replies."""
        del number, tokens, answers
        return None


@runtime_checkable
class Template(Protocol):
    """How a tokenizer's chat template writes conversations: see `specheads.data.chat`."""

    @property
    def fingerprint(self) -> str:
        """What changes with what it writes."""
        ...

    def prompt(self, messages: Any, tools: Any = None) -> list[int]:
        """Return a conversation as token ids, up to where the answer begins."""
        ...

    def next_prompt(self, tokens: list[int], messages: Any, tools: Any = None) -> list[int]:
        """Return a text that ends with an answer, with the next message behind it."""
        ...


class Conversations:
    """What is said to the base in conversations: all turns, each with its own earlier answers.

    The answers that stand in a conversation are not read; what says something between two of them
    is asked in one turn. A conversation is left where a tool answers: the base may not have called
    it.

    Args:
        rows: The conversations: `messages`, and maybe the `tools` that the base is told of.
        template: The chat template of the base.
        decode: Gives the text of token ids, without special tokens.
        fingerprint: Names the rows and their order.
        seed: Seed of their order.

    Raises:
        ValueError: There is none.
    """

    conversations = True
    longest = 0

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        template: Template,
        decode: Callable[[list[int]], str],
        *,
        fingerprint: str = "",
        seed: int = 0,
    ) -> None:
        self._rows, self._template, self._decode, self._seed = rows, template, decode, seed
        self.fingerprint = f"{fingerprint} {template.fingerprint}"
        if not len(rows):
            raise InputError("conversations to be answered need one at least, got none; give some")

    def first(self, number: int) -> list[int]:
        """Return what the base reads first; nothing where nobody says anything."""
        said, tools = self._said(number)
        return self._template.prompt(said[0], tools) if said else []

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        """Return the text with what is said next."""
        said, tools = self._said(number)
        turn = len(answers)
        if turn >= len(said):
            return None
        messages: list[Any] = []
        for part, answer in zip(said, answers, strict=False):
            messages += [*part, {"role": "assistant", "content": self._decode(answer)}]
        return self._template.next_prompt(tokens, [*messages, *said[turn]], tools)

    def _said(self, number: int) -> tuple[list[list[Any]], Any]:
        """Return what is said to the base before each of its answers, and the tools it has."""
        lap, place = divmod(number, len(self._rows))
        row = self._rows[int(_order(self._seed, lap, len(self._rows))[place])]
        said: list[list[Any]] = [[]]
        for message in row["messages"]:
            if message["role"] == "tool":
                break
            if message["role"] != "assistant":
                said[-1].append(message)
            elif _asks(said[-1]):
                said.append([])
        return [part for part in said if _asks(part)], row.get("tools")


def _asks(messages: list[Any]) -> bool:
    return any(message["role"] == "user" for message in messages)


def _digest(documents: Documents) -> str:
    """Return 32 hex digits of every token of some documents, in their order."""
    digest = hashlib.sha256(documents.lengths.astype(np.int64).tobytes())
    for number in range(len(documents)):
        digest.update(documents.tokens(number).tobytes())
    return digest.hexdigest()[:32]


@lru_cache(maxsize=4)
def _order(seed: int, lap: int, count: int) -> np.ndarray:
    """Return an order of so many things, another one each time round."""
    return np.random.default_rng((seed, lap)).permutation(count)
