"""Decode a list of prompts to their end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError, require_integer
from specheads.decoding import accept
from specheads.decoding.engine import Engine
from specheads.decoding.loop import NO_LEDGER, DecodingStep, StepLedger
from specheads.decoding.request import Request, token_ids
from specheads.decoding.sampling import Sampling, expand_sampling
from specheads.decoding.suffix_decoding import SuffixAutomaton
from specheads.decoding.trees import policies


@dataclass(slots=True)
class Decoding:
    """Result of `generate`; every list has one entry per prompt."""

    tokens: list[list[int]]
    """New tokens, up to the limit or the first end-of-text token."""
    forwards: list[int]
    """Number of base forwards per prompt, without the prefill."""
    steps: list[list[DecodingStep]] = field(default_factory=list)
    """These forwards one by one: drafted and accepted nodes and times."""


def generate(
    base: FrozenBase,
    head: Drafter | None,
    prompts: Any,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    tree: policies.TreePolicy | None = None,
    acceptance: str | accept.AcceptanceRule = "match",
    stop_at_eos: bool = True,
    eos_ids: tuple[int, ...] | None = None,
    max_batch: int | None = None,
    pool: BlockPool | None = None,
    coupled: bool = True,
    ledger: StepLedger = NO_LEDGER,
    memory: SuffixAutomaton | None = None,
) -> Decoding:
    """Decode prompts with speculative decoding: several tokens per base forward.

    With the rule `match` the output is that of the base alone, token for token, at every
    temperature (except for ties in rounding: see docs/losslessness.md). With `rejection` it has the
    same distribution. With `typical` above temperature zero it does not.

    Args:
        base: The model whose output is decoded.
        head: The drafter; None decodes with the base alone, in the same loop.
        prompts: Token ids of every prompt, as lists or a two-dimensional tensor; none is empty.
        max_new_tokens: Limit of each prompt.
        sampling: Sampling of all prompts or a list with one per prompt; None is greedy. From one
            object each prompt gets its own seed.
        tree: Tree policy. None is the tree that `specheads tune` chose for the head on such a
            machine, which may be not to draft, or else a chain as deep as the head.
        acceptance: Rule: "match", "rejection", "typical", or a function like those in `accept.py`.
        stop_at_eos: Whether an end-of-text token ends a row.
        eos_ids: End-of-text tokens; None is the base's.
        max_batch: Rows decoded together; further prompts wait. None is all.
        pool: Blocks for keys and values, from `base.pool(num_blocks)`; None is contiguous rows.
        coupled: Whether drafts see the noise that the base samples with. More drafts are accepted
            above temperature zero; the output is the same.
        ledger: Adds up the seconds of the parts of all steps: see `StepLedger`.
        memory: As for `Engine`: text of earlier requests to copy from.

    Raises:
        ValueError: A prompt is no token ids or too long for the context, the pool or the memory, or
            a setting is out of range.
    """
    if not hasattr(prompts, "__len__") or isinstance(prompts, Mapping):
        raise InputError(f"prompts must be a list of lists of token ids, got {prompts!r:.60}")
    prompts = [token_ids(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    samplings = expand_sampling(sampling, len(prompts))
    longest = max(map(len, prompts), default=0)
    max_new_tokens = require_integer(max_new_tokens, "max_new_tokens")
    if longest + max_new_tokens > base.max_length:
        raise InputError(
            f"prompt and new tokens must fit the context: {longest} + {max_new_tokens} exceed "
            f"{base.max_length}; shorten the prompt or max_new_tokens"
        )
    engine = Engine(
        base,
        head,
        tree=tree,
        acceptance=acceptance,
        max_batch=max(len(prompts), 1) if max_batch is None else max_batch,
        max_length=longest + max_new_tokens,
        pool=pool,
        coupled=coupled,
        ledger=ledger,
        memory=memory,
    )
    limits: Any = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids if stop_at_eos else ()}
    streams = [
        engine.submit(Request(prompt=prompt, sampling=settings, **limits))
        for prompt, settings in zip(prompts, samplings, strict=True)
    ]
    try:
        engine.run()
    finally:
        # after an error the pool gets its blocks back; this does nothing if all are done
        for stream in streams:
            stream.cancel()
    steps = [stream.steps for stream in streams]
    return Decoding([stream.tokens for stream in streams], list(map(len, steps)), steps)
