"""Pick the tree by measurement: what each shape would give, against what a step of it costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.decoding.acceptance.sampling import each_prompt
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts
from specheads.measure.how import How
from specheads.measure.offline import guess_ranks, replay
from specheads.measure.online import write_alone
from specheads.measure.results import Candidate
from specheads.measure.tune.acceptance import WIDTH, followed
from specheads.measure.tune.cost import time_ways
from specheads.runs.progress import bar

Timer = Callable[[Sequence[policies.TreePolicy]], list[float]]
"""Seconds of one decode step with each policy, in order."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tree that decodes fastest on this machine, and what it was chosen among."""

    tree: policies.Static
    table: list[Candidate]
    """One row a candidate; the first is the base alone, for comparison only."""


def pick_tree(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    *,
    how: How,
    timer: Timer | None = None,
) -> Choice:
    """Choose the chain or static tree with the most tokens per second.

    Candidates are chains of every depth and one tree a size, grown from how often the base's
    own text follows each rank path. Tokens per forward come from exact replay, step times from
    real steps. Every other prompt grows the trees and the rest judge them, because a tree looks
    too good on the very text it was grown from; a single prompt does both. Prompts are training
    or validation text: never those of the evaluation. Without a timer step times are measured
    here and now. Text, guesses and steps are those at the temperature asked for, and with the noise
    that drafts see there; tree, rule and batch of `how` count for nothing.

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3, with joint counts in place of
    products of per-depth accuracies, which are too low where difficulty comes in bursts.
    """
    if not prompts:
        raise InputError(
            "picking a tree needs prompts to measure on, got none; lower evaluation.prompt_tokens, "
            "raise evaluation.tune_prompts above 0, or give longer documents"
        )
    ranks = write_ranks(base, head, prompts, how)
    grown, judged = ranks[::2], ranks[1::2] or ranks
    candidates = propose(grown, head.depth, sizes=(4, 6, 8, 12, 16))
    timer = timer or partial(time_steps, base, head, prompts, how=how)
    base_seconds, *seconds = timer([policies.NOTHING, *candidates])
    table = [_row(policies.NOTHING, 1.0, 1.0)]
    for tree, step in zip(candidates, seconds, strict=True):
        counts = [replay(rows, tree) for rows in judged]
        tokens = DepthCounts.total(counts, tree.depth).tokens_per_forward
        table.append(_row(tree, tokens, step / base_seconds))
    best = max(range(len(candidates)), key=lambda place: table[place + 1].speedup)
    table[best + 1] = replace(table[best + 1], chosen=True)
    return Choice(candidates[best], table)


def write_ranks(base: FrozenBase, head: Head, prompts: list[list[int]], how: How) -> list[Tensor]:
    """Have the base continue prompts; return the ranks of what it says among the head's guesses."""
    texts = write_alone(base, prompts, replace(how, batch_size=8))
    each = each_prompt(how.sampling, len(prompts))
    return [
        guess_ranks(base, head, *text, width=WIDTH, sampling=one, coupled=how.coupled)
        for *text, one in bar(list(zip(prompts, texts, each, strict=True)), "guesses", how.progress)
    ]


def _row(tree: policies.Static, tokens_per_forward: float, step_overhead: float) -> Candidate:
    return Candidate(
        tree=tree.name,
        num_nodes=tree.num_nodes,
        depth=tree.depth,
        tokens_per_forward=tokens_per_forward,
        step_overhead=step_overhead,
        speedup=tokens_per_forward / step_overhead,
        paths=[list(path) for path in tree.paths],
    )


def propose(ranks: list[Tensor], depth: int, sizes: Sequence[int]) -> list[policies.Static]:
    """Return the chains of depth 1 to `depth` and the best tree of each size, root included.

    Ranks are those of texts, by `guess_ranks` with width `WIDTH`. A size that the text never
    fills gives the largest tree it does fill; none is proposed twice.
    """
    chains = [policies.chain(length) for length in range(1, depth + 1)]
    known = {tree.paths for tree in chains}
    trees = []
    # the most frequent paths are a tree, since none is more frequent than its beginning, and no
    # other tree of that size is followed further on this text
    counts = followed(ranks)
    ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    for size in sizes:
        tree = policies.Static(ordered[: size - 1], name="static")
        if ordered and tree.paths not in known:
            known.add(tree.paths)
            trees.append(tree)
    return chains + trees


def time_steps(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    trees: Sequence[policies.TreePolicy],
    *,
    how: How,
    rounds: int = 12,
) -> list[float]:
    """Return the seconds of a real decode step with each tree: see `time_ways`.

    All continue the first prompt. `policies.NOTHING` steps with the base alone.
    """
    ways = [(head if tree.depth else None, tree) for tree in trees]
    return [one.seconds for one in time_ways(base, ways, prompts[:1], how=how, rounds=rounds)]
