"""Texts to tune on, and candidate trees from the acceptance that is measured on them.

Trees are built from rank rates (Sequoia) and from the rank paths that the base's own text follows.
A chain may stop early, by a threshold on a probability that is learned from traces (Mamou et al.
2024, arXiv:2405.04304, DISCO). Acceptance is replayed exactly; step times are fitted.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt, held_out_prompts
from specheads.decoding.calibration import (
    AcceptanceEstimate,
    Curve,
    entropy,
    fit_curve,
    logistic_regression,
)
from specheads.decoding.cost import StepCost
from specheads.decoding.sampling import expand_sampling
from specheads.decoding.suffix_decoding import MAX_MATCH
from specheads.decoding.trees import policies
from specheads.decoding.trees.policies import RankPath
from specheads.decoding.trees.tuned import MatchRates
from specheads.measure.counts import DepthCounts, number_sources
from specheads.measure.generation import GenerationSettings, continue_prompts
from specheads.measure.offline import LookupDraft, draft_states, guess_ranks, replay
from specheads.runs.progress import progress_bar

WIDTH = 8
"""Largest number of children of a node."""
SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Node counts of candidate trees, root included; the largest size in the settings is added."""
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds that are tried for an early stop."""
MIN_GAIN = 1.01
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
    def tokens(self) -> tuple[list[int], list[int]]:
        """The prompt and its continuation."""
        return self.prompt, self.continuation


@dataclass(frozen=True, slots=True)
class TuningTexts:
    """Texts for steps at one context length."""

    context: int
    """Tokens of the rows whose steps are timed."""
    fit_texts: Sequence[TuningText]
    """The half that trees are built from."""
    test_texts: Sequence[TuningText]
    """The half that trees are judged by; a single text serves both."""

    def rows(self, batch: int, first: int = 0) -> list[list[int]]:
        """Return `batch` rows of exactly `context` tokens, from test text `first` on.

        A row ends in the middle of its continuation. If it is too short, other texts precede it.
        """
        halves = [
            text.prompt + text.continuation[: len(text.continuation) // 2]
            for text in self.test_texts
        ]
        rows = []
        for index in range(first, first + batch):
            row = list[int]()
            while len(row) < self.context:
                row, index = halves[index % len(halves)] + row, index - 1
            rows.append(row[-self.context :])
        return rows


def validation_prompts(
    corpus: DataSettings,
    base: FrozenBase,
    length: int,
    num_prompts: int,
    *,
    longest: int,
    seed: int,
) -> list[Prompt]:
    """Return whole validation prompts of about `length` tokens, and at most `longest`.

    Questions of users have any length, so the nearest of four times as many are taken: a truncated
    prompt has less to copy.
    """
    request = base.tokenizer_for("tuning"), length, 4 * num_prompts, seed
    try:
        prompts = held_out_prompts(corpus, "validation", *request)
    except InputError:
        # with few documents there may be no validation text, or none of this length
        prompts = held_out_prompts(corpus, "train", *request)
    prompts = [prompt for prompt in prompts if len(prompt.tokens) <= longest]
    if not prompts:
        raise InputError(
            f"a tree is chosen on prompts of at most {longest} tokens, got none; lower contexts or "
            "prompt_tokens, or choose other data"
        )
    return sorted(prompts, key=lambda prompt: abs(len(prompt.tokens) - length))[:num_prompts]


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
    tokens = [prompt.tokens for prompt in prompts]
    sources = [prompt.source for prompt in prompts]
    continuations = continue_prompts(base, tokens, replace(generation, batch_size=8))
    samplings = expand_sampling(generation.sampling, len(tokens))
    rows = list(zip(tokens, continuations, samplings, strict=True))
    ranks = [
        guess_ranks(base, head, *text, width=WIDTH, sampling=seeded, coupled=generation.coupled)
        for *text, seeded in progress_bar(rows, "guesses", generation.progress)
    ]
    numbers = number_sources(sources)
    if not any(numbers):
        numbers = range(len(sources))
    texts = [*map(TuningText, tokens, continuations, ranks, sources)]
    fit_texts, test_texts = (
        [text for text, number in zip(texts, numbers, strict=True) if number % 2 == half]
        for half in (0, 1)
    )
    return TuningTexts(context, fit_texts, test_texts or fit_texts)


# --- acceptance --------------------------------------------------------------------------------


def path_shares(ranks: Sequence[Tensor]) -> dict[RankPath, float]:
    """Return the share of positions that each rank path follows, by `guess_ranks` of `WIDTH`."""
    counts: Counter[RankPath] = Counter()
    rows = torch.cat(list(ranks)).tolist()
    for row in rows:
        guesses = takewhile(lambda rank: 0 <= rank < WIDTH, row)
        counts.update(accumulate((rank,) for rank in guesses))
    return {path: count / len(rows) for path, count in counts.items()}


def rank_rates(shares: Mapping[RankPath, float], depth: int) -> list[float]:
    """Return how often each rank is the right one after a right token, at any depth."""
    reached = 1 + sum(share for path, share in shares.items() if len(path) < depth)
    # a head may have fewer guesses than WIDTH
    rates = [0.0] * (1 + max((path[-1] for path in shares), default=-1))
    for path, share in shares.items():
        rates[path[-1]] += share / reached
    return rates


def match_rates(texts: Sequence[Sequence[LookupDraft]], size: int) -> list[MatchRates]:
    """Return how often prompt lookup finds n-grams of each length, and is right then.

    The positions are the steps of a loop that copies `size` tokens and skips what it accepts.
    """
    num_steps, counts = 0, [DepthCounts.zeros(size) for _ in range(MAX_MATCH)]
    for drafts in texts:
        root = 0
        while root < len(drafts):
            draft = drafts[root]
            num_right = min(draft.num_right, size)
            if draft.ngram:
                # tokens after the end of the text are unknown
                is_rejected = num_right < min(draft.num_tokens, size, len(drafts) - root)
                counts[draft.ngram - 1].add(num_right, drafted_beyond=is_rejected)
            num_steps += 1
            root += 1 + num_right
    return [
        MatchRates(
            share=ngram.forwards / max(num_steps, 1),
            rates=[a / max(b, 1) for a, b in zip(ngram.accepted, ngram.offered, strict=True)],
        )
        for ngram in counts
    ]


# --- building trees ----------------------------------------------------------------------------


def best_paths(
    shares: Mapping[RankPath, float], rates: Sequence[float], size: int, depth: int
) -> list[RankPath]:
    """Return the paths of the best tree of `size` nodes, root included.

    They are those that text follows most (Medusa); paths that no text follows are ordered as if the
    guess of each rank were right at its rate after each node. Without shares all paths are: the
    tree has as many expected tokens as that of Sequoia's dynamic programme.

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3; Chen et al. 2024, arXiv:2402.12374,
    section 4.1.
    """
    pending: list[tuple[float, int, RankPath]] = []
    paths: list[RankPath] = [()]
    # take the best path whose prefix was taken
    while len(paths) < size:
        if len(paths[-1]) < depth:
            for path in [(*paths[-1], rank) for rank in range(len(rates))]:
                value = shares.get(path, 0.0) + 1e-9 * prod(rates[rank] for rank in path)
                heapq.heappush(pending, (-value, len(path), path))
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
    rates = rank_rates(shares, depth)
    chains = [policies.chain(length) for length in range(1, min(depth, max_nodes - 1) + 1)]
    distinct = {chain.paths: chain for chain in chains}
    for size in [*(size for size in SIZES if size < max_nodes), max_nodes]:
        for weights in shares, {}:
            tree = policies.Static(best_paths(weights, rates, size, depth), "tree")
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


class Trace(NamedTuple):
    """Greedy drafts of a chain along texts: tensors with axes (position, depth)."""

    log_probs: Tensor
    entropies: Tensor
    probs: Tensor
    """The head's probability that each draft is accepted."""
    is_right: Tensor
    """Whether the best guess is the base's token, given the text before it."""

    @classmethod
    def join(cls, traces: Sequence["Trace"]) -> "Trace":
        """Return the positions of all traces."""
        return cls(*map(torch.cat, zip(*traces, strict=True)))

    def reached(self) -> Tensor:
        """Return which drafts have only right ones above them."""
        reached = torch.ones_like(self.is_right)
        reached[:, 1:] = self.is_right[:, :-1].cumprod(1).bool()
        return reached


def trace_texts(
    base: FrozenBase, head: Head, texts: Iterable[tuple[list[int], list[int]]]
) -> list[Trace]:
    """Return the traces of prompts and their continuations, without those that are too short."""
    return [trace_text(base, head, *text) for text in texts if len(text[1]) > head.depth]


@torch.inference_mode()
def trace_text(base: FrozenBase, head: Head, prompt: list[int], continuation: list[int]) -> Trace:
    """Return the trace of a text from all positions whose drafts end within it."""
    text = torch.tensor([prompt + continuation], device=base.device)
    count, columns = len(continuation) - head.depth, []
    for level, level_states in enumerate(draft_states(base, head, text, len(prompt))):
        states = level_states[:count]
        log_probs = head.logits(states, level).double().log_softmax(-1)
        best, labels = log_probs.max(-1), text[0, len(prompt) + 1 + level :][:count]
        confidence = head.confidence_logits(states)
        probs = best.values.exp() if confidence is None else confidence.double().sigmoid()
        is_right = head.to_tokens(best.indices) == labels
        columns.append((best.values, entropy(log_probs), probs, is_right))
    return Trace(*(torch.stack(levels, dim=1).cpu() for levels in zip(*columns, strict=True)))


def fit_estimate(traces: Sequence[Trace]) -> AcceptanceEstimate:
    """Fit a logistic regression: is a draft right, given that those above it are?"""
    trace = Trace.join(traces)
    levels, reached = torch.arange(trace.is_right.shape[1]), trace.reached()
    ones = torch.ones_like(trace.log_probs)
    columns = [ones, trace.log_probs, trace.entropies, levels.expand_as(ones).double()]
    inputs, labels = torch.stack(columns, dim=-1)[reached], trace.is_right[reached]
    bias, log_prob, weight, level = logistic_regression(inputs, labels, [0.0] * 4).tolist()
    return AcceptanceEstimate(bias=bias, log_prob=log_prob, entropy=weight, level=level)


def best_stop(
    traces: Sequence[Trace], cost: StepCost, context: int | float
) -> policies.Static | None:
    """Return the chain with the threshold of most tokens per second; None for no threshold.

    Replay is exact: a chain that stops is a shorter chain.
    """
    depth, estimate = traces[0].is_right.shape[1], fit_estimate(traces)
    seconds = [cost.seconds(1, context, level + 1, level) for level in range(depth + 1)]
    rates = dict.fromkeys((0.0, *THRESHOLDS), 0.0)
    rows = [
        (
            estimate(trace.log_probs, trace.entropies, torch.arange(depth)),
            trace.is_right.int().cumprod(1).sum(1).tolist(),
        )
        for trace in traces
    ]
    for confidence in rates:
        num_tokens, total_seconds = 0, 0.0
        for probs, num_right in rows:
            continues = (probs >= confidence)[:, :-1].int().cumprod(1).sum(1)
            lengths = (1 + continues).tolist()
            position = 0
            while position < len(lengths):
                accepted = min(num_right[position], lengths[position])
                total_seconds += seconds[lengths[position]]
                num_tokens += accepted + 1
                position += accepted + 1
        rates[confidence] = num_tokens / total_seconds
    confidence = max(rates, key=lambda threshold: rates[threshold])
    if rates[confidence] < MIN_GAIN * rates[0.0]:
        return None
    paths = [(0,) * length for length in range(1, depth + 1)]
    return policies.Static(paths, "learned stop", confidence, estimate)


# --- calibration -------------------------------------------------------------------------------

DraftChances = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""The head's probability that each draft is accepted, and whether it is."""


def draft_chances(traces: Sequence[Trace]) -> list[DraftChances]:
    """Return the drafts of each depth of greedy chains, where those above are right."""
    trace = Trace.join(traces)
    reached = trace.reached()
    return [
        (probs[rows].numpy(), is_right[rows].numpy())
        for probs, is_right, rows in zip(trace.probs.T, trace.is_right.T, reached.T, strict=True)
    ]


def calibrate(fit_traces: Sequence[Trace], test_traces: Sequence[Trace]) -> list[Curve]:
    """Return the calibration of each depth, fitted to some traces and judged on others.

    Empty if they reach some depth too rarely to measure it.
    """
    if not fit_traces or not test_traces:
        return []
    fit, test = draft_chances(fit_traces), draft_chances(test_traces)
    if not all(len(probs) for probs, _ in (*fit, *test)):
        return []
    return [fit_curve(*a, *b) for a, b in zip(fit, test, strict=True)]
