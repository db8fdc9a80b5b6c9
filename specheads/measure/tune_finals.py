"""Time the best methods by prediction, and choose the fastest.

Among them are chains that stop early, by a threshold on a probability: the head's own, or one
learned from traces (Mamou et al. 2024, arXiv:2405.04304, DISCO).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Head
from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate, entropy
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.tuned import Tried, TunedTree
from specheads.measure.counts import DepthCounts, rate
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.measure.offline import anchor_mask, fixed_tree, replay_texts
from specheads.measure.tune_cost import TreeMethod, time_steps
from specheads.measure.tune_texts import TuningText, TuningTexts
from specheads.measure.tune_trees import predict
from specheads.runs.progress import bar

COPIED = (4, 10)
"""Numbers of prompt-lookup nodes that are tried next to the head's tree."""

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds that are tried for an early stop."""

LEAST_GAIN = 1.01
"""Gain over a chain without a stop below which the stop is not tried."""


def finalists(
    head: Head,
    texts: TuningTexts,
    trees: Sequence[policies.Static],
    cost: StepCost,
    batch: int,
    max_nodes: int,
    stops: Sequence[policies.TreePolicy] | None,
) -> list[policies.TreePolicy]:
    """Return the trees to time at a batch size.

    These are the best of the trees by prediction, two of another size and the best chain, and
    unless `stops` is None a best-first tree about as large and the chains that stop early. Tree,
    chain and best-first tree are also tried with prompt-lookup tokens.
    """
    ranks = [one.ranks for one in texts.judged]
    speedups = {tree: predict(tree, ranks, cost, batch, texts.context) for tree in trees}
    ordered = sorted(trees, key=lambda tree: -speedups[tree])
    first, chain = ordered[0], next(tree for tree in ordered if tree.name == "chain")
    others = [tree for tree in ordered if abs(tree.num_nodes - first.num_nodes) > 1]
    plain: list[policies.TreePolicy] = [first, chain]
    branch = min(4, head.drafted_size or 4)
    if stops is not None and branch > 1:
        most = min(max_nodes, 1 + branch + (head.depth - 1) * 4 * branch)
        nodes = min(max(first.num_nodes, head.depth + 3), most)
        plain.append(policies.BestFirst(nodes, head.depth, 4, branch))
    joined = [HybridTree(tree, size) for tree in dict.fromkeys(plain) for size in COPIED]
    short = [tree for tree in stops or () if tree.num_nodes <= max_nodes]
    return [*dict.fromkeys([*plain, *others[:2], *short, *joined])]


def time_finals(
    base: FrozenBase,
    head: Head,
    trees: Sequence[policies.TreePolicy],
    texts: TuningTexts,
    batch: int,
    generation: GenerationSettings,
    rounds: int,
) -> tuple[list[Tried], TunedTree]:
    """Time trees and the base alone, count tokens on held-out texts; return all and the fastest."""
    methods: list[TreeMethod] = [(None, policies.NOTHING), *((head, tree) for tree in trees)]
    # steps with prompt-lookup tokens take longer, and their number differs from text to text
    turns, points = max(1, rounds // batch), []
    for turn in bar(range(turns), "step times", generation.progress):
        rows = [texts.rows(batch, turn * batch)] * len(methods)
        quiet = replace(generation, progress=False)
        points.append(time_steps(base, methods, rows, generation=quiet, rounds=rounds // turns))
    seconds = [fmean(one.seconds for one in column) for column in zip(*points, strict=True)]
    tried: list[Tried] = []
    rates: dict[policies.TreePolicy, list[float]] = {}
    for (drafter, tree), step in zip(methods, seconds, strict=True):
        overhead, tokens, interval = step / seconds[0], 1.0, list[float]()
        if drafter is not None:
            each = _counts(base, drafter, tree, texts.judged, generation)
            counts = DepthCounts.total(each, tree.depth)
            tokens, rates[tree] = counts.tokens_per_forward, counts.levels()
            interval = [bound / overhead for bound in rate(each).interval]
        tried.append(
            Tried(
                batch=batch,
                context=texts.context,
                tree=tree.name,
                num_nodes=tree.num_nodes,
                depth=tree.depth,
                tokens_per_forward=tokens,
                step_overhead=overhead,
                speedup=tokens / overhead,
                interval=interval,
            )
        )
    fastest = max(range(len(tried)), key=lambda place: tried[place].speedup)
    tried[fastest] = replace(tried[fastest], chosen=True)
    tree = methods[fastest][1]
    return tried, _tuned_tree(tried[fastest], tree, rates.get(own_tree(tree), []))


def _counts(
    base: FrozenBase,
    head: Drafter,
    tree: policies.TreePolicy,
    texts: Sequence[TuningText],
    generation: GenerationSettings,
) -> list[DepthCounts]:
    """Return the counts of each text: by replay if the tree is fixed, else decoded."""
    sources = tuple(one.source for one in texts)
    if fixed_tree(tree) is not None:
        pairs = [(one.prompt, one.continuation) for one in texts]
        return replay_texts(base, tree, [one.ranks for one in texts], pairs, sources)
    generation = replace(generation, tree=tree, batch_size=8, sources=sources)
    decoded = decode_prompts(base, head, [one.prompt for one in texts], generation)
    return [one.counts for one in decoded]


def _tuned_tree(row: Tried, tree: policies.TreePolicy, rates: list[float]) -> TunedTree:
    """Return a tree as tuned.json stores it."""
    own = own_tree(tree)
    chosen = TunedTree(
        batch=row.batch,
        context=row.context,
        tokens_per_forward=row.tokens_per_forward,
        predicted_speedup=row.speedup,
        interval=row.interval,
        kind="static" if own.depth else "none",
        num_nodes=own.num_nodes,
        depth=own.depth,
        copied=tree.size if isinstance(tree, HybridTree) else 0,
        rates=rates,
    )
    if isinstance(own, policies.BestFirst):
        return replace(chosen, kind="best_first", beam=own.beam, branch=own.branch)
    assert isinstance(own, policies.Static)
    paths = [list(path) for path in own.paths]
    return replace(chosen, paths=paths, confidence=own.confidence, stop=own.estimate)


# --- chains that stop early --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy drafts of a chain along one text, with axes (position, depth)."""

    log_probs: Tensor
    entropies: Tensor
    right: Tensor
    """Whether the best guess is the base's token, given the text before it."""


def stopping_chains(
    base: FrozenBase, head: Head, texts: Sequence[TuningText], cost: StepCost, context: int
) -> list[policies.TreePolicy]:
    """Return chains that stop by the head's own and by a learned probability, if that pays."""
    traces = [
        trace(base, head, one.prompt, one.continuation)
        for one in texts
        if len(one.continuation) > head.depth
    ]
    if not traces:
        return []
    found = [best_stop(traces, one, cost, context) for one in (None, learn(traces))]
    return [one for one in found if one]


@torch.inference_mode()
def trace(base: FrozenBase, head: Head, prompt: list[int], continuation: list[int]) -> Trace:
    """Return the trace of a text from all positions whose drafts lie within it."""
    text = torch.tensor([prompt + continuation], device=base.device)
    first, count = len(prompt) - 1, len(continuation) - head.depth
    features, anchors = base.read(text, head.aux_layers), anchor_mask(text, first, count)
    columns = []
    for level, state in enumerate(head.states(features, text, anchors)):
        logs = head.logits(state[0, first : first + count], level).double().log_softmax(-1)
        guess, labels = logs.max(-1), text[0, first + 2 + level :][:count]
        columns.append((guess.values, entropy(logs), head.to_tokens(guess.indices) == labels))
    return Trace(*(torch.stack(one, dim=1).cpu() for one in zip(*columns, strict=True)))


def learn(traces: Sequence[Trace]) -> Estimate:
    """Fit a logistic regression: is a draft right, given that those above it are?"""
    log_probs, entropies, right = (
        torch.cat([getattr(one, name) for one in traces])
        for name in ("log_probs", "entropies", "right")
    )
    levels = torch.arange(right.shape[1]).expand_as(log_probs)
    reached = torch.ones_like(right)
    reached[:, 1:] = right[:, :-1].cumprod(1).bool()
    columns = [torch.ones_like(log_probs), log_probs, entropies, levels.double()]
    inputs, labels = torch.stack(columns, dim=-1)[reached], right[reached].double()
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(inputs @ weights, labels, reduction="sum")
        # the ridge keeps weights finite for traces without a mistake
        value = value + 0.5e-2 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    bias, log_prob, weight, level = weights.tolist()
    return Estimate(bias=bias, log_prob=log_prob, entropy=weight, level=level)


def best_stop(
    traces: Sequence[Trace], estimate: Estimate | None, cost: StepCost, context: int | float
) -> policies.Static | None:
    """Return the chain with the threshold of most tokens per second; None for no threshold.

    Replay is exact: a chain that stops is a shorter chain.
    """
    depth = traces[0].right.shape[1]
    seconds = [cost.seconds(1, context, drafted + 1, drafted) for drafted in range(depth + 1)]
    rates = {one: _rate(traces, one, estimate, seconds) for one in (0.0, *THRESHOLDS)}
    confidence = max(rates, key=lambda one: rates[one])
    if rates[confidence] < LEAST_GAIN * rates[0.0]:
        return None
    paths = [(0,) * length for length in range(1, depth + 1)]
    name = "threshold" if estimate is None else "learned stop"
    return policies.Static(paths, name, confidence, estimate)


def _rate(
    traces: Sequence[Trace], confidence: float, estimate: Estimate | None, seconds: Sequence[float]
) -> float:
    """Return tokens per second of a chain that stops below this confidence.

    `seconds` are those of a step by the number of drafted tokens.
    """
    tokens, taken = 0, 0.0
    for one in traces:
        chances = one.log_probs.exp()
        if estimate is not None:
            levels = torch.arange(chances.shape[1])
            chances = estimate(one.log_probs, one.entropies, levels)
        continues = (chances >= confidence)[:, :-1].int().cumprod(1).sum(1)
        lengths = (1 + continues).tolist()
        right = one.right.int().cumprod(1).sum(1).tolist()
        place = 0
        while place < len(lengths):
            accepted = min(right[place], lengths[place])
            taken += seconds[lengths[place]]
            tokens += accepted + 1
            place += accepted + 1
    return tokens / taken
