"""Finals: the best ways to draft by prediction, timed for real, and the fastest of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Head
from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.tuned import Tried, TunedTree
from specheads.measure.counts import DepthCounts, rate
from specheads.measure.how import How
from specheads.measure.online import decode_prompts
from specheads.measure.replay import fixed, replay_texts
from specheads.measure.tune import search
from specheads.measure.tune.cost import Way, room, time_ways
from specheads.measure.tune.stop import best_stop, learn, trace
from specheads.measure.tune.texts import Texts
from specheads.runs.progress import bar

COPIED = (4, 10)
"""Nodes for copied text that are tried, where prompt lookup joins the head's tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a choice may cost."""

    max_nodes: int
    """Nodes of the largest tree that is tried, root included and copied text aside."""
    grid_rounds: int = 5
    """Bursts of steps for each tree that costs are fitted to."""
    rounds: int = 8
    """Bursts of steps for each finalist."""
    decodes: bool = True
    """Whether ways that replay cannot predict are among them: trees that differ from step to step
    are decoded to see what they give."""


def finalists(
    base: FrozenBase,
    head: Head,
    texts: Texts,
    trees: Sequence[policies.Static],
    cost: StepCost,
    batches: Sequence[int],
    effort: Effort,
) -> dict[int, list[Way]]:
    """Return what is timed for real at each batch: the base alone first.

    By prediction the best tree, the best one of another size, and the best chain; where replay is
    not all, best-first trees, and chains that stop by a threshold and by a learned estimate; and
    best tree, chain and best-first tree with copied text. What the context has no room for is left
    out.
    """
    stops = _stops(base, head, texts, cost) if effort.decodes else []
    stops = [one for one in stops if one.num_nodes <= effort.max_nodes]
    out: dict[int, list[Way]] = {}
    for batch in batches:
        found = search.predict(trees, texts.judged.ranks, cost, batch, texts.context)
        # no draft is timed in any case
        drafting = sorted(found[1:], key=lambda one: -one.speedup)
        first = search.best(drafting).tree if drafting[0].speedup > 1 else drafting[0].tree
        others = [one.tree for one in drafting if abs(one.tree.num_nodes - first.num_nodes) > 1]
        chains = [one.tree for one in drafting if one.tree.name == "chain"]
        dynamic = _dynamic(head, first, effort.max_nodes) if effort.decodes else []
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


def _dynamic(head: Head, first: policies.Static, most: int) -> list[policies.TreePolicy]:
    """Return a best-first tree about as large as the best tree, where the head drafts enough."""
    branch = min(4, head.drafted_size or 4)
    most = min(most, 1 + branch + (head.depth - 1) * 4 * branch)
    nodes = min(max(first.num_nodes, head.depth + 3), most)
    return [policies.BestFirst(nodes, head.depth, 4, branch)] if branch > 1 else []


def _stops(base: FrozenBase, head: Head, texts: Texts, cost: StepCost) -> list[policies.TreePolicy]:
    """Return the chains that stop, by the head's own probability and by an estimate, where it pays.

    Texts of a single token say nothing of when.
    """
    traces = [trace(base, head, *one) for one in texts.grown.pairs() if len(one[1]) > 1]
    if not traces:
        return []
    found = [best_stop(traces, one, cost, texts.context) for one in (None, learn(traces))]
    return [one for one in found if one]


def judge(
    base: FrozenBase,
    texts: Texts,
    ways: Sequence[Way],
    cost: StepCost,
    batch: int,
    how: How,
    rounds: int,
) -> tuple[list[Tried], TunedTree]:
    """Time ways for real, count what judged texts give them; return all and the best."""
    seconds = _step_seconds(base, texts, ways, batch, how, rounds)
    tried, rates = [], {}
    for (drafter, tree), step in zip(ways, seconds, strict=True):
        overhead = step / seconds[0]
        tokens, interval, fitted = 1.0, list[float](), None
        if drafter is not None:
            each = _counts(base, drafter, tree, texts.judged, how)
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
    best = max(range(len(tried)), key=lambda place: tried[place].speedup)
    tried[best] = replace(tried[best], chosen=True)
    chosen = _chosen(tried[best], ways[best][1])
    return tried, replace(chosen, rates=rates.get(own_tree(ways[best][1]), []))


def _step_seconds(
    base: FrozenBase, texts: Texts, ways: Sequence[Way], batch: int, how: How, rounds: int
) -> list[float]:
    """Return what a step of each way takes, over as many texts as there are rounds.

    A step with copied text takes longer than one without, and how many there are of either differs
    from text to text.
    """
    turns = max(1, rounds // batch)
    quiet = replace(how, progress=False)
    points = [
        time_ways(
            base,
            ways,
            [texts.rows(batch, turn * batch)] * len(ways),
            how=quiet,
            rounds=rounds // turns,
        )
        for turn in bar(range(turns), "step times", how.progress)
    ]
    return [fmean(one.seconds for one in column) for column in zip(*points, strict=True)]


def _counts(
    base: FrozenBase, drafter: Drafter, tree: policies.TreePolicy, texts: Texts, how: How
) -> list[DepthCounts]:
    """Return what forwards take on each text: by replay, or decoded where a step decides."""
    if fixed(tree) is not None:
        return replay_texts(base, tree, texts.ranks, texts.pairs(), texts.sources)
    how = replace(how, tree=tree, batch_size=8, sources=tuple(texts.sources))
    return [one.counts for one in decode_prompts(base, drafter, [*texts.prompts], how)]


def _chosen(row: Tried, tree: policies.TreePolicy) -> TunedTree:
    """Return a way of drafting as tuned.json has it."""
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
