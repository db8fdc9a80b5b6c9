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

from accelerate import Accelerator
from rich.progress import Progress

from specheads.base.ends import BaseEnds
from specheads.base.fingerprint import config_fingerprint
from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.config.shared import SameText, settings_with
from specheads.config.training import EXTERNAL_ENGINES, FAULTS, DistillSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import as_json, remove_incomplete, sole_writer, write_atomic
from specheads.data.encode import tokenizer_fingerprint
from specheads.decoding.noise import derive_seed
from specheads.decoding.sampling import Sampling
from specheads.heads.load import copy_for_drafting
from specheads.measure.counts import is_repetitive
from specheads.training.distill.engines import (
    GeneratedAnswer,
    GenerationRequest,
    TextEngine,
    local_engine,
    vllm_engine,
)
from specheads.training.distill.prompts import PromptSource, decoder, prompt_source
from specheads.training.distill.shards import (
    MARK,
    as_markdown,
    missing_blocks,
    refuse_all_dropped,
    refuse_other_text,
    report_of,
    write_shard,
)
from specheads.training.processes import on_all_processes

LONG_PERIOD, LONG_WINDOW = 64, 192
"""A paragraph repeated three times is a loop too; three repeated short words are not."""
TICK_SECONDS = 1.0
"""Interval of progress updates, at which processes wait for each other."""


@dataclass(frozen=True, slots=True)
class TextProgress:
    """Progress of one process in a call."""

    texts: int = 0
    """Finished texts."""
    dropped: int = 0
    """Finished texts without a kept answer."""
    tokens: int = 0
    """Generated tokens."""
    seconds: float = 0.0
    """Seconds since the engine was ready."""


def find_fault(
    answer: GeneratedAnswer,
    drop: Sequence[str],
    eos_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> str:
    """Return the first fault in `drop` that an answer has, or an empty string.

    Faults are loop, empty (no text, or whitespace only) and truncated. End tokens do not count.
    """
    tokens = answer.tokens
    while tokens and tokens[-1] in eos_ids:
        tokens = tokens[:-1]
    checks = {
        "empty": lambda: not decode(tokens).strip(),
        "loop": lambda: (
            is_repetitive(tokens)
            or is_repetitive(tokens, max_period=LONG_PERIOD, window=LONG_WINDOW)
        ),
        "truncated": lambda: answer.finish == "length",
    }
    return next((fault for fault, has_fault in checks.items() if fault in drop and has_fault()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob:
    """Texts to generate, and their folder."""

    base: BaseEnds
    prompts: PromptSource
    settings: DistillSettings
    folder: Path
    """Folder of the text, created if necessary."""
    identity: dict[str, Any]
    """What determines the text besides settings and seed: see `text_job`."""
    seed: int = 0
    head: Head | None = None
    """Drafter of the local engine, which does not change the text."""
    rank: int = 0
    """Number of this process."""
    world_size: int = 1
    """Number of processes that share the work."""

    def claim(self) -> dict[str, Any]:
        """Return everything that determines the text, by name."""
        # each answer has its own seed: the engine and its batches do not change it
        same_text = dict(settings_with(SameText, DistillSettings))
        settings = asdict(self.settings)
        decisive = {name: settings[name] for name in settings if name not in same_text}
        # 2: one Parquet file a block, with a row for each dropped text
        return self.identity | decisive | {"seed": self.seed, "layout": 2}

    @property
    def drop(self) -> Sequence[str]:
        """Faults that drop an answer; continuations always stop at the limit."""
        is_chat, drop = self.prompts.are_conversations, self.settings.drop
        if drop is None:
            return FAULTS if is_chat else ()
        return [fault for fault in drop if is_chat or fault != "truncated"]


def text_job(
    data: DataSettings,
    base: BaseEnds,
    settings: DistillSettings,
    folder: Path,
    accelerator: Accelerator,
    seed: int,
    head: Head | None = None,
) -> TextJob:
    """Return a phase's texts to generate; each process generates its own part."""
    prompts = prompt_source(data, base, settings, seed)
    identity = {
        "base": base.fingerprint,
        "base_config": config_fingerprint(base.model.config),
        "tokenizer": tokenizer_fingerprint(base.tokenizer_for("self-distilled text")),
        "corpus": asdict(data),
        # the same settings may select other documents later
        "documents": prompts.fingerprint,
    }
    return TextJob(
        base=base,
        prompts=prompts,
        settings=settings,
        folder=folder,
        identity=identity,
        seed=seed,
        head=head,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )


TextInProgress = Generator[GenerationRequest, GeneratedAnswer | None, list[dict[str, Any]]]
"""Yields requests, is sent their answers, and returns the rows of a shard."""


def generate_text(number: int, job: TextJob) -> TextInProgress:
    """Yield the requests of one text, each after the answer to the one before; return its rows.

    There is one row, unless the chat template changes earlier turns (for example by removing
    reasoning); then one per version that the base read. An answer with a fault is dropped and ends
    the text, because the next turn replies to it. The fault of the last row is the reason why the
    next answer is missing; a dropped text has one row without tokens.
    """
    base, sampling = job.base, Sampling.of(job.settings, 0)
    text_seed = derive_seed(job.seed, number)
    rows: list[dict[str, Any]] = []
    answers: list[list[int]] = []
    fault, loss_mask = "", []
    tokens, next_prompt = [], job.prompts.first_prompt(number)
    while next_prompt is not None:
        continues = bool(tokens) and next_prompt[: len(tokens)] == tokens
        loss_mask = loss_mask if continues else []
        loss_mask = loss_mask + [0] * (len(next_prompt) - len(loss_mask))
        tokens = next_prompt
        free_slots = base.max_length - len(tokens)
        if not tokens or free_slots <= 0:
            fault = "context" if tokens else "unasked"
            break
        new_tokens = min(job.settings.new_tokens, free_slots)
        turn_sampling = replace(sampling, seed=derive_seed(text_seed, len(answers)))
        answer = yield GenerationRequest(number, tokens, new_tokens, turn_sampling)
        assert answer
        if fault := find_fault(answer, job.drop, base.eos_ids, decoder(base)):
            break
        answers.append(answer.tokens)
        tokens, loss_mask = tokens + answer.tokens, loss_mask + [1] * len(answer.tokens)
        turns = 1 + (rows.pop()["turns"] if continues else 0)
        rows.append({"tokens": tokens, "loss_mask": loss_mask, "turns": turns, "fault": ""})
        # only a complete answer can have a reply
        is_complete = answer.finish == "eos"
        next_prompt = job.prompts.next_prompt(number, tokens, answers) if is_complete else None
    rows = rows or [{"tokens": [], "loss_mask": [], "turns": 0}]
    rows[-1]["fault"] = fault
    return [{"number": number} | row for row in rows]


def build_engine(
    settings: DistillSettings, base: BaseEnds, head: Head | None = None, max_length: int = 0
) -> TextEngine:
    """Build the engine of the settings.

    `head` drafts for the local engine. `max_length` is the maximum of tokens of prompt and answer;
    zero if only the context limits them.
    """
    if settings.engine == "openai":
        # loads the client of servers
        from specheads.training.distill.openai import CompletionsEngine

        return CompletionsEngine(settings, base).answers
    if settings.engine == "vllm":
        return vllm_engine(settings, base, max_length)
    assert isinstance(base, FrozenBase)
    return partial(local_engine, settings.batch_size, base, head, max_length)


def engine_of_job(job: TextJob) -> TextEngine:
    """Build the engine of the settings; the local one may draft, which does not change the text."""
    head = None
    if job.head is not None and job.settings.use_head and job.settings.engine == "local":
        head = copy_for_drafting(job.head, job.base)
    return build_engine(job.settings, job.base, head, job.prompts.max_tokens)


def refuse_not_decoding(base: BaseEnds, settings: DistillSettings, folder: Path) -> None:
    """Raise for a base that does not decode here: processes would have to decode in lockstep."""
    if base.decodes or settings.engine in EXTERNAL_ENGINES:
        return
    if missing_blocks(folder, settings.shard_size, settings.num_samples):
        raise InputError(
            f"{base.description} cannot generate text here, got distill.engine={settings.engine}; "
            f"use one of {', '.join(EXTERNAL_ENGINES)}, or generate text with a specheads distill "
            "that can and set distill.folder to its folder"
        )


def write_texts(
    job: TextJob, make_engine: Callable[[TextJob], TextEngine] = engine_of_job
) -> Generator[TextProgress, None, None]:
    """Generate the missing blocks of a folder; yield the progress from time to time.

    The first yield comes before anything is written. Several processes must wait for each other
    there, because the first one removes incomplete files until then. The engine is built only if
    texts are missing.
    """
    size, claim = job.settings.shard_size, job.claim()
    refuse_other_text(job.folder, claim)
    missing = missing_blocks(job.folder, size, job.settings.num_samples)
    blocks = {block: missing[block] for block in missing if block % job.world_size == job.rank}
    if not blocks:
        return
    # one lock per rank: the processes of a run write together, a second run finds the lock taken
    with sole_writer(job.folder, f".lock-{job.rank}"):
        if job.rank == 0:
            remove_incomplete(job.folder)
        yield TextProgress()
        # the processes of a run write the same
        write_atomic(job.folder / MARK, as_json(claim))
        writer, engine = BlockWriter(job, blocks), make_engine(job)
        start = last_yield = time.monotonic()
        with closing(engine(writer.next_request)) as answers:
            for answer in answers:
                if isinstance(answer, int):
                    writer.pending_tokens = answer
                else:
                    writer.add_answer(answer)
                if (now := time.monotonic()) - last_yield >= TICK_SECONDS:
                    yield writer.progress(now - start)
                    last_yield = now
        yield writer.progress(time.monotonic() - start)


class BlockWriter:
    """Gives an engine the requests of some blocks, and writes each block when it is complete."""

    def __init__(self, job: TextJob, blocks: dict[int, range]) -> None:
        self._job, self._numbers = job, chain.from_iterable(blocks.values())
        self._missing = {block: len(numbers) for block, numbers in blocks.items()}
        self._rows: dict[int, list[dict[str, Any]]] = {block: [] for block in blocks}
        self._texts: dict[int, TextInProgress] = {}
        self._ready: deque[GenerationRequest] = deque()
        self.num_finished = self.num_dropped = self.new_tokens = self.pending_tokens = 0

    def next_request(self) -> GenerationRequest | None:
        """Return the next request; None if it depends on a pending answer."""
        while not self._ready:
            if (number := next(self._numbers, None)) is None:
                return None
            self._texts[number] = generate_text(number, self._job)
            self._advance(number, None)
        return self._ready.popleft()

    def add_answer(self, answer: GeneratedAnswer) -> None:
        """Add an answer to its text, and prepare the next turn."""
        self.new_tokens += len(answer.tokens)
        # only the local engine counts pending tokens
        self.pending_tokens = max(0, self.pending_tokens - len(answer.tokens))
        self._advance(answer.number, answer)

    def progress(self, seconds: float) -> TextProgress:
        """Return the progress after some seconds."""
        tokens = self.new_tokens + self.pending_tokens
        return TextProgress(self.num_finished, self.num_dropped, tokens, seconds)

    def _advance(self, number: int, answer: GeneratedAnswer | None) -> None:
        try:
            self._ready.append(self._texts[number].send(answer))
        except StopIteration as end:
            rows: list[dict[str, Any]] = end.value
            del self._texts[number]
            self.num_finished += 1
            self.num_dropped += rows[0]["turns"] == 0
            block = number // self._job.settings.shard_size
            self._rows[block] += rows
            self._missing[block] -= 1
            if not self._missing[block]:
                write_shard(self._job.folder, block, self._rows.pop(block))


def write_folder(job: TextJob, bar: Progress, halt: Callable[[], None]) -> dict[str, Any] | None:
    """Generate the missing texts of a folder on all processes, and write report.md.

    All processes call `halt` together from time to time; it raises to stop the generation. Return
    the report (see `report_of`) on the first process, None on the others.
    """
    total = job.settings.num_samples
    task = bar.add_task("generated text", total=total, numbers="")
    missing = missing_blocks(job.folder, job.settings.shard_size, total)
    num_before = total - sum(map(len, missing.values()))
    latest: dict[int, TextProgress] = {}
    speed: float | None = None
    with closing(write_texts(job)) as progress:
        next_progress = partial(next, progress, None)
        # processes that have finished their share wait for the others
        while any(gathered := list[TextProgress | None](on_all_processes(next_progress))):
            latest |= {rank: state for rank, state in enumerate(gathered) if state}
            states = latest.values()
            tokens = sum(state.tokens for state in states)
            speed = tokens / max(state.seconds for state in states) if tokens else None
            num_dropped = sum(state.dropped for state in states)
            numbers = f"{speed or 0:,.0f} tokens/s  {num_dropped:,} dropped"
            completed = num_before + sum(state.texts for state in states)
            bar.update(task, completed=completed, numbers=numbers)
            halt()
    # complete folders yield no progress
    bar.update(task, completed=total)
    if job.rank:
        return None
    report = report_of(job.folder, total, decoder(job.base), speed)
    if speed or not (job.folder / "report.md").is_file():
        write_atomic(job.folder / "report.md", as_markdown(report))
    refuse_all_dropped(job.folder, total, report["dropped"])
    return report
