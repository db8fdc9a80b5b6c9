"""Generation of self-distilled text: requests for missing texts, and shards of finished ones."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import Progress

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import sole_writer, sweep, write_atomic
from specheads.core.texts import derive_seed, loops
from specheads.decoding.sampling import Sampling
from specheads.heads.load import drafter_of
from specheads.training.distill.engines import Answer, GenerationRequest, TextEngine, build
from specheads.training.distill.prompts import PromptSource, decoder
from specheads.training.distill.shards import (
    as_markdown,
    claim_folder,
    missing_blocks,
    refuse_other_text,
    report_of,
    write_shard,
)
from specheads.training.processes import on_all_processes
from specheads.training.settings import FAULTS, Distill

EXTERNAL_ENGINES = ("vllm", "openai")
"""Engines that load the weights themselves."""
NEUTRAL_SETTINGS = {
    *("folder", "num_samples", "engine", "batch_size", "use_head"),
    *("url", "served_as", "timeout_seconds"),
}
"""Settings that do not change the text: each answer has its own seed."""
LONG_PERIOD, LONG_WINDOW = 64, 192
"""A paragraph repeated three times is a loop too; three repeated short words are not."""
TICK_SECONDS = 0.25
"""Interval of progress updates."""
Done = tuple[int, int, int, float]
"""Progress of one process in this call: finished texts, dropped ones among them, generated tokens,
and seconds since the engine was ready."""


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
        return Sampling.of(self.settings, self.seed)

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


def engine_for(job: Job) -> TextEngine:
    """Build the engine of the settings; the local one may draft, which does not change the text."""
    head = None
    if job.head is not None and job.settings.use_head and job.settings.engine == "local":
        head = drafter_of(job.head, job.base)
    return build(job.settings, job.base, head, job.prompts.longest)


def refuse_not_decoding(base: FrozenBase, settings: Distill, folder: Path) -> None:
    """Raise for a base that does not decode here: processes would have to decode in lockstep."""
    if base.decodes or settings.engine in EXTERNAL_ENGINES:
        return
    if missing_blocks(folder, settings.shard_size, settings.num_samples):
        raise InputError(
            f"{base.where} cannot generate text here, got distill.engine={settings.engine}; use "
            f"one of {', '.join(EXTERNAL_ENGINES)}, or generate text with a specheads distill that "
            "can and set distill.folder to its folder"
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
        go_on = partial(next, writer, None)
        # processes that have finished their share wait for the others
        while any(gathered := list[Done | None](on_all_processes(go_on))):
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
