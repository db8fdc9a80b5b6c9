"""What to change in a run that does not fit its device, each with a number that was tried."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specheads.config import Distill
from specheads.training.plan.batch import largest
from specheads.training.plan.rehearsal import Rehearsal, length_of
from specheads.training.schedule import PlacedPhase

SHORTEST = 128
"""Tokens of a sequence that is proposed, at least."""

SHARE = 0.25
"""Share of the positions that is proposed to be scored."""

LEVERS = (
    "base.dtype=bfloat16 (half the weights of a base in float32)",
    "base.quantization=8bit or 4bit (on CUDA)",
    "head.draft_tokens (a smaller projection: less of weights, gradients, moments and loss)",
    "a smaller base",
)
"""What is left where one sequence is too much."""


def changes(
    rehearsal: Rehearsal, phases: Sequence[PlacedPhase], rows: dict[str, int], room: int
) -> list[str]:
    """Return settings with which each phase fits so many bytes; the simplest first."""
    found = [line for phase in phases for line in _of_phase(rehearsal, phase, rows, room)]
    return found or list(LEVERS)


def _of_phase(
    rehearsal: Rehearsal, phase: PlacedPhase, rows: dict[str, int], room: int
) -> Iterator[str]:
    setting, settings = f"schedule.phases.{phase.name}", phase.settings

    def needed(changed: PlacedPhase, rows: int) -> int:
        return sum(rehearsal.fresh().step(changed, rows).values())

    if (distill := settings.distill) and distill.engine == "local":
        yield from _of_text(rehearsal, distill, setting, room)
    own = rows[phase.name]
    if needed(phase, own) <= room:
        return
    plain = replace(phase, settings=replace(settings, accumulation_steps=1))
    if fitting := min(largest(lambda rows: needed(plain, rows), room), own):
        parts = -(-own // fitting)
        yield (
            f"{setting}.accumulation_steps={parts} (parts of {-(-own // parts)} sequences, the "
            f"same training), or {setting}.batch_size={fitting} a process"
        )
        return
    length = length_of(settings)
    while settings.distill is None and (length := length // 2) >= SHORTEST:
        shorter = replace(plain, settings=replace(plain.settings, sequence_length=length))
        if needed(shorter, 1) <= room:
            yield f"{setting}.sequence_length={length} with one sequence at once"
            return
    scored = replace(plain, settings=replace(plain.settings, scored_share=SHARE))
    if settings.scored_share > SHARE and needed(scored, 1) <= room:
        yield f"{setting}.scored_share={SHARE} with one sequence at once"
        return
    yield from (f"{setting}: {lever}" for lever in LEVERS)


def _of_text(rehearsal: Rehearsal, distill: Distill, setting: str, room: int) -> Iterator[str]:
    def needed(texts: int) -> int:
        return sum(rehearsal.fresh().write(replace(distill, batch_size=texts)).values())

    if needed(distill.batch_size) <= room:
        return
    if fitting := largest(needed, room):
        yield f"{setting}.distill.batch_size={fitting}"
    else:
        yield f"{setting}.distill.engine=openai (a server's memory), or use_head=false"
