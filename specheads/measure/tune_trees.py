"""Texts to tune on, and candidate trees from the acceptance that is measured on them.

Trees are built from rank rates (Sequoia) and from the rank paths that the base's own text follows.
A chain may stop early, by a threshold on a probability that is learned from traces (Mamou et al.
2024, arXiv:2405.04304, DISCO). Acceptance is replayed exactly; step times are fitted.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt, held_out_prompts
from specheads.decoding.calibration import Curve, fit_curve, logistic_regression
from specheads.decoding.cost import StepCost
from specheads.decoding.prompt_lookup import MAX_NGRAM
from specheads.decoding.sampling import expand_sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate, entropy
from specheads.decoding.trees.tuned import MatchRates
from specheads.measure.counts import DepthCounts, number_sources
from specheads.measure.generation import GenerationSettings, continue_prompts
from specheads.measure.offline import LookupDraft, RankPath, anchor_mask, guess_ranks, replay
from specheads.runs.progress import progress_bar

WIDTH = 8
"""Largest number of children of a node."""
SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Node counts of candidate trees, root included; the largest size in the settings is added."""
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds that are tried for an early stop."""
LEAST_GAIN = 1.01
"""Gain over a chain without a stop below which the stop is not tried."""


# --- texts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TuningText:
    """A prompt with the base's continuation."""

    prompt: list[int]
    continuation: list[int]
    ranks: Tensor
    """Output of `guess_ranks` for the continuation."""
    source: str
    """Document that the prompt was cut from: see `GenerationSettings.sources`."""

    @property
    def text(self) -> tuple[list[int], list[int]]:
        """The prompt and its continuation."""
        return self.prompt, self.continuation


@dataclass(frozen=True, slots=True)
class TuningTexts:
    """Texts for steps at one context length."""

    context: int
    """Tokens of the rows whose steps are timed."""
    grown: Sequence[TuningText]
    """The half that trees are built from."""
    judged: Sequence[TuningText]
    """The half that trees are judged by; a single text serves both."""

    def rows(self, batch: int, first: int = 0) -> list[list[int]]:
        """Return `batch` rows of exactly `context` tokens, from judged text `first` on.

        A row ends in the middle of its continuation. If it is too short, other texts precede it.
        """
        texts = [one.prompt + one.continuation[: len(one.continuation) // 2] for one in self.judged]
        rows = []
        for place in range(first, first + batch):
            row = list[int]()
            while len(row) < self.context:
                row, place = texts[place % len(texts)] + row, place - 1
            rows.append(row[-self.context :])
        return rows


def validation_prompts(
    corpus: DataSettings, base: FrozenBase, length: int, number: int, *, longest: int, seed: int
) -> list[Prompt]:
    """Return whole validation prompts of about `length` tokens, and at most `longest`.

    Questions of users have any length, so the nearest of four times as many are taken: a truncated
    prompt has less to copy.
    """
    wanted = base.tokenizer_for("tuning"), length, 4 * number, seed
    try:
        found = held_out_prompts(corpus, "validation", *wanted)
    except InputError:
        # with few documents there may be no validation text, or none of this length
        found = held_out_prompts(corpus, "train", *wanted)
    found = [one for one in found if len(one.tokens) <= longest]
    if not found:
        raise InputError(
            f"a tree is chosen on prompts of at most {longest} tokens, got none; lower contexts or "
            "prompt_tokens, or choose other data"
        )
    return sorted(found, key=lambda one: abs(len(one.tokens) - length))[:number]


def write_texts(
    base: FrozenBase,
    head: Head,
    prompts: Sequence[Prompt],
    context: int,
    generation: GenerationSettings,
) -> TuningTexts:
    """Continue prompts with the base alone, and rank its tokens among the head's guesses.

    Texts of one source go to the same half.
    """
    tokens, sources = [one.tokens for one in prompts], [one.source for one in prompts]
    written = continue_prompts(base, tokens, replace(generation, batch_size=8))
    each = zip(tokens, written, expand_sampling(generation.sampling, len(tokens)), strict=True)
    ranks = [
        guess_ranks(base, head, *text, width=WIDTH, sampling=one, coupled=generation.coupled)
        for *text, one in progress_bar(list(each), "guesses", generation.progress)
    ]
    numbers = number_sources(sources)
    if not any(numbers):
        numbers = range(len(sources))
    texts = [*map(TuningText, tokens, written, ranks, sources)]
    grown, judged = (
        [text for text, number in zip(texts, numbers, strict=True) if number % 2 == half]
        for half in (0, 1)
    )
    return TuningTexts(context, grown, judged or grown)


# --- acceptance --------------------------------------------------------------------------------


def path_shares(ranks: Sequence[Tensor]) -> dict[RankPath, float]:
    """Return the share of positions that each rank path follows, by `guess_ranks` of `WIDTH`."""
    counts: Counter[RankPath] = Counter()
    rows = torch.cat(list(ranks)).tolist()
    for row in rows:
        guessed = takewhile(lambda rank: 0 <= rank < WIDTH, row)
        counts.update(accumulate((rank,) for rank in guessed))
    return {path: count / len(rows) for path, count in counts.items()}


def positional(shares: Mapping[RankPath, float], depth: int) -> list[float]:
    """Return how often each rank is the right one after a right token, at any depth."""
    reached = 1 + sum(share for path, share in shares.items() if len(path) < depth)
    # a head may have fewer guesses than WIDTH
    rates = [0.0] * (1 + max((path[-1] for path in shares), default=-1))
    for path, share in shares.items():
        rates[path[-1]] += share / reached
    return rates


def match_rates(copies: Sequence[Sequence[LookupDraft]], size: int) -> list[MatchRates]:
    """Return how often prompt lookup finds n-grams of each length, and is right then.

    The positions are the steps of a loop that copies `size` tokens and skips what it accepts.
    """
    steps, found = 0, [DepthCounts.zeros(size) for _ in range(MAX_NGRAM)]
    for one in copies:
        place = 0
        while place < len(one):
            right, length, matched = one[place]
            right = min(right, size)
            if matched:
                # tokens after the end of the text are unknown
                rejected = right < min(length, size, len(one) - place)
                found[matched - 1].add(right, drafted_beyond=rejected)
            steps += 1
            place += 1 + right
    return [
        MatchRates(
            share=one.forwards / max(steps, 1),
            rates=[a / max(b, 1) for a, b in zip(one.accepted, one.offered, strict=True)],
        )
        for one in found
    ]


# --- building trees ----------------------------------------------------------------------------


def most_followed(
    shares: Mapping[RankPath, float], rates: Sequence[float], size: int, depth: int
) -> list[RankPath]:
    """Return the paths that text follows most; unseen paths are ordered by positional rates.

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3.
    """

    def value(path: RankPath) -> float:
        return shares.get(path, 0.0) + 1e-9 * prod(rates[rank] for rank in path)

    return _likeliest(value, size, depth, len(rates))


def sequoia(rates: Sequence[float], size: int, depth: int) -> list[RankPath]:
    """Return the likeliest paths if the guess of each rank is right equally often after each node.

    Sequoia's dynamic programme finds the same expected tokens per forward.

    Source: Chen et al. 2024, arXiv:2402.12374, section 4.1.
    """
    return _likeliest(lambda path: prod(rates[rank] for rank in path), size, depth, len(rates))


def _likeliest(
    value: Callable[[RankPath], float], size: int, depth: int, width: int
) -> list[RankPath]:
    """Take the best path whose prefix was taken, until the tree has `size` nodes with the root."""
    pending: list[tuple[float, int, RankPath]] = []
    paths: list[RankPath] = [()]
    while len(paths) < size:
        if len(paths[-1]) < depth:
            for longer in [(*paths[-1], rank) for rank in range(width)]:
                heapq.heappush(pending, (-value(longer), len(longer), longer))
        if not pending:
            break
        paths.append(heapq.heappop(pending)[2])
    return paths[1:]


# --- prediction --------------------------------------------------------------------------------


def candidate_trees(ranks: Sequence[Tensor], depth: int, max_nodes: int) -> list[policies.Static]:
    """Return the chains, and trees of every size by paths and by rates.

    `ranks` come from `guess_ranks` with width `WIDTH`.
    """
    shares = path_shares(ranks)
    rates = positional(shares, depth)
    chains = [policies.chain(length) for length in range(1, min(depth, max_nodes - 1) + 1)]
    distinct = {chain.paths: chain for chain in chains}
    for size in [*(one for one in SIZES if one < max_nodes), max_nodes]:
        for paths in most_followed(shares, rates, size, depth), sequoia(rates, size, depth):
            tree = policies.Static(paths, "tree")
            distinct.setdefault(tree.paths, tree)
    return [tree for tree in distinct.values() if tree.depth]


def predict(
    tree: policies.Static, ranks: Sequence[Tensor], cost: StepCost, batch: int, context: int | float
) -> float:
    """Return the predicted speed-up of a tree: exact replay and the fitted step time.

    `ranks` must come from other texts than the tree, on which it looks too good.
    """
    counts = DepthCounts.total([replay(rows, tree) for rows in ranks], tree.depth)
    alone = cost.seconds(batch, context, 1, 0)
    seconds = cost.seconds(batch, context, tree.num_nodes, tree.depth)
    return counts.tokens_per_forward * alone / seconds


# --- chains that stop early --------------------------------------------------------------------


Trace = tuple[Tensor, Tensor, Tensor, Tensor]
"""Greedy drafts of a chain along one text, with axes (position, depth): their log probabilities,
the entropies, the head's probability that they are accepted, and whether the best guess is the
base's token, given the text before it."""


def trace_texts(
    base: FrozenBase, head: Head, texts: Iterable[tuple[list[int], list[int]]]
) -> list[Trace]:
    """Return the traces of prompts and their continuations, without those that are too short."""
    return [trace(base, head, *text) for text in texts if len(text[1]) > head.depth]


@torch.inference_mode()
def trace(base: FrozenBase, head: Head, prompt: list[int], continuation: list[int]) -> Trace:
    """Return the trace of a text from all positions whose drafts end within it."""
    text = torch.tensor([prompt + continuation], device=base.device)
    first, count = len(prompt) - 1, len(continuation) - head.depth
    features, anchors = base.read(text, head.aux_layers), anchor_mask(text, first, count)
    columns = []
    for level, state in enumerate(head.states(features, text, anchors)):
        logs = head.logits(state[0, first : first + count], level).double().log_softmax(-1)
        guess, labels = logs.max(-1), text[0, first + 2 + level :][:count]
        sure = head.confidence_logits(state[0, first : first + count])
        chances = guess.values.exp() if sure is None else sure.double().sigmoid()
        right = head.to_tokens(guess.indices) == labels
        columns.append((guess.values, entropy(logs), chances, right))
    log_probs, entropies, chances, right = map(
        partial(torch.stack, dim=1), zip(*columns, strict=True)
    )
    return log_probs.cpu(), entropies.cpu(), chances.cpu(), right.cpu()


def learn(traces: Sequence[Trace]) -> Estimate:
    """Fit a logistic regression: is a draft right, given that those above it are?"""
    log_probs, entropies, _, right = map(torch.cat, zip(*traces, strict=True))
    levels, reached = torch.arange(right.shape[1]).expand_as(log_probs), _reached(right)
    columns = [torch.ones_like(log_probs), log_probs, entropies, levels.double()]
    inputs, labels = torch.stack(columns, dim=-1)[reached], right[reached]
    bias, log_prob, weight, level = logistic_regression(inputs, labels, [0.0] * 4).tolist()
    return Estimate(bias=bias, log_prob=log_prob, entropy=weight, level=level)


def _reached(right: Tensor) -> Tensor:
    """Return which drafts have only right ones above them."""
    above = torch.ones_like(right)
    above[:, 1:] = right[:, :-1].cumprod(1).bool()
    return above


# --- calibration -------------------------------------------------------------------------------


def calibrate(grown: Sequence[Trace], judged: Sequence[Trace], depth: int) -> list[Curve]:
    """Return the calibration of each depth, fitted to some traces and judged on others.

    Empty if they reach some depth too rarely to measure it.
    """
    own, others = (draft_chances(some, depth) for some in (grown, judged))
    if not all(len(probs) for probs, _ in (*own, *others)):
        return []
    return [fit_curve(*one, *other) for one, other in zip(own, others, strict=True)]


Drafts = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""The head's probability that each draft is accepted, and whether it is."""


def draft_chances(traces: Sequence[Trace], depth: int) -> list[Drafts]:
    """Return the drafts of each depth of greedy chains, where those above are right."""
    if not traces:
        return [(np.empty(0), np.empty(0, dtype=bool))] * depth
    _, _, chances, right = map(torch.cat, zip(*traces, strict=True))
    above = _reached(right)
    return [
        (chances[above[:, level], level].numpy(), right[above[:, level], level].numpy())
        for level in range(depth)
    ]


def best_stop(
    traces: Sequence[Trace], estimate: Estimate, cost: StepCost, context: int | float
) -> policies.Static | None:
    """Return the chain with the threshold of most tokens per second; None for no threshold.

    Replay is exact: a chain that stops is a shorter chain.
    """
    depth = traces[0][-1].shape[1]
    seconds = [cost.seconds(1, context, drafted + 1, drafted) for drafted in range(depth + 1)]
    rates = dict.fromkeys((0.0, *THRESHOLDS), 0.0)
    known = [
        (
            estimate(log_probs, entropies, torch.arange(depth)),
            found.int().cumprod(1).sum(1).tolist(),
        )
        for log_probs, entropies, _, found in traces
    ]
    for confidence in rates:
        tokens, taken = 0, 0.0
        for chances, right in known:
            continues = (chances >= confidence)[:, :-1].int().cumprod(1).sum(1)
            lengths = (1 + continues).tolist()
            place = 0
            while place < len(lengths):
                accepted = min(right[place], lengths[place])
                taken += seconds[lengths[place]]
                tokens += accepted + 1
                place += accepted + 1
        rates[confidence] = tokens / taken
    confidence = max(rates, key=lambda one: rates[one])
    if rates[confidence] < LEAST_GAIN * rates[0.0]:
        return None
    paths = [(0,) * length for length in range(1, depth + 1)]
    return policies.Static(paths, "learned stop", confidence, estimate)
