"""Tune a head to this machine: measure costs and acceptance, search, time the best, choose."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.baselines import PromptLookup
from specheads.baselines.hybrid import Hybrid, HybridTree
from specheads.config import Tune
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import held_out
from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import (
    Acceptance,
    CostError,
    Machine,
    Tried,
    Tuned,
    TunedTree,
)
from specheads.measure.counts import DepthCounts
from specheads.measure.how import How
from specheads.measure.offline import guess_ranks
from specheads.measure.online import decode_prompts, write_alone
from specheads.measure.tables import Fitted
from specheads.measure.tune import search
from specheads.measure.tune.acceptance import WIDTH, conditional, path_rates
from specheads.measure.tune.cost import BURST, Point, Way, fit, time_ways
from specheads.measure.tune.stop import best_stop, learn, trace
from specheads.runs.progress import bar

COPIED = 10
"""Tokens that prompt lookup copies at most, where it joins the head's tree."""

MOST_TOKENS = 512
"""Tokens of one forward that costs are fitted to: rows times nodes."""

GRID = (4, 8, 16, 32, 64)
"""Nodes of the trees that costs are fitted to, besides the chains."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What the base wrote after prompts of one context: half of it grows trees, half judges."""

    context: int
    prompts: list[list[int]]
    continuations: list[list[int]]
    ranks: list[Tensor]

    @property
    def grown(self) -> list[Tensor]:
        """Return the ranks that trees are grown from."""
        return self.ranks[::2]

    @property
    def judged(self) -> list[Tensor]:
        """Return the ranks that trees are judged by."""
        return self.ranks[1::2]

    def rows(self, batch: int) -> list[list[int]]:
        """Return so many prompts of exactly this context: judged texts, over and over."""
        texts = [
            prompt + text for prompt, text in zip(self.prompts, self.continuations, strict=True)
        ]
        judged = texts[1::2]
        chosen = [judged[row % len(judged)] for row in range(batch)]
        return [(text * -(-self.context // len(text)))[: self.context] for text in chosen]


def tune_head(base: FrozenBase, head: Head, settings: Tune) -> Tuned:
    """Choose how a head drafts, for each batch and context that the settings name."""
    how = How(max_new_tokens=settings.new_tokens, progress=True)
    contexts = [one for one in settings.contexts if one + _room(settings, head) <= base.max_length]
    if not contexts:
        raise InputError(
            f"a context needs room for {_room(settings, head)} tokens more, and the base holds "
            f"{base.max_length}; lower contexts or new_tokens"
        )
    texts = [write(base, head, settings, context, how) for context in contexts]
    trees = search.candidates(
        [rows for one in texts for rows in one.grown], head.depth, settings.max_nodes
    )
    cost, error = measure_cost(base, head, texts, trees, settings.batch_sizes, how)
    tried, chosen = [], []
    for one in texts:
        ways = finalists(base, head, one, trees, cost, settings.batch_sizes)
        for batch in settings.batch_sizes:
            rows, tree = judge(base, one, ways[batch], cost, batch, how)
            tried += rows
            chosen.append(tree)
    return Tuned(
        machine=Machine.of(base.device, base.dtype),
        base=base.fingerprint,
        cost=cost,
        cost_error=error,
        acceptance=Acceptance(
            per_depth=conditional([rows for one in texts for rows in one.ranks]),
            by_context=[path_rates(one.ranks, one.context) for one in texts],
        ),
        trees=chosen,
        tried=tried,
    )


def _room(settings: Tune, head: Head) -> int:
    """Return the tokens that follow a context: text, or timed steps, and a last tree."""
    return max(settings.new_tokens, (BURST + 2) * (head.depth + COPIED + 1))


def write(base: FrozenBase, head: Head, settings: Tune, context: int, how: How) -> Texts:
    """Have the base continue validation prompts of a length, and rank what it says."""
    if base.tokenizer is None:
        raise InputError(f"tuning reads text: the base {base.name} needs a tokenizer")
    asked = base.tokenizer, context, settings.num_prompts, settings.seed
    try:
        found = held_out(settings.data, "validation", *asked)
    except InputError:
        # of few documents none may be held out, or none is as long
        found = held_out(settings.data, "train", *asked)
    prompts = [one.tokens[-context:] for one in found]
    if len(prompts) < 2:
        raise InputError(f"tuning needs 2 prompts of {context} tokens, got 1; lower contexts")
    texts = write_alone(base, prompts, replace(how, batch_size=4))
    pairs = list(zip(prompts, texts, strict=True))
    ranks = [
        guess_ranks(base, head, *pair, width=WIDTH) for pair in bar(pairs, "guesses", how.progress)
    ]
    return Texts(context, prompts, texts, ranks)


def measure_cost(
    base: FrozenBase,
    head: Head,
    texts: Sequence[Texts],
    trees: Sequence[policies.Static],
    batches: Sequence[int],
    how: How,
) -> tuple[StepCost, CostError]:
    """Time chains and trees of several sizes at every batch and context; fit costs to that."""
    sizes = {one.num_nodes: one for one in trees if one.name == "tree"}
    grid = [one for one in trees if one.name == "chain"]
    grid += [sizes[size] for size in GRID if size in sizes]
    points: list[Point] = []
    for one in texts:
        for batch in batches:
            ways: list[Way] = [(None, policies.NOTHING)]
            ways += [(head, tree) for tree in grid if batch * tree.num_nodes <= MOST_TOKENS]
            points += time_ways(base, ways, one.rows(batch), how=how, rounds=5)
    return fit(points)


def finalists(
    base: FrozenBase,
    head: Head,
    texts: Texts,
    trees: Sequence[policies.Static],
    cost: StepCost,
    batches: Sequence[int],
) -> dict[int, list[Way]]:
    """Return what is timed for real at each batch: the base alone first.

    By prediction the best tree, the best one of another size, and the best chain; chains that stop
    by a threshold and by a learned estimate; best-first trees; and the best tree with copied text.
    """
    grown = list(zip(texts.prompts, texts.continuations, strict=True))[::2]
    traces = [trace(base, head, *one) for one in grown if len(one[1]) > 1]
    estimates = [None, learn(traces)]
    stops = [best_stop(traces, one, cost, texts.context) for one in estimates]
    out: dict[int, list[Way]] = {}
    for batch in batches:
        found = search.predict(trees, texts.judged, cost, batch, texts.context)
        # no draft is timed in any case
        drafting = sorted(found[1:], key=lambda one: -one.speedup)
        first = search.best(drafting).tree if drafting[0].speedup > 1 else drafting[0].tree
        others = [one.tree for one in drafting if abs(one.tree.num_nodes - first.num_nodes) > 1]
        chains = [one.tree for one in drafting if one.tree.name == "chain"]
        picked = [first, *others[:2], chains[0], *_dynamic(head, first)]
        picked += [one for one in stops if one]
        ways = [(head, tree) for place, tree in enumerate(picked) if tree not in picked[:place]]
        lookup = PromptLookup(base.vocab_size, COPIED + first.depth, device=base.device)
        hybrid = HybridTree(first, COPIED, trim=base.device.type == "cpu")
        out[batch] = [(None, policies.NOTHING), *ways, (Hybrid(head, lookup), hybrid)]
    return out


def _dynamic(head: Head, first: policies.Static) -> list[policies.TreePolicy]:
    """Return a best-first tree about as large as the best tree, where the head drafts enough."""
    branch = min(4, head.drafted_size or 4)
    nodes = min(max(first.num_nodes, head.depth + 3), 1 + branch + (head.depth - 1) * 4 * branch)
    return [policies.BestFirst(nodes, head.depth, 4, branch)] if branch > 1 else []


def judge(
    base: FrozenBase, texts: Texts, ways: Sequence[Way], cost: StepCost, batch: int, how: How
) -> tuple[list[Tried], TunedTree]:
    """Time ways of drafting for real, count what judged texts give them; return all and the best.

    What needs more than the head (copied text) is shown beside the others and not chosen.
    """
    points = time_ways(base, ways, texts.rows(batch), how=how)
    tried = []
    for (drafter, tree), point in zip(ways, points, strict=True):
        overhead = point.seconds / points[0].seconds
        tokens, fitted = 1.0, None
        if drafter is not None:
            tokens = _tokens(base, (drafter, tree), texts, how)
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
                fitted=fitted,
            )
        )
    own = [place for place, (drafter, _) in enumerate(ways) if not isinstance(drafter, Hybrid)]
    best = max(own, key=lambda place: tried[place].speedup)
    tried[best] = replace(tried[best], chosen=True)
    return tried, _chosen(tried[best], ways[best][1])


def _tokens(base: FrozenBase, way: Way, texts: Texts, how: How) -> float:
    """Return the tokens a forward on judged texts: by replay, or decoded where a step decides."""
    drafter, tree = way
    if isinstance(tree, policies.Static) and not tree.confidence:
        return search.replayed(tree, texts.judged)
    decoded = decode_prompts(base, drafter, texts.prompts[1::2], replace(how, tree=tree))
    counts = [one.counts for one in decoded]
    return DepthCounts.total(counts, tree.depth).tokens_per_forward


def _chosen(row: Tried, tree: policies.TreePolicy) -> TunedTree:
    """Return a way of drafting as tuned.json has it."""
    chosen = TunedTree(
        batch=row.batch,
        context=row.context,
        tokens_per_forward=row.tokens_per_forward,
        predicted_speedup=row.speedup,
        kind="static" if tree.depth else "none",
        num_nodes=tree.num_nodes,
        depth=tree.depth,
    )
    if isinstance(tree, policies.BestFirst):
        return replace(chosen, kind="best_first", beam=tree.beam, branch=tree.branch)
    assert isinstance(tree, policies.Static)
    paths = [list(path) for path in tree.paths]
    return replace(chosen, paths=paths, confidence=tree.confidence, stop=tree.estimate)


def tables(tuned: Tuned) -> Iterator[Fitted]:
    """Yield what was measured as tables for the console."""
    cost, error = tuned.cost, tuned.cost_error
    rows = [
        (
            name,
            *(f"{1e6 * value:.3g}" for value in (one.fixed, one.several, one.token, one.context)),
            f"{one.power:g}",
        )
        for name, one in (("verify", cost.verify), ("draft a level", cost.draft))
    ]
    title = (
        f"costs in microseconds; fitted to {error.points} times, off by {error.median:.1%} "
        f"(median), {error.largest:.1%} (largest), {error.held_out:.1%} (held out)"
    )
    columns = "forward", "fixed", "beyond one token", "a token", "a position", "power of tokens"
    yield Fitted(title, rows, columns)
    tried = [
        (
            str(one.batch),
            str(one.context),
            one.tree + (" *" if one.chosen else ""),
            str(one.num_nodes),
            f"{one.tokens_per_forward:.2f}",
            f"{one.step_overhead:.2f}",
            f"{one.speedup:.2f}",
            "" if one.fitted is None else f"{one.fitted:.2f}",
        )
        for one in tuned.tried
    ]
    columns = ("batch", "context", "tree (* chosen)", "nodes", "tokens per forward", "step")
    yield Fitted("ways to draft, timed", tried, (*columns, "speed-up", "by costs"))
