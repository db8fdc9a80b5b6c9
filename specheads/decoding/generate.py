"""Decoding of whole prompts: the engine, submitted to once and run to its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool
from specheads.core.bounds import whole
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.decoding import accept
from specheads.decoding.engine import Engine
from specheads.decoding.loop import DecodingStep
from specheads.decoding.request import Request, read_prompts
from specheads.decoding.sampling import Sampling, each_prompt
from specheads.decoding.trees import policies

Prompts = Any
"""A list of prompts, or a two-dimensional tensor: see `decoding.request`."""


@dataclass(slots=True)
class Decoding:
    """What `generate` returns; every list has one entry a prompt."""

    tokens: list[list[int]]
    """The new tokens, cut at the limit and after the first end-of-text token."""
    forwards: list[int]
    """Base forwards each prompt took, prefill excluded."""
    steps: list[list[DecodingStep]] = field(default_factory=list)
    """The same forwards one by one: what each drafted, accepted and took."""


def generate(
    base: FrozenBase,
    head: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    tree: policies.TreePolicy | None = None,
    acceptance: str | accept.AcceptanceRule = "match",
    stop_at_eos: bool = True,
    max_batch: int | None = None,
    pool: BlockPool | None = None,
    coupled: bool = True,
    timed: bool = False,
) -> Decoding:
    """Decode prompts, several tokens a forward where the head's guesses are right.

    With the rule `match` the output is that of the base alone, token for token, at every
    temperature (up to ties in rounding: see docs/losslessness.md); with `rejection` it has the
    same distribution; with `typical` it has not, above temperature zero.

    Args:
        base: The model that decides.
        head: The drafter that guesses; None decodes with the base alone, in the same loop.
        prompts: Token ids of each, a list or a tensor; none may be empty.
        max_new_tokens: Limit for each prompt.
        sampling: How tokens are chosen, for all prompts or for each; None is greedily. One object
            gives each prompt a seed of its own that follows from its.
        tree: How drafts grow; None is what `specheads tune` chose for the head, where it was
            measured on such a machine (not to draft may be best), or a chain as deep as the head.
        acceptance: What is kept of a verified tree: "match", "rejection", "typical", or a function
            like those in `specheads.decoding.accept`.
        stop_at_eos: Whether the base's end-of-text token ends a row.
        max_batch: Rows decoded together; further prompts wait until one is done. None is all.
        pool: Where keys and values lie, `base.pool(num_blocks)`; where it is full, prompts wait.
            None is contiguous rows.
        coupled: Whether drafts see the noise that the base draws with, which follows from seed and
            position. Above temperature zero more guesses are right then; the output is the same.
        timed: Whether steps wait for the device so that their times are true there too.

    Raises:
        ValueError: A prompt is empty or no token ids, or prompt and new tokens exceed the context,
            the pool or the memory, or a setting lies outside its range.
    """
    prompts = read_prompts(base, prompts)
    each = each_prompt(sampling, len(prompts))
    refuse_unfit(base, prompts, max_new_tokens)
    engine = Engine(
        base,
        head,
        tree=tree,
        acceptance=acceptance,
        max_batch=max(len(prompts), 1) if max_batch is None else max_batch,
        max_length=max(map(len, prompts), default=0) + max_new_tokens,
        pool=pool,
        coupled=coupled,
        timed=timed,
    )
    eos_ids = None if stop_at_eos else ()
    streams = [
        engine.submit(
            Request(prompt=prompt, max_new_tokens=max_new_tokens, sampling=one, eos_ids=eos_ids)
        )
        for prompt, one in zip(prompts, each, strict=True)
    ]
    try:
        engine.run()
    finally:
        # whatever was raised, the pool gets everything back; where all is done, this is nothing
        for stream in streams:
            stream.cancel()
    return Decoding(
        [stream.tokens for stream in streams],
        [len(stream.steps) for stream in streams],
        [stream.steps for stream in streams],
    )


def refuse_unfit(base: FrozenBase, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Refuse empty prompts, and those for whose new tokens the context has no room."""
    if empty := [place for place, prompt in enumerate(prompts) if not prompt]:
        raise InputError(f"a prompt needs at least one token; prompt {empty[0]} has none")
    longest = max(map(len, prompts), default=0)
    max_new_tokens = whole(max_new_tokens, "max_new_tokens")
    if longest + max_new_tokens > base.max_length:
        raise InputError(
            f"prompt and new tokens must fit the context: {longest} + {max_new_tokens} exceed "
            f"{base.max_length}; shorten the prompt or max_new_tokens"
        )
