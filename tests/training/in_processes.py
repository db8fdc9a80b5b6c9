"""Trains a tiny head in as many processes as torchrun starts; run by test_processes.py.

Arguments: a folder, rows of a batch over all processes, and what happens: `fail-RANK` (the third
batch cannot be made), `stop-RANK` (a signal in the third step, that the others do not get) or, with
`train`, nothing.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from specheads.config import Phase, Schedule
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for
from specheads.runs.directory import RunDirectory
from specheads.training import trainer
from tests import tiny


class Shares:
    """Text of which each process reads its own rows."""

    def __init__(self, rows: int, rank: int, world_size: int, what: str) -> None:
        self.rows, self.share = rows, slice(rank * rows // world_size, None)
        self.count = rows // world_size
        self.what = what.removesuffix(f"-{rank}")

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        number = cursor["number"] if cursor else 0
        while True:
            if number == 2 and self.what == "fail":
                raise ValueError("text is at its end")
            places = torch.arange(self.rows * 16).view(self.rows, 16) * 7 + 3 * number
            tokens = (places % 59)[self.share][: self.count]
            number += 1
            yield TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool)), {"number": number}


def stop_in_the_third_step() -> None:
    """Have this process signalled as by a scheduler, at a moment that prefetching cannot move."""
    whole: Any = trainer._Trainer
    step = whole._step

    def stopped(self: Any, *arguments: Any) -> Any:
        if self.at.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    whole._step = stopped


def main(folder: Path, rows: int, what: str) -> None:
    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    base = tiny.base("llama", dtype=torch.float32)
    torch.manual_seed(0)
    head = build_for({"kind": "mlp_speculator", "depth": 2}, base)
    text = Shares(rows, rank, world_size, what)
    if what == f"stop-{rank}":
        stop_in_the_third_step()
    settings = {"text": "corpus", "batch_size": rows // world_size, "sequence_length": 16}
    phase = Phase(**settings, steps=6, learning_rate=1e-2)
    schedule = Schedule(phases={"corpus": phase})
    run = RunDirectory(folder)
    trainer.train(base, head, schedule, lambda *_: text, run, None, accelerator)
    torch.save(head.state_dict(), folder / f"head-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
