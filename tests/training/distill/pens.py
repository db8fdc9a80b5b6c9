"""Fake prompts and a fake engine whose tokens identify their origin."""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from specheads.config.training import DistillSettings
from specheads.training.distill.engines import Answer, GenerationRequest
from specheads.training.distill.prompts import PromptSource
from specheads.training.distill.run import Job, write_text
from tests import tiny

SETTINGS = DistillSettings(num_samples=10, new_tokens=6, batch_size=3, shard_size=4, drop=[])
END = 60
"""Token that ends an answer."""


class Talks(PromptSource):
    """Text n has n % 3 + 1 turns; each turn has the number of the text and of the turn."""

    conversations, fingerprint = True, "talks"

    def first(self, number: int) -> list[int]:
        return [number % 50, 0]

    def following(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        return None if len(answers) > number % 3 else [*tokens, number % 50, len(answers)]


@dataclass
class Pen:
    """Answers in random order with the last prompt tokens and the seed."""

    seed: int = 0
    stop_after: int = -1
    faults: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Answers by number and turn that replace the default."""
    asked: list[GenerationRequest] = field(default_factory=list)

    def answers(
        self, pull: Callable[[], GenerationRequest | None]
    ) -> Generator[Answer, None, None]:
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
    """Generate a folder's text; return the numbers of finished texts."""
    answering = pen or Pen()
    told = write_text(job(folder, **changes), lambda _: answering.answers)
    return [texts for texts, *_ in told]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.parquet")}
