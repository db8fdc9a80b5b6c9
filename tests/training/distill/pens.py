"""Stand-ins for what is asked and who answers, whose tokens say where they came from."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from specheads.config import Distill
from specheads.training.distill.engine import Answer, GenerationRequest
from specheads.training.distill.run import Job, write_text
from tests import tiny

SETTINGS = Distill(num_samples=10, new_tokens=6, batch_size=3, shard_size=4, drop=[])
END = 60
"""Token that ends an answer."""


@dataclass
class Talks:
    """Number n is asked n % 3 + 1 times; each time its number is said, and how often it was."""

    conversations: bool = True
    longest: int = 0
    fingerprint: str = "talks"

    def first(self, number: int) -> list[int]:
        return [number % 50, 0]

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        return None if len(answers) > number % 3 else [*tokens, number % 50, len(answers)]


@dataclass
class Pen:
    """Answers in any order: what is asked last, how many turns there were, and its own seed."""

    seed: int = 0
    stop_after: int = -1
    faults: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Answers by number and turn, in place of its own."""
    asked: list[GenerationRequest] = field(default_factory=list)

    def answers(self, pull: Callable[[], GenerationRequest | None]) -> Iterator[Answer]:
        chance, flying = random.Random(self.seed), []
        while True:
            while len(flying) < 3 and (ask := pull()):
                self.asked.append(ask)
                flying.append(ask)
            if not flying:
                return
            ask = flying.pop(chance.randrange(len(flying)))
            if self.stop_after == 0:
                raise KeyboardInterrupt
            self.stop_after -= 1
            own = [*ask.tokens[-2:], ask.sampling.seed % 50, END]
            tokens = self.faults.get((ask.number, ask.tokens[-1]), own)
            yield Answer(ask.number, tokens, "eos" if tokens[-1:] == [END] else "length")


def job(folder: Path, **changes: Any) -> Job:
    plain = {
        "base": tiny.base(), "prompts": Talks(), "settings": SETTINGS, "folder": folder,
        "identity": {"base": "b"},
    }  # fmt: skip
    return Job(**(plain | changes))


def write(folder: Path, pen: Pen | None = None, **changes: Any) -> list[int]:
    """Write a folder's text; return how many texts were done each time it told."""
    answering = pen or Pen()
    told = write_text(job(folder, **changes), lambda _: answering)
    return [written.texts for written in told]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.parquet")}
