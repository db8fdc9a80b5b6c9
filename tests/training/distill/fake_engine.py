"""Fake prompts and a fake engine whose tokens identify their origin."""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from specheads.config.training import DistillSettings
from specheads.training.distill.engines import GeneratedAnswer, GenerationRequest
from specheads.training.distill.prompts import PromptSource
from specheads.training.distill.run import TextJob, write_texts
from tests import tiny

SETTINGS = DistillSettings(num_samples=10, new_tokens=6, batch_size=3, shard_size=4, drop=[])
END = 60
"""Token that ends an answer."""


class FakeChats(PromptSource):
    """Text n has n % 3 + 1 turns; each turn has the number of the text and of the turn."""

    are_conversations, fingerprint = True, "chats"

    def first_prompt(self, number: int) -> list[int]:
        return [number % 50, 0]

    def next_prompt(
        self, number: int, tokens: list[int], answers: list[list[int]]
    ) -> list[int] | None:
        return None if len(answers) > number % 3 else [*tokens, number % 50, len(answers)]


@dataclass
class FakeEngine:
    """Answers in random order with the last prompt tokens and the seed."""

    seed: int = 0
    stop_after: int = -1
    faults: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Answers by number and turn that replace the default."""
    requests: list[GenerationRequest] = field(default_factory=list)

    def answers(
        self, next_request: Callable[[], GenerationRequest | None]
    ) -> Generator[GeneratedAnswer, None, None]:
        rng, pending = random.Random(self.seed), list[GenerationRequest]()
        while True:
            while len(pending) < 3 and (request := next_request()):
                self.requests.append(request)
                pending.append(request)
            if not pending:
                return
            request = pending.pop(rng.randrange(len(pending)))
            if self.stop_after == 0:
                raise KeyboardInterrupt
            self.stop_after -= 1
            tokens = [*request.tokens[-2:], request.sampling.seed % 50, END]
            tokens = self.faults.get((request.number, request.tokens[-1]), tokens)
            finish = "eos" if tokens[-1:] == [END] else "length"
            yield GeneratedAnswer(request.number, tokens, finish)


def job(folder: Path, **changes: Any) -> TextJob:
    plain = {
        "base": tiny.base(), "prompts": FakeChats(), "settings": SETTINGS, "folder": folder,
        "identity": {"base": "b"},
    }  # fmt: skip
    return TextJob(**(plain | changes))


def write(folder: Path, engine: FakeEngine | None = None, **changes: Any) -> list[int]:
    """Generate a folder's text; return the numbers of finished texts."""
    engine = engine or FakeEngine()
    progress = write_texts(job(folder, **changes), lambda _: engine.answers)
    return [state.texts for state in progress]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.parquet")}
