"""The loop that has the base write: what is missing is asked, what is answered is kept."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from specheads.base.model import FrozenBase
from specheads.config import Distill
from specheads.config.schedule import FAULTS
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import sole_writer
from specheads.core.machine import dtype_name
from specheads.decoding.sampling import Sampling
from specheads.training.distill import engines
from specheads.training.distill.asks import Prompts
from specheads.training.distill.engine import Answer, Ask, Engine, Writing
from specheads.training.distill.shards import Shards, claim_folder, is_claimed, is_complete
from specheads.training.distill.texts import Rules, Text

ELSEWHERE = ("vllm", "openai")
"""Engines with weights of their own: here the base only says what it is."""

TICK_SECONDS = 0.25
"""How often the loop comes up for air, once answers have come."""

SAYS_NOTHING = {
    *("folder", "num_samples", "engine", "batch_size", "use_head"),
    *("url", "served_as", "api_key_env", "timeout_seconds", "retries"),
}
"""Settings that do not decide what a text says: each is drawn from a seed of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be written, by whom, and where it is kept."""

    base: FrozenBase
    """Author; tells what ends a text and how long it may be."""
    prompts: Prompts
    """What is asked."""
    settings: Distill
    """How it is answered, and what is kept."""
    folder: Path
    """Folder of the text, made if need be."""
    identity: dict[str, Any]
    """What else decides the text, by name: see `prompts.identity_of`."""
    seed: int = 0
    """Seed of the answers."""
    head: Head | None = None
    """Drafter, for an engine that can use one."""
    rank: int = 0
    """Number of this process."""
    world_size: int = 1
    """Number of processes that share the work."""

    def claim(self) -> dict[str, Any]:
        """Return all that decides the text, by name."""
        decisive = asdict(self.settings)
        for name in SAYS_NOTHING:
            del decisive[name]
        return self.identity | decisive | {"seed": self.seed}


@dataclass(frozen=True, slots=True)
class Written:
    """How far a process is."""

    texts: int
    """Its texts that are done, those of earlier calls and dropped ones included."""
    dropped: int
    """Texts dropped in this call."""
    tokens: int
    """Tokens that the base wrote for it in this call."""
    seconds: float
    """Since the engine was there."""


def engine_for(job: Job) -> Engine:
    """Make the engine that settings name."""
    settings, base = job.settings, job.base
    how = Writing(
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
    return engines.build(settings.engine, how)


def refuse_sharded(base: FrozenBase, settings: Distill, folder: Path) -> None:
    """Refuse to have a sharded base write: its processes would wait for those that are done."""
    if base.sharding is None or settings.engine in ELSEWHERE:
        return
    if not is_complete(folder, settings.shard_size, settings.num_samples):
        raise InputError(
            "a sharded base reads with all its processes at once, and each writes texts of its "
            f"own; set distill.engine to one of {', '.join(ELSEWHERE)}, or have the text written "
            "first by specheads distill, unsharded, and name its folder as distill.folder"
        )


def write_text(
    job: Job, make: Callable[[Job], Engine] = engine_for
) -> Generator[Written, None, None]:
    """Have the base write what a folder lacks; tell now and then how far it is.

    `make` makes the engine, where there is anything to be written.

    Raises:
        ValueError: The folder holds text that something else decided, or damaged text, or it is
            being written or cannot be.
    """
    claim, size, total = job.claim(), job.settings.shard_size, job.settings.num_samples
    if is_claimed(job.folder, claim) and is_complete(job.folder, size, total):
        return
    # one lock a process: those of a run write side by side, a second run finds the same ones held
    with sole_writer(job.folder, f".lock-{job.rank}"):
        claim_folder(job.folder, claim)
        share = {"rank": job.rank, "world_size": job.world_size}
        with closing(Shards(job.folder, size, total, **share)) as shards:
            asking = _Asking(shards, _rules(job))
            yield asking.written(0, 0.0)
            if shards.num_done < shards.num_texts:
                yield from _answered(make(job), asking)
                assert shards.num_done == shards.num_texts


def _answered(engine: Engine, asking: "_Asking") -> Generator[Written, None, None]:
    began = told = time.monotonic()
    tokens = 0
    with closing(cast(Generator[Answer, None, None], engine.answers(asking.pull))) as answers:
        for answer in answers:
            asking.take(answer)
            tokens += len(answer.tokens)
            if time.monotonic() - told >= TICK_SECONDS:
                yield asking.written(tokens, time.monotonic() - began)
                told = time.monotonic()
    yield asking.written(tokens, time.monotonic() - began)


def _rules(job: Job) -> Rules:
    settings, base, talks = job.settings, job.base, job.prompts.conversations
    drop = settings.drop if settings.drop is not None else FAULTS if talks else ()
    return Rules(
        prompts=job.prompts,
        sampling=sampling_of(job),
        new_tokens=settings.new_tokens,
        max_turns=settings.max_turns,
        max_length=base.max_length,
        # continued text is as long as was asked for: that is no fault of it
        drop=tuple(one for one in drop if talks or one != "truncated"),
        min_tokens=settings.min_tokens,
        eos_ids=base.eos_ids,
        decode=decoder(base),
    )


def sampling_of(job: Job) -> Sampling:
    """Return how the base's tokens are chosen."""
    settings = job.settings
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=job.seed,
    )


def decoder(base: FrozenBase) -> Callable[[list[int]], str]:
    """Return what gives the text of token ids, without special tokens."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        # nothing that a base without a tokenizer writes looks empty
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


class _Asking:
    """What is asked next: a text's next turn once its answer has come, else a new text."""

    def __init__(self, shards: Shards, rules: Rules) -> None:
        self._shards, self._rules = shards, rules
        self._numbers = shards.missing()
        self._asked: dict[int, Text] = {}
        self._ready: deque[Text] = deque()
        self._num_dropped = 0

    def pull(self) -> Ask | None:
        """Return what is asked next; None where nothing is until another answer has come."""
        while not self._ready:
            number = next(self._numbers, None)
            if number is None:
                return None
            text = Text(number, self._rules)
            for answer in self._shards.answers(number):
                text.take(answer)
            self._go_on(text)
        text = self._ready.popleft()
        ask = text.ask()
        self._asked[ask.number] = text
        return ask

    def take(self, answer: Answer) -> None:
        """Keep an answer, and go on from it."""
        text = self._asked.pop(answer.number)
        self._shards.note(answer)
        text.take(answer)
        self._go_on(text)

    def written(self, tokens: int, seconds: float) -> Written:
        """Return how far this process is, with so many tokens written in so many seconds."""
        return Written(self._shards.num_done, self._num_dropped, tokens, seconds)

    def _go_on(self, text: Text) -> None:
        if text.is_done:
            kept = text.kept()
            self._num_dropped += not kept.pieces
            self._shards.finish(kept)
        else:
            self._ready.append(text)
