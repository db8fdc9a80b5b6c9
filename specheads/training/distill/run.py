"""Generation of self-distilled text: requests for missing texts, and shards of finished ones."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import Progress

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.core.files import sole_writer, sweep, write_atomic
from specheads.heads.load import drafter_of
from specheads.training.distill.engine import Answer, GenerationRequest, TextEngine
from specheads.training.distill.engines import build
from specheads.training.distill.prompts import decoder
from specheads.training.distill.report import as_markdown, report_of
from specheads.training.distill.shards import (
    claim_folder,
    missing_blocks,
    refuse_other_text,
    write_shard,
)
from specheads.training.distill.texts import GeneratedText, Job
from specheads.training.processes import on_all_processes
from specheads.training.settings import Distill

EXTERNAL_ENGINES = ("vllm", "openai")
"""Engines that load the weights themselves."""

TICK_SECONDS = 0.25
"""Interval of progress updates."""

Done = tuple[int, int, int, float]
"""Progress of one process in this call: finished texts, dropped ones among them, generated tokens,
and seconds since the engine was ready."""


def engine_for(job: Job) -> TextEngine:
    """Build the engine of the settings; the local one may draft, which does not change the text."""
    head = None
    if job.head is not None and job.settings.use_head and job.settings.engine == "local":
        head = drafter_of(job.head, job.base)
    return build(job.settings, job.base, head, job.prompts.longest)


def refuse_sharded(base: FrozenBase, settings: Distill, folder: Path) -> None:
    """Raise for a sharded base, whose processes would have to decode in lockstep."""
    if base.sharding is None or settings.engine in EXTERNAL_ENGINES:
        return
    if missing_blocks(folder, settings.shard_size, settings.num_samples):
        raise InputError(
            "a sharded base cannot generate text, got distill.engine="
            f"{settings.engine}; use one of {', '.join(EXTERNAL_ENGINES)}, or generate text with "
            "an unsharded specheads distill and set distill.folder to its folder"
        )


def write_text(
    job: Job, make: Callable[[Job], TextEngine] = engine_for
) -> Generator[Done, None, None]:
    """Generate the missing blocks of a folder; yield the progress from time to time.

    The first yield comes before anything is written. Several processes must wait for each other
    there, because the first one removes incomplete files until then.

    `make` builds the engine, only if texts are missing.

    Raises:
        ValueError: The folder has text of other settings or damaged text, is locked by another run,
            or is not writable.
    """
    size, claim = job.settings.shard_size, job.claim()
    refuse_other_text(job.folder, claim)
    missing = missing_blocks(job.folder, size, job.settings.num_samples)
    mine = {block: missing[block] for block in missing if block % job.world_size == job.rank}
    if not mine:
        return
    # one lock per rank: the processes of a run write together, a second run finds the lock taken
    with sole_writer(job.folder, f".lock-{job.rank}"):
        if job.rank == 0:
            sweep(job.folder)
        scheduler = _Scheduler(job, mine)
        # no process writes before the first one has removed incomplete files
        yield scheduler.progress()
        claim_folder(job.folder, claim)
        engine = make(job)
        scheduler.began = told = time.monotonic()
        with closing(engine(scheduler.pull)) as answers:
            for answer in answers:
                scheduler.take(answer)
                if time.monotonic() - told >= TICK_SECONDS:
                    yield scheduler.progress()
                    told = time.monotonic()
        yield scheduler.progress()


class _Scheduler:
    """Selects the next request, the next turn of a text or a new text, and writes the shards."""

    def __init__(self, job: Job, blocks: dict[int, range]) -> None:
        self._job, self._size = job, job.settings.shard_size
        self._numbers = chain.from_iterable(blocks.values())
        self._waiting = {block: len(numbers) for block, numbers in blocks.items()}
        self._rows: dict[int, list[dict[str, Any]]] = {block: [] for block in blocks}
        self._requested: dict[int, GeneratedText] = {}
        self._ready: deque[GeneratedText] = deque()
        self._finished = self._dropped = self._tokens = 0
        self.began = time.monotonic()

    def pull(self) -> GenerationRequest | None:
        """Return the next request; None if it depends on a pending answer."""
        while not self._ready:
            if (number := next(self._numbers, None)) is None:
                return None
            self._continue(GeneratedText(number, self._job))
        text = self._ready.popleft()
        self._requested[text.number] = text
        return text.request()

    def take(self, answer: Answer) -> None:
        """Add an answer to its text, and prepare the next turn."""
        self._tokens += len(answer.tokens)
        text = self._requested.pop(answer.number)
        text.take(answer)
        self._continue(text)

    def progress(self) -> Done:
        """Return the progress of this process."""
        return self._finished, self._dropped, self._tokens, time.monotonic() - self.began

    def _continue(self, text: GeneratedText) -> None:
        if not text.is_done:
            self._ready.append(text)
            return
        rows, block = text.rows(), text.number // self._size
        self._finished += 1
        self._dropped += rows[0]["turns"] == 0
        self._rows[block] += rows
        self._waiting[block] -= 1
        if not self._waiting[block]:
            write_shard(self._job.folder, block, self._rows.pop(block))


def write_folder(job: Job, bar: Progress, halt: Callable[[], None]) -> dict[str, Any] | None:
    """Generate the missing texts of a folder on all processes, and write report.md.

    Args:
        job: Text to generate.
        bar: Progress display.
        halt: Called on all processes together from time to time; it raises to stop the generation.

    Returns:
        The report on the first process (see `report_of`), None on the others.
    """
    total = job.settings.num_samples
    task = bar.add_task("generated text", total=total, numbers="")
    missing = missing_blocks(job.folder, job.settings.shard_size, total)
    before = total - sum(map(len, missing.values()))
    latest: dict[int, Done] = {}
    speed: float | None = None
    with closing(write_text(job)) as writer:

        def go_on() -> Done | None:
            return next(writer, None)

        # processes that have finished their share wait for the others
        while any(gathered := on_all_processes(go_on)):
            latest |= {rank: one for rank, one in enumerate(gathered) if one}
            texts, dropped, tokens, seconds = zip(*latest.values(), strict=True)
            speed = sum(tokens) / max(seconds) if any(tokens) else None
            bar.update(
                task,
                completed=before + sum(texts),
                numbers=f"{speed or 0:,.0f} tokens/s  {sum(dropped):,} dropped",
            )
            halt()
    # complete folders yield no progress
    bar.update(task, completed=total)
    if job.rank:
        return None
    report = report_of(job.folder, total, decoder(job.base), speed)
    if speed or not (job.folder / "report.md").is_file():
        write_atomic(job.folder / "report.md", as_markdown(report))
    return report
