"""The gate every export passes: read back by other code, does it draft what the run's head drafts?

A folder in the wrong shape is rarely an error in an engine: output stays lossless, acceptance
falls, and nothing is logged. So both sides draft from every position of text the base wrote
itself; logits must agree, and a chain's walk over the text must count the same integers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.decoding.trees import policies
from specheads.export.readers import BaseView, Guess, Reader
from specheads.heads.load import copy_of
from specheads.measure.counts import DepthCounts
from specheads.measure.replay import replay
from specheads.measure.results import Depth
from specheads.runs.progress import bar

TOLERANCE = 1e-4
"""Largest difference of two logits, as a share of the largest logit: rotary tables in float32."""

Text = tuple[list[int], list[int]]
"""A prompt, and what the base says after it, greedily."""


@dataclass(frozen=True, slots=True)
class Parity:
    """What the gate counted, the same for head and export."""

    per_depth: list[Depth]
    """Drafts offered and accepted at each depth of a chain."""
    tokens_per_forward: float
    largest_difference: float
    """Largest difference of two logits, as a share of the largest one."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the run's head drafts on one text."""

    text: Text
    view: BaseView
    guesses: list[Guess]


@torch.no_grad()
def expect(head: Head, base: FrozenBase, texts: Sequence[Text]) -> Iterator[Expected]:
    """Yield what an export of this head has to draft, a text at a time; in float64 on the CPU."""
    own, lent = copy_of(head).cpu(), tables(base)
    own.bind(*lent)
    own.double()
    for text in bar(texts, "drafts of head and export", shown=True):
        view = look(base, *text, *lent)
        yield Expected(text, view, guess(own, view))


@torch.no_grad()
def check(expected: Iterable[Expected], folder: Path, read: Reader) -> Parity:
    """Hold an export against the head it was made of; no tensor may be left over either."""
    counts: list[tuple[DepthCounts, DepthCounts]] = []
    differences: list[list[float]] = []
    for one in expected:
        theirs = list(read(folder, one.view, len(one.guesses)))
        counts.append((_walk(one.guesses, *one.text), _walk(theirs, *one.text)))
        pairs = zip(one.guesses, theirs, strict=True)
        differences.append([_difference(*pair, level) for level, pair in enumerate(pairs)])
    own_counts, other_counts = (
        DepthCounts.total(side, len(differences[0])) for side in zip(*counts, strict=True)
    )
    pairs = zip(own_counts.per_depth(), other_counts.per_depth(), strict=True)
    for depth, (own, other) in enumerate(pairs):
        if own != other:
            raise InputError(
                f"the export accepts {other.accepted} of {other.offered} drafts at depth "
                f"{depth}, the run {own.accepted} of {own.offered}; nothing was written"
            )
    worst = torch.tensor(differences).amax(0)
    for depth, difference in enumerate(worst.tolist()):
        # written so that not-a-number is refused too
        if not difference <= TOLERANCE:
            raise InputError(
                f"the export's logits at depth {depth} are {difference:.1e} of the largest one "
                f"away from the run's, rounding explains {TOLERANCE:.1e}; nothing was written"
            )
    return Parity(own_counts.per_depth(), own_counts.tokens_per_forward, worst.max().item())


def _walk(guesses: Sequence[Guess], prompt: list[int], continuation: list[int]) -> DepthCounts:
    return replay(hits(guesses, prompt, continuation), policies.chain(len(guesses)))


def tables(base: FrozenBase) -> tuple[Tensor, Tensor]:
    """Return the base's embedding and projection in float64 on the CPU."""
    return _wide(base.embedding), _wide(base.projection.scaled_weight)


def look(
    base: FrozenBase,
    prompt: list[int],
    continuation: list[int],
    embedding: Tensor,
    projection: Tensor,
) -> BaseView:
    """Return what an engine has of the base, whose `tables` are given, on one text."""
    tokens = torch.tensor([prompt + continuation])
    read = base.read(tokens.to(base.device), tuple(range(base.num_layers + 1)))
    assert read.aux is not None
    streams = tuple(_wide(read.aux[0]).split(base.width, dim=-1))
    return BaseView(streams, _wide(read.hidden[0]), tokens[0], embedding, projection)


def _wide(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def guess(head: Head, view: BaseView) -> list[Guess]:
    """Return what a head of ours says on a text, as a reader does of an export."""
    aux = (
        torch.cat([view.streams[layer] for layer in head.aux_layers], dim=-1)[None]
        if head.aux_layers
        else None
    )
    tokens = view.tokens[None]
    ids = head.to_tokens(torch.arange(head.drafted_size))
    states = head.states(Features(view.hidden[None], aux, tokens), tokens)
    return [
        Guess(head.logits(state[0], level), ids, head.confidence_logits(state[0]))
        for level, state in enumerate(states)
    ]


def hits(guesses: Sequence[Guess], prompt: list[int], continuation: list[int]) -> Tensor:
    """Return for each root and depth whether the best guess is what the base said: 0, else 1.

    As `measure.offline.guess_ranks` does: -1 stands for "beyond the text".
    """
    first, num_roots = len(prompt) - 1, len(continuation) - 1
    ranks = torch.full((num_roots, len(guesses)), -1)
    said = torch.tensor(continuation)
    for level, one in enumerate(guesses):
        num_known = max(num_roots - level, 0)
        best = one.ids[one.logits[first : first + num_known].argmax(-1)]
        ranks[:num_known, level] = (best != said[1 + level : 1 + level + num_known]).long()
    return ranks


def _difference(ours: Guess, theirs: Guess, level: int) -> float:
    """Return the largest difference of two logits, as a share of the largest logit.

    Rows whose answer lies beyond the text are left out.
    """
    if not torch.equal(ours.ids, theirs.ids):
        raise InputError(
            f"the export drafts other tokens than the run at depth {level}: {len(theirs.ids)} and "
            f"{len(ours.ids)} of them, or others; nothing was written"
        )
    known = len(ours.logits) - 2 - level
    pairs = [(ours.logits[:known], theirs.logits[:known])]
    if ours.confidence is not None and theirs.confidence is not None:
        pairs.append((ours.confidence[:known], theirs.confidence[:known]))
    apart = [(own - other).abs().max() / own.abs().max() for own, other in pairs]
    return torch.stack(apart).max().item()
