"""What training takes: time, time spent waiting for text, memory, and the use of the machine."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from specheads.core.machine import peak_gib
from specheads.data.packing import TokenBatch
from specheads.training.cost import matmul_rate, step_flops
from specheads.training.schedule import PlacedPhase, Progressed
from specheads.training.teacher import Teacher


class Meter:
    """Reads the clock for a phase, and adds what it says to the run's seconds of training.

    Between `row` and `go_on` it stands still: measuring is no training. The use of the machine is
    that of this process; `autocast` is what the head is trained in.
    """

    def __init__(
        self,
        at: Progressed,
        phase: PlacedPhase,
        teacher: Teacher,
        autocast: Callable[..., AbstractContextManager[Any]],
    ) -> None:
        self.at, self.phase, self.teacher, self.autocast = at, phase, teacher, autocast
        self.use = 0.0
        """Seconds of a step in which the machine multiplies, at its best; zero: not known yet."""
        self.go_on()

    def waiting(
        self, batches: Iterable[tuple[TokenBatch, dict[str, Any]]]
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the same batches, and count the time until each comes."""
        source = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self.waited += time.perf_counter() - began
            if not self.use and self._is_known():
                self._estimate(item[0])
            yield item

    def _is_known(self) -> bool:
        """Return whether the base only reads, and reads everything: its products are counted."""
        return self.phase.settings.joint is None and self.teacher.cache is None

    def _estimate(self, batch: TokenBatch) -> None:
        """Find out how long a step would take if it were nothing but products at full speed."""
        base, head, settings = self.teacher.base, self.teacher.head, self.phase.settings
        self.pause()
        with _undrawn(base.device), self.autocast():
            # by the same parts as the step: a head holds no more of a batch than then
            parts = batch.parts(settings.accumulation_steps)
            flops = sum(step_flops(base, head, part, settings).total for part in parts)
        self.use = flops / _matmul_rate(base.device, base.dtype)
        self.read = time.perf_counter()

    def step(self, tokens: int) -> None:
        """Count one step of so many tokens, over all processes."""
        self.steps += 1
        self.tokens += tokens
        self.pause()

    def pause(self) -> None:
        """Add the time that has gone by."""
        now = time.perf_counter()
        self.at.seconds += now - self.read
        self.read = now

    def row(self) -> dict[str, float]:
        """Return the figures since the last row, under the names of metrics.jsonl."""
        self.pause()
        seconds = self.at.seconds - self.since
        figures = {
            "tokens_per_second": self.tokens / seconds,
            "hours": self.at.seconds / 3600,
            "data_wait_share": min(self.waited / seconds, 1.0),
            "peak_gib": peak_gib(self.teacher.base.device),
        }
        if self.use:
            figures["mfu"] = self.use * self.steps / seconds
        return figures

    def go_on(self) -> None:
        """Begin a row: what has gone by since the last one was no training."""
        self.steps, self.tokens, self.waited = 0, 0, 0.0
        self.since, self.read = self.at.seconds, time.perf_counter()


@cache
def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the machine's rate, measured once a process."""
    with _undrawn(device):
        return matmul_rate(device, dtype)


def _undrawn(device: torch.device) -> AbstractContextManager[None]:
    """Leave random states as they are, whatever is drawn while this lasts."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
