"""Generation of self-distilled text: requests for missing texts, and shards of finished ones."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.progress import Progress

from specheads.base.model import FrozenBase
from specheads.config.commands import Distill as DistillCommand
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import sole_writer
from specheads.core.machine import dtype_name
from specheads.core.paths import writable_folder
from specheads.data.sources import refuse_unreadable
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling, each_prompt
from specheads.heads.load import drafter_of, load_head
from specheads.runs.progress import progress
from specheads.training.distill.engine import (
    Answer,
    EngineOptions,
    GenerationRequest,
    TextEngine,
)
from specheads.training.distill.engines import build
from specheads.training.distill.prompts import PromptSource, decoder, identity_of, prompt_source
from specheads.training.distill.report import Report, report_of, write_report
from specheads.training.distill.shards import Shards, claim_folder, is_claimed, is_complete
from specheads.training.distill.texts import GeneratedText, GenerationRules
from specheads.training.processes import (
    accelerator_of_environment,
    load_base,
    naming_lost,
    on_all_processes,
)
from specheads.training.settings import FAULTS, Distill, distilled

EXTERNAL_ENGINES = ("vllm", "openai")
"""Engines that load the weights themselves."""

TICK_SECONDS = 0.25
"""Interval of progress updates."""

NEUTRAL_SETTINGS = {
    *("folder", "num_samples", "engine", "batch_size", "use_head"),
    *("url", "served_as", "api_key_env", "timeout_seconds", "retries"),
}
"""Settings that do not change the text: each answer has its own seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Text to generate, and its folder."""

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
        decisive = asdict(self.settings)
        for name in NEUTRAL_SETTINGS:
            del decisive[name]
        return self.identity | decisive | {"seed": self.seed}


@dataclass(frozen=True, slots=True)
class WriterProgress:
    """Progress of one process."""

    texts: int
    """Finished texts, including dropped ones and those of earlier calls."""
    dropped: int
    """Texts dropped in this call."""
    tokens: int
    """Tokens generated in this call."""
    seconds: float
    """Seconds since the engine was ready."""


def engine_for(job: Job) -> TextEngine:
    """Build the engine of the settings."""
    settings, base = job.settings, job.base
    options = EngineOptions(
        model=settings.served_as or base.name,
        base=base,
        head=job.head,
        batch_size=settings.batch_size,
        url=settings.url,
        api_key_env=settings.api_key_env,
        timeout_seconds=settings.timeout_seconds,
        retries=settings.retries,
        max_length=job.prompts.longest,
        dtype=dtype_name(base.dtype),
    )
    return build(settings.engine, options)


def refuse_sharded(base: FrozenBase, settings: Distill, folder: Path) -> None:
    """Raise for a sharded base, whose processes would have to decode in lockstep."""
    if base.sharding is None or settings.engine in EXTERNAL_ENGINES:
        return
    if not is_complete(folder, settings.shard_size, settings.num_samples):
        raise InputError(
            "a sharded base cannot generate text, got distill.engine="
            f"{settings.engine}; use one of {', '.join(EXTERNAL_ENGINES)}, or generate text with "
            "an unsharded specheads distill and set distill.folder to its folder"
        )


def write_text(
    job: Job, make: Callable[[Job], TextEngine] = engine_for
) -> Generator[WriterProgress, None, None]:
    """Generate the missing texts of a folder; yield the progress from time to time.

    `make` builds the engine, only if texts are missing.

    Raises:
        ValueError: The folder has text of other settings or damaged text, is locked by another run,
            or is not writable.
    """
    claim, size, total = job.claim(), job.settings.shard_size, job.settings.num_samples
    if is_claimed(job.folder, claim) and is_complete(job.folder, size, total):
        return
    # one lock per rank: the processes of a run write together, a second run finds the lock taken
    with sole_writer(job.folder, f".lock-{job.rank}"):
        claim_folder(job.folder, claim)
        share = {"rank": job.rank, "world_size": job.world_size}
        with closing(Shards(job.folder, size, total, **share)) as shards:
            scheduler = _Scheduler(shards, _rules(job))
            yield scheduler.written(0, 0.0)
            if shards.num_done < shards.num_texts:
                yield from _answered(make(job), scheduler)
                assert shards.num_done == shards.num_texts


def _answered(engine: TextEngine, scheduler: "_Scheduler") -> Generator[WriterProgress, None, None]:
    began = told = time.monotonic()
    tokens = 0
    with closing(cast(Generator[Answer, None, None], engine.answers(scheduler.pull))) as answers:
        for answer in answers:
            scheduler.take(answer)
            tokens += len(answer.tokens)
            if time.monotonic() - told >= TICK_SECONDS:
                yield scheduler.written(tokens, time.monotonic() - began)
                told = time.monotonic()
    yield scheduler.written(tokens, time.monotonic() - began)


def _rules(job: Job) -> GenerationRules:
    settings, base, is_chat = job.settings, job.base, job.prompts.conversations
    drop = settings.drop if settings.drop is not None else FAULTS if is_chat else ()
    return GenerationRules(
        prompts=job.prompts,
        sampling=sampling_of(job),
        new_tokens=settings.new_tokens,
        max_turns=settings.max_turns,
        max_length=base.max_length,
        # continuations always stop at the limit
        drop=tuple(one for one in drop if is_chat or one != "truncated"),
        min_tokens=settings.min_tokens,
        eos_ids=base.eos_ids,
        decode=decoder(base),
    )


def sampling_of(job: Job) -> Sampling:
    """Return the sampling settings of a job."""
    settings = job.settings
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=job.seed,
    )


class _Scheduler:
    """Selects the next request: the next turn of an answered text, else a new text."""

    def __init__(self, shards: Shards, rules: GenerationRules) -> None:
        self._shards, self._rules = shards, rules
        self._numbers = shards.missing()
        self._asked: dict[int, GeneratedText] = {}
        self._ready: deque[GeneratedText] = deque()
        self._num_dropped = 0

    def pull(self) -> GenerationRequest | None:
        """Return the next request; None if it depends on a pending answer."""
        while not self._ready:
            number = next(self._numbers, None)
            if number is None:
                return None
            text = GeneratedText(number, self._rules)
            for answer in self._shards.answers(number):
                text.take(answer)
            self._go_on(text)
        text = self._ready.popleft()
        request = text.request()
        self._asked[request.number] = text
        return request

    def take(self, answer: Answer) -> None:
        """Store an answer and prepare the next turn."""
        text = self._asked.pop(answer.number)
        self._shards.note(answer)
        text.take(answer)
        self._go_on(text)

    def written(self, tokens: int, seconds: float) -> WriterProgress:
        """Return the progress of this process."""
        return WriterProgress(self._shards.num_done, self._num_dropped, tokens, seconds)

    def _go_on(self, text: GeneratedText) -> None:
        if text.is_done:
            kept = text.kept()
            self._num_dropped += not kept.pieces
            self._shards.finish(kept)
        else:
            self._ready.append(text)


TRIAL_TOKENS = 32
"""New tokens per text in the trial."""


def with_drafter(job: Job) -> Job:
    """Return the job with or without a drafter, whichever is faster; the text is the same.

    `use_head=auto` times both on the first tokens of one batch. The drafter is a copy of the head.
    """
    settings, head = job.settings, job.head
    wanted = settings.use_head.lower()
    if head is None or wanted == "false" or settings.engine != "local":
        return replace(job, head=None)
    drafter = drafter_of(head, job.base)
    faster = wanted == "true" or _is_faster(job, drafter)
    return replace(job, head=drafter if faster else None)


def _is_faster(job: Job, head: Head) -> bool:
    most = max(1, job.base.max_length - TRIAL_TOKENS)
    firsts = (job.prompts.first(number)[:most] for number in range(job.settings.batch_size))
    prompts = [tokens for tokens in firsts if tokens]
    if not prompts:
        return False

    def rate(drafter: Head | None) -> float:
        began = time.perf_counter()
        sampling = each_prompt(sampling_of(job), len(prompts))
        new = min(TRIAL_TOKENS, job.settings.new_tokens)
        out = generate(job.base, drafter, prompts, max_new_tokens=new, sampling=sampling)
        return sum(map(len, out.tokens)) / (time.perf_counter() - began)

    for drafter in (None, head):
        # warm-up
        rate(drafter)
    return rate(head) > rate(None)


def write_folder(job: Job, bar: Progress, halt: Callable[[], None]) -> Report | None:
    """Generate the missing texts of a folder on all processes, and write the report.

    Args:
        job: Text to generate.
        bar: Progress display.
        halt: Called on all processes together from time to time; it raises to stop the generation.

    Returns:
        The report on the first process, None on the others.
    """
    task = bar.add_task("generated text", total=job.settings.num_samples, numbers="")
    latest: dict[int, WriterProgress] = {}
    with closing(write_text(job, _engine)) as writer:

        def go_on() -> WriterProgress | None:
            return next(writer, None)

        # processes that have finished their share wait for the others
        while True:
            gathered = on_all_processes(go_on)
            if not any(gathered):
                break
            latest |= {rank: one for rank, one in enumerate(gathered) if one}
            speed = _speed(latest)
            dropped = sum(one.dropped for one in latest.values())
            bar.update(
                task,
                completed=sum(one.texts for one in latest.values()),
                numbers=f"{speed or 0:,.0f} tokens/s  {dropped:,} dropped",
            )
            halt()
    # complete folders yield no progress
    bar.update(task, completed=job.settings.num_samples)
    if job.rank:
        return None
    speed = _speed(latest)
    report = report_of(job.folder, job.settings.num_samples, decoder(job.base), speed)
    if speed or not (job.folder / "report.md").is_file():
        write_report(job.folder, report)
    return report


def _speed(latest: dict[int, WriterProgress]) -> float | None:
    """Return the tokens per second of all processes; None if nothing was generated."""
    seconds = max((one.seconds for one in latest.values()), default=0.0)
    return sum(one.tokens for one in latest.values()) / seconds if seconds else None


def _engine(job: Job) -> TextEngine:
    return engine_for(with_drafter(job))


@naming_lost()
def write_recipe(
    settings: DistillCommand, base: FrozenBase | None = None, head: Head | None = None
) -> Report | None:
    """Generate the text of a recipe's distilled phase without training.

    Returns the report on the first process, None on the others.

    Raises:
        ValueError: As `write_text`, or settings are invalid.
    """
    distill = _distill_settings(settings, head)
    refuse_unreadable(settings.data)
    folder = writable_folder(settings.out)
    accelerator = accelerator_of_environment()
    if base is None:
        is_here = distill.engine not in EXTERNAL_ENGINES
        named = settings.base if is_here else replace(settings.base, device="cpu")
        base = load_base(asdict(named), accelerator)
        refuse_sharded(base, distill, folder)
    if head is None and settings.head_path:
        head = load_head(settings.head_path, base)
    prompts = prompt_source(settings.data, base, distill, settings.seed)
    job = Job(
        base=base,
        prompts=prompts,
        settings=distill,
        folder=folder,
        identity=identity_of(settings.data, base, base.fingerprint, prompts),
        seed=settings.seed,
        head=head,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    with progress(shown=accelerator.is_main_process) as bar:
        return write_folder(job, bar, lambda: None)


def _distill_settings(settings: DistillCommand, head: Head | None) -> Distill:
    """Return the settings of the distilled phase, after checks."""
    found = distilled(settings.schedule)
    if not settings.out:
        raise InputError("an output folder is needed, got none; add out=FOLDER")
    drafts = bool(settings.head_path) or head is not None
    if drafts and found.engine != "local":
        raise InputError(
            f"a head can draft with engine=local only, got engine={found.engine}; remove one"
        )
    return replace(found, use_head="true") if drafts else found
