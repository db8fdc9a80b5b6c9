"""One self-distilled text: its requests, its kept answers, and the filter of faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specheads.core.loops import loops
from specheads.core.seeds import derive_seed
from specheads.decoding.sampling import Sampling
from specheads.training.distill.engine import Answer, GenerationRequest
from specheads.training.distill.prompts import PromptSource

LONG_PERIOD, LONG_WINDOW = 64, 192
"""A paragraph repeated three times is a loop too; three repeated short words are not."""


def fault(
    answer: Answer,
    drop: Sequence[str],
    min_tokens: int,
    eos_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> str:
    """Return the first fault in `drop` that an answer has, or an empty string.

    Args:
        answer: The answer.
        drop: Faults that count: loop, empty, truncated.
        min_tokens: An answer with fewer tokens is empty; so is one of whitespace only.
        eos_ids: End-of-text tokens, which do not count.
        decode: Decodes token ids without special tokens.
    """
    tokens = answer.tokens
    while tokens and tokens[-1] in eos_ids:
        tokens = tokens[:-1]
    found = {
        "empty": lambda: len(tokens) < min_tokens or not decode(tokens).strip(),
        "loop": lambda: loops(tokens) or loops(tokens, max_period=LONG_PERIOD, window=LONG_WINDOW),
        "truncated": lambda: answer.finish == "length",
    }
    return next((name for name, holds in found.items() if name in drop and holds()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRules:
    """What all texts of a job have in common."""

    prompts: PromptSource
    sampling: Sampling
    """Sampling settings; the seed of each answer is derived from this one."""
    new_tokens: int
    """Maximum tokens of an answer."""
    max_turns: int
    """Maximum number of answers; zero is no limit."""
    max_length: int
    """Maximum tokens of a text."""
    drop: tuple[str, ...]
    """Faults that drop an answer."""
    min_tokens: int
    """An answer with fewer tokens is empty."""
    eos_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]
    """Decodes token ids without special tokens."""


class GeneratedText:
    """A text in progress.

    An answer with a fault is dropped and ends the text, because the next turn replies to it.
    """

    def __init__(self, number: int, rules: GenerationRules) -> None:
        self.number, self._rules = number, rules
        self._tokens: list[int] = []
        self._loss_mask: list[int] = []
        self._answers: list[list[int]] = []
        self._pieces: list[dict[str, Any]] = []
        self._fault, self._goes_on = "", False
        self.is_done = False
        """Whether the text needs no further answer."""
        self._read(rules.prompts.first(number))

    def request(self) -> GenerationRequest:
        """Return the next request."""
        rules = self._rules
        seed = derive_seed(derive_seed(rules.sampling.seed, self.number), len(self._answers))
        room = min(rules.new_tokens, rules.max_length - len(self._tokens))
        return GenerationRequest(
            self.number, self._tokens, room, replace(rules.sampling, seed=seed)
        )

    def take(self, answer: Answer) -> None:
        """Add an answer and prepare the next turn."""
        rules = self._rules
        self._fault = fault(answer, rules.drop, rules.min_tokens, rules.eos_ids, rules.decode)
        self.is_done = True
        if self._fault:
            return
        self._answers.append(answer.tokens)
        self._tokens = self._tokens + answer.tokens
        self._loss_mask = self._loss_mask + [1] * len(answer.tokens)
        turns = 1 + (self._pieces.pop()["turns"] if self._goes_on else 0)
        self._pieces.append(
            {"tokens": self._tokens, "loss_mask": self._loss_mask, "turns": turns, "fault": ""}
        )
        # only a complete answer can have a reply
        if answer.finish == "eos" and len(self._answers) != rules.max_turns:
            following = rules.prompts.following(self.number, self._tokens, self._answers)
            if following is not None:
                self._read(following)

    def rows(self) -> list[dict[str, Any]]:
        """Return a finished text as rows of a shard; a dropped one is a row without tokens.

        There is one row, unless the chat template changes earlier turns (for example by removing
        reasoning); then one per version that the base read. The fault of the last one is the reason
        why the next answer is missing.
        """
        rows = self._pieces or [{"tokens": [], "loss_mask": [], "turns": 0}]
        rows[-1]["fault"] = self._fault
        return [{"number": self.number} | row for row in rows]

    def _read(self, tokens: list[int]) -> None:
        """Set the next prompt; end the text if it is empty or does not fit the context."""
        if not tokens or len(tokens) >= self._rules.max_length:
            self._fault, self.is_done = "context" if tokens else "unasked", True
            return
        self._goes_on = bool(self._tokens) and tokens[: len(self._tokens)] == self._tokens
        before = self._loss_mask if self._goes_on else []
        self._tokens, self._loss_mask = tokens, before + [0] * (len(tokens) - len(before))
        self.is_done = False
