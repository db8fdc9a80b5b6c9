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
from specheads.measure.tune_cost import TreeMethod, room, time_steps
from specheads.measure.tune_texts import TuningTexts
from specheads.measure.tune_trees import best, predict
from specheads.runs.progress import bar

COPIED = (4, 10)
"""Numbers of prompt-lookup nodes that are tried next to the head's tree."""

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds that are tried for an early stop."""

LEAST_GAIN = 1.01
"""Gain over a chain without a stop below which the stop is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits on the work of a choice."""

    max_nodes: int
    """Nodes of the largest tree, root included, without prompt-lookup nodes."""
    grid_rounds: int = 5
    """Bursts of steps for each tree of the cost fit."""
    rounds: int = 8
    """Bursts of steps for each method that is timed at the end."""
    decodes: bool = True
    """Whether to try trees that differ from step to step. Replay cannot predict them, so they are
    decoded."""


def methods_to_time(
    base: FrozenBase,
    head: Head,
    texts: TuningTexts,
    trees: Sequence[policies.Static],
    cost: StepCost,
    batches: Sequence[int],
    effort: Effort,
) -> dict[int, list[TreeMethod]]:
    """Return the methods to time at each batch size, the base alone first.

    These are the best tree by prediction, two of another size and the best chain. If `decodes` is
    set, best-first trees and chains that stop early are added. Tree, chain and best-first tree are
    also tried with prompt-lookup tokens. Methods that the context has no room for are left out.
    """
    stops = _stops(base, head, texts, cost) if effort.decodes else []
    stops = [one for one in stops if one.num_nodes <= effort.max_nodes]
    out: dict[int, list[TreeMethod]] = {}
    for batch in batches:
        found = predict(trees, texts.judged.ranks, cost, batch, texts.context)
        # the empty tree is timed in any case
        drafting = sorted(found[1:], key=lambda one: -one.speedup)
        first = best(drafting).tree if drafting[0].speedup > 1 else drafting[0].tree
        others = [one.tree for one in drafting if abs(one.tree.num_nodes - first.num_nodes) > 1]
        chains = [one.tree for one in drafting if one.tree.name == "chain"]
        dynamic = _best_first(head, first, effort.max_nodes) if effort.decodes else []
        picked: list[policies.TreePolicy] = [first, *others[:2], chains[0], *dynamic, *stops]
        picked += [
            HybridTree(one, size)
            for one in dict.fromkeys((first, chains[0], *dynamic))
            for size in COPIED
        ]
        out[batch] = [(None, policies.NOTHING)]
        out[batch] += [
            (head, tree)
            for place, tree in enumerate(picked)
            if tree not in picked[:place] and texts.context + room(tree.depth) <= base.max_length
        ]
    return out


def _best_first(head: Head, first: policies.Static, most: int) -> list[policies.TreePolicy]:
    """Return a best-first tree about as large as `first`, if the head drafts enough tokens."""
    branch = min(4, head.drafted_size or 4)
    most = min(most, 1 + branch + (head.depth - 1) * 4 * branch)
    nodes = min(max(first.num_nodes, head.depth + 3), most)
    return [policies.BestFirst(nodes, head.depth, 4, branch)] if branch > 1 else []


def time_methods_for_real(
    base: FrozenBase,
    texts: TuningTexts,
    methods: Sequence[TreeMethod],
    cost: StepCost,
    batch: int,
    generation: GenerationSettings,
    rounds: int,
) -> tuple[list[Tried], TunedTree]:
    """Time methods, count their tokens on held-out texts; return all and the fastest."""
    seconds = _step_seconds(base, texts, methods, batch, generation, rounds)
    tried, rates = [], {}
    for (drafter, tree), step in zip(methods, seconds, strict=True):
        overhead = step / seconds[0]
        tokens, interval, fitted = 1.0, list[float](), None
        if drafter is not None:
            each = _counts(base, drafter, tree, texts.judged, generation)
            counts = DepthCounts.total(each, tree.depth)
            tokens, rates[tree] = counts.tokens_per_forward, counts.levels()
            interval = [bound / overhead for bound in rate(each).interval]
        if isinstance(tree, policies.Static) and not tree.confidence:
            alone = cost.seconds(batch, texts.context, 1, 0)
            fitted = tokens * alone
            fitted /= cost.seconds(batch, texts.context, tree.num_nodes, tree.depth)
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
                fitted=fitted,
            )
        )
    fastest = max(range(len(tried)), key=lambda place: tried[place].speedup)
    tried[fastest] = replace(tried[fastest], chosen=True)
    tree = methods[fastest][1]
    return tried, replace(_tuned_tree(tried[fastest], tree), rates=rates.get(own_tree(tree), []))


def _step_seconds(
    base: FrozenBase,
    texts: TuningTexts,
    methods: Sequence[TreeMethod],
    batch: int,
    generation: GenerationSettings,
    rounds: int,
) -> list[float]:
    """Return the mean step time of each method over as many texts as there are rounds.

    Steps with prompt-lookup tokens take longer, and their number differs from text to text.
    """
    turns = max(1, rounds // batch)
    quiet = replace(generation, progress=False)
    points = [
        time_steps(
            base,
            methods,
            [texts.rows(batch, turn * batch)] * len(methods),
            generation=quiet,
            rounds=rounds // turns,
        )
        for turn in bar(range(turns), "step times", generation.progress)
    ]
    return [fmean(one.seconds for one in column) for column in zip(*points, strict=True)]


def _counts(
    base: FrozenBase,
    drafter: Drafter,
    tree: policies.TreePolicy,
    texts: TuningTexts,
    generation: GenerationSettings,
) -> list[DepthCounts]:
    """Return the counts of each text: by replay if the tree is fixed, else decoded."""
    if fixed_tree(tree) is not None:
        return replay_texts(base, tree, texts.ranks, texts.pairs(), texts.sources)
    generation = replace(generation, tree=tree, batch_size=8, sources=tuple(texts.sources))
    return [one.counts for one in decode_prompts(base, drafter, [*texts.prompts], generation)]


def _tuned_tree(row: Tried, tree: policies.TreePolicy) -> TunedTree:
    """Return a tree as tuned.json stores it."""
    copied = tree.size if isinstance(tree, HybridTree) else 0
    tree = own_tree(tree)
    chosen = TunedTree(
        batch=row.batch,
        context=row.context,
        tokens_per_forward=row.tokens_per_forward,
        predicted_speedup=row.speedup,
        interval=row.interval,
        kind="static" if tree.depth else "none",
        num_nodes=tree.num_nodes,
        depth=tree.depth,
        copied=copied,
    )
    if isinstance(tree, policies.BestFirst):
        return replace(chosen, kind="best_first", beam=tree.beam, branch=tree.branch)
    assert isinstance(tree, policies.Static)
    paths = [list(path) for path in tree.paths]
    return replace(chosen, paths=paths, confidence=tree.confidence, stop=tree.estimate)


# --- chains that stop early --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy drafts of a chain along one text, with axes (position, depth)."""

    log_probs: Tensor
    entropies: Tensor
    right: Tensor
    """Whether the best guess is the base's token, given the text before it."""
    known: Tensor
    """Whether the text is long enough to tell."""


def _stops(
    base: FrozenBase, head: Head, texts: TuningTexts, cost: StepCost
) -> list[policies.TreePolicy]:
    """Return chains that stop by the head's own and by a learned probability, if that pays."""
    traces = [trace(base, head, *one) for one in texts.grown.pairs() if len(one[1]) > 1]
    if not traces:
        return []
    found = [best_stop(traces, one, cost, texts.context) for one in (None, learn(traces))]
    return [one for one in found if one]


@torch.inference_mode()
def trace(base: FrozenBase, head: Head, prompt: list[int], continuation: list[int]) -> Trace:
    """Return the trace of a text that the base wrote, with at least two new tokens."""
    text = torch.tensor([prompt + continuation], device=base.device)
    places, first = len(continuation) - 1, len(prompt) - 1
    shape = places, head.depth
    found = Trace(*(torch.zeros(shape, dtype=torch.float64) for _ in range(2)),
                  *(torch.zeros(shape, dtype=torch.bool) for _ in range(2)))  # fmt: skip
    features = base.read(text, head.aux_layers)
    anchors = anchor_mask(text, first, places)
    for level, state in enumerate(head.states(features, text, anchors)):
        count = max(places - level, 0)
        logs = head.logits(state[0, first : first + count], level).double().log_softmax(-1)
        guess = logs.max(-1)
        labels = text[0, first + 2 + level : first + 2 + level + count]
        found.log_probs[:count, level] = guess.values.cpu()
        found.entropies[:count, level] = entropy(logs).cpu()
        found.right[:count, level] = (head.to_tokens(guess.indices) == labels).cpu()
        found.known[:count, level] = True
    return found


def learn(traces: Sequence[Trace]) -> Estimate:
    """Fit a logistic regression: is a draft right, given that those above it are?"""
    rows, labels = [], []
    for one in traces:
        for level in range(one.right.shape[1]):
            reached = one.known[:, level] & one.right[:, :level].all(1)
            logs, entropies = one.log_probs[reached, level], one.entropies[reached, level]
            levels = torch.full_like(logs, level)
            rows.append(torch.stack([torch.ones_like(logs), logs, entropies, levels], dim=1))
            labels.append(one.right[reached, level].double())
    inputs, right = torch.cat(rows), torch.cat(labels)
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ weights
        # the ridge keeps weights finite for traces without a mistake
        value = F.binary_cross_entropy_with_logits(logits, right, reduction="sum")
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
    rates = {one: _rate(traces, one, estimate, cost, context) for one in (0.0, *THRESHOLDS)}
    confidence = max(rates, key=lambda one: rates[one])
    if rates[confidence] < LEAST_GAIN * rates[0.0]:
        return None
    paths = [(0,) * length for length in range(1, depth + 1)]
    name = "threshold" if estimate is None else "learned stop"
    return policies.Static(paths, name, confidence, estimate)


def _rate(
    traces: Sequence[Trace],
    confidence: float,
    estimate: Estimate | None,
    cost: StepCost,
    context: int | float,
) -> float:
    """Return tokens per second of a chain that stops below this confidence, at batch 1."""
    tokens, seconds = 0, 0.0
    for one in traces:
        chances = one.log_probs.exp()
        if estimate is not None:
            levels = enumerate(zip(one.log_probs.T, one.entropies.T, strict=True))
            chances = torch.stack([estimate(*both, level) for level, both in levels], dim=1)
        continues = (chances >= confidence)[:, :-1].int().cumprod(1).sum(1)
        lengths = (1 + continues).tolist()
        right = one.right.int().cumprod(1).sum(1).tolist()
        place = 0
        while place < len(lengths):
            drafted = lengths[place]
            accepted = min(right[place], drafted, len(lengths) - place - 1)
            seconds += cost.seconds(1, context, drafted + 1, drafted)
            tokens += accepted + 1
            place += accepted + 1
    return tokens / seconds
