"""Real steps on synthetic text, for their time: nothing is written."""

import time
from dataclasses import dataclass
from statistics import median

import torch
from accelerate import Accelerator

from specheads.base.model import FrozenBase
from specheads.config import Distill, Train
from specheads.decoding.acceptance.sampling import Sampling
from specheads.decoding.loop import synchronise
from specheads.heads.load import build_for
from specheads.training import schedule as schedules
from specheads.training.distill.engine import Ask
from specheads.training.distill.engines.local import Local
from specheads.training.plan.rehearsal import length_of, longest_of, synthetic
from specheads.training.teacher import teacher_of
from specheads.training.trainer import steps_alone

STEPS, SECONDS = 5, 10.0
"""Steps that are timed at least, and seconds after which no other one begins."""

SHORT, LONG = 8, 40
"""Tokens that texts get in the two trials, from which the time of a whole text follows."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What a phase takes here."""

    step_seconds: float
    write_seconds: float = 0.0
    """Of all its text, without drafts; zero where nothing is written here."""


def measure(
    settings: Train, base: FrozenBase, accelerator: Accelerator, rows: dict[str, int]
) -> dict[str, Burst]:
    """Return what each phase takes: a few steps of so many rows, after one that warms up."""
    head = build_for(settings.head, base)
    adapter = schedules.adapter_settings(settings.schedule)
    teacher = teacher_of(base, head, adapter, settings.seed)
    found: dict[str, Burst] = {}
    try:
        step, _ = steps_alone(teacher, settings.schedule, accelerator, settings.seed)
        for phase in schedules.placed(settings.schedule):
            distill = phase.settings.distill
            writing = 0.0
            if distill is not None and distill.engine == "local":
                with teacher.as_loaded():
                    writing = _writing(distill, base) / accelerator.num_processes
            teacher.begin(phase)
            length = length_of(phase.settings)
            seconds: list[float] = []
            while len(seconds) <= STEPS or (sum(seconds) < SECONDS and len(seconds) <= 4 * STEPS):
                batch = synthetic(rows[phase.name], length, phase.settings, head)
                began = time.perf_counter()
                step(batch, phase)
                synchronise(base.device)
                seconds.append(time.perf_counter() - began)
                if len(seconds) > 1 and sum(seconds) > 3 * SECONDS:
                    break
            found[phase.name] = Burst(median(seconds[1:]), writing)
    finally:
        teacher.leave()
    return found


@torch.no_grad()
def _writing(distill: Distill, base: FrozenBase) -> float:
    """Return the seconds in which the base writes all of a phase's text, by itself."""
    sampling = Sampling(temperature=distill.temperature, top_k=distill.top_k, top_p=distill.top_p)
    prompt = [at % base.vocab_size for at in range(distill.prompt_tokens)]
    number = min(distill.batch_size, distill.num_samples)

    def trial(new_tokens: int) -> float:
        engine = Local(base, None, number, longest_of(distill))
        asks = iter([Ask(at, prompt, new_tokens, sampling) for at in range(number)])
        began = time.perf_counter()
        for _ in engine.answers(lambda: next(asks, None)):
            pass
        return time.perf_counter() - began

    short, long = min(SHORT, distill.new_tokens), min(LONG, distill.new_tokens)
    trial(short)
    first, second = trial(short), trial(long)
    token = max(0.0, second - first) / max(1, long - short)
    batches = distill.num_samples / number
    return batches * (first + token * (distill.new_tokens - short))
