"""A job of self-distillation, and one of its texts: requests, kept answers, filter of faults."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.texts import derive_seed, loops
from specheads.decoding.sampling import Sampling
from specheads.training.distill.engine import Answer, GenerationRequest
from specheads.training.distill.prompts import PromptSource, decoder
from specheads.training.settings import FAULTS, Distill

NEUTRAL_SETTINGS = {
    *("folder", "num_samples", "engine", "batch_size", "use_head"),
    *("url", "served_as", "timeout_seconds"),
}
"""Settings that do not change the text: each answer has its own seed."""

LONG_PERIOD, LONG_WINDOW = 64, 192
"""A paragraph repeated three times is a loop too; three repeated short words are not."""


def fault(
    answer: Answer, drop: Sequence[str], eos_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> str:
    """Return the first fault in `drop` that an answer has, or an empty string.

    Args:
        answer: The answer.
        drop: Faults that count: loop, empty (no text or whitespace only), truncated.
        eos_ids: End-of-text tokens, which do not count.
        decode: Decodes token ids without special tokens.
    """
    tokens = answer.tokens
    while tokens and tokens[-1] in eos_ids:
        tokens = tokens[:-1]
    found = {
        "empty": lambda: not decode(tokens).strip(),
        "loop": lambda: loops(tokens) or loops(tokens, max_period=LONG_PERIOD, window=LONG_WINDOW),
        "truncated": lambda: answer.finish == "length",
    }
    return next((name for name, holds in found.items() if name in drop and holds()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Texts to generate, and their folder."""

    base: FrozenBase
    """The base; determines the end tokens and the maximum length."""
    prompts: PromptSource
    """Source of the prompts."""
    settings: Distill
    """Settings of generation and filters."""
    folder: Path
    """Folder of the text, created if necessary."""
    identity: dict[str, Any]
    """What else determines the text: see `prompts.identity_of`."""
    seed: int = 0
    """Seed of the answers."""
    head: Head | None = None
    """Drafter of the local engine."""
    rank: int = 0
    """Number of this process."""
    world_size: int = 1
    """Number of processes that share the work."""

    def claim(self) -> dict[str, Any]:
        """Return everything that determines the text, by name."""
        settings = asdict(self.settings)
        decisive = {name: settings[name] for name in settings if name not in NEUTRAL_SETTINGS}
        # 2: one Parquet file a block, with a row for each dropped text
        return self.identity | decisive | {"seed": self.seed, "layout": 2}

    @property
    def sampling(self) -> Sampling:
        """Sampling settings; the seed of each answer is derived from this one."""
        names = ("temperature", "top_k", "top_p")
        return Sampling(seed=self.seed, **{name: getattr(self.settings, name) for name in names})

    @property
    def drop(self) -> Sequence[str]:
        """Faults that drop an answer; continuations always stop at the limit."""
        is_chat, drop = self.prompts.conversations, self.settings.drop
        if drop is None:
            return FAULTS if is_chat else ()
        return [one for one in drop if is_chat or one != "truncated"]


class GeneratedText:
    """A text in progress.

    An answer with a fault is dropped and ends the text, because the next turn replies to it.
    """

    def __init__(self, number: int, job: Job) -> None:
        self.number, self._job = number, job
        self._tokens: list[int] = []
        self._loss_mask: list[int] = []
        self._answers: list[list[int]] = []
        self._pieces: list[dict[str, Any]] = []
        self._fault, self._goes_on = "", False
        self.is_done = False
        """Whether the text needs no further answer."""
        self._read(job.prompts.first(number))

    def request(self) -> GenerationRequest:
        """Return the next request."""
        seed = derive_seed(derive_seed(self._job.seed, self.number), len(self._answers))
        room = self._job.base.max_length - len(self._tokens)
        return GenerationRequest(
            self.number,
            self._tokens,
            min(self._job.settings.new_tokens, room),
            replace(self._job.sampling, seed=seed),
        )

    def take(self, answer: Answer) -> None:
        """Add an answer and prepare the next turn."""
        job, base = self._job, self._job.base
        self._fault = fault(answer, job.drop, base.eos_ids, decoder(base))
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
        if answer.finish == "eos":
            following = job.prompts.following(self.number, self._tokens, self._answers)
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
        if not tokens or len(tokens) >= self._job.base.max_length:
            self._fault, self.is_done = "context" if tokens else "unasked", True
            return
        self._goes_on = bool(self._tokens) and tokens[: len(self._tokens)] == self._tokens
        before = self._loss_mask if self._goes_on else []
        self._tokens, self._loss_mask = tokens, before + [0] * (len(tokens) - len(before))
        self.is_done = False
