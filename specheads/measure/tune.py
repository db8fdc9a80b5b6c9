"""Choose a draft tree for this machine: fit step times, predict, time the best, choose."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from statistics import fmean, median

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import PromptSet
from specheads.data.settings import Data
from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.tuned import (
    AcceptanceRates,
    Machine,
    Tried,
    Tuned,
    TunedTree,
)
from specheads.measure.counts import DepthCounts, rate
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.measure.offline import copied, fixed_tree, replay, replay_texts
from specheads.measure.results import Candidate
from specheads.measure.tables import ConsoleTable, with_interval
from specheads.measure.tune_cost import TreeMethod, fit, room, time_steps
from specheads.measure.tune_trees import (
    TuningText,
    TuningTexts,
    candidate_trees,
    match_rates,
    predict,
    stopping_chains,
    validation_prompts,
    write_texts,
)
from specheads.runs.progress import bar

COPIED = (4, 10)
"""Numbers of prompt-lookup nodes that are tried next to the head's tree."""

MOST_TOKENS = 512
"""Largest number of tokens of one forward in the cost fit: rows times nodes."""

CONTEXTS = (64, 512)
"""Default context lengths, as far as the base has room for them."""

GRID = (4, 8, 16, 32, 64)
"""Node counts of the trees in the cost fit; the chains are added."""

TUNING_TOKENS = 64
"""New tokens after each prompt when an evaluation chooses a tree."""

TUNE_PROMPTS = 24
"""Most validation prompts on which an evaluation chooses a tree."""

QUICK_NODES = 16
"""Nodes of the largest tree when an evaluation chooses, root included."""


def tune_head(
    base: FrozenBase,
    head: Head,
    corpus: Data,
    *,
    batch_sizes: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (),
    max_nodes: int = 64,
    num_prompts: int = 48,
    new_tokens: int = 64,
    seed: int = 0,
) -> Tuned:
    """Choose a tree for each batch size and context length, on validation prompts of a corpus.

    Without `contexts` they are 64 and 512, if the base has room for them. For the other arguments
    see `specheads tune --help`.
    """
    needed = max(new_tokens, room(head.depth + max(COPIED)))
    longest = base.max_length - needed
    contexts = contexts or [one for one in CONTEXTS if one <= longest]
    if not contexts or max(contexts) > longest:
        raise InputError(
            f"contexts can be at most {longest}, as {needed} tokens follow in a context of "
            f"{base.max_length}, got {max(contexts or CONTEXTS)}; lower contexts or new_tokens"
        )
    generation = GenerationSettings(max_new_tokens=new_tokens, progress=True)
    texts = []
    for one in contexts:
        prompts = validation_prompts(corpus, base, one, num_prompts, longest=longest, seed=seed)
        texts.append(write_texts(base, head, prompts, one, generation))
    return choose(base, head, texts, batch_sizes, generation, max_nodes)


def choose(
    base: FrozenBase,
    head: Head,
    texts: Sequence[TuningTexts],
    batches: Sequence[int],
    generation: GenerationSettings,
    max_nodes: int,
    *,
    quick: bool = False,
) -> Tuned:
    """Choose a tree at each batch size and at the context length of each of the texts.

    A head's tree has at most `max_nodes` nodes, root included. A quick choice takes fewer steps,
    among trees that can be replayed.
    """
    grown = [text.ranks for one in texts for text in one.grown]
    trees = candidate_trees(grown, head.depth, max_nodes)
    cost, error = measure_cost(base, head, texts, trees, batches, generation, 3 if quick else 5)
    tried, chosen, rounds = [], [], 6 if quick else 8
    for one in texts:
        stops = None if quick else stopping_chains(base, head, one.grown, cost, one.context)
        for batch in batches:
            found = finalists(head, one, trees, cost, batch, max_nodes, stops)
            found = [tree for tree in found if one.context + room(tree.depth) <= base.max_length]
            rows, tree = time_finals(base, head, found, one, batch, generation, rounds)
            tried += rows
            chosen.append(tree)
    # rates are those of a chain's steps: other positions, which accepted drafts skip, are easier
    every = [text for one in texts for text in (*one.grown, *one.judged)]
    counts = [replay(text.ranks, policies.chain(head.depth)) for text in every]
    size = max(COPIED)
    copies = [copied(text.prompt, text.continuation, size, size) for text in every]
    rates = DepthCounts.total(counts, head.depth).levels()
    return Tuned(
        machine=Machine.of(base.device, base.dtype),
        base=base.fingerprint,
        cost=cost,
        cost_error=error,
        acceptance=AcceptanceRates(per_depth=rates, matches=match_rates(copies)),
        trees=chosen,
        tried=tried,
        new_tokens=generation.max_new_tokens,
    )


def measure_cost(
    base: FrozenBase,
    head: Head,
    texts: Sequence[TuningTexts],
    trees: Sequence[policies.Static],
    batches: Sequence[int],
    generation: GenerationSettings,
    rounds: int,
) -> tuple[StepCost, dict[str, float]]:
    """Time chains and trees of several sizes at every batch size and context; fit costs to it."""
    sizes = {one.num_nodes: one for one in trees if one.name == "tree"}
    grid = [one for one in trees if one.name == "chain"]
    grid += [sizes[size] for size in GRID if size in sizes]
    methods: list[TreeMethod] = []
    prompts: list[list[list[int]]] = []
    # all batch sizes and contexts in turns, because a machine changes its pace within minutes
    for one, batch in product(texts, batches):
        for tree in (policies.NOTHING, *grid):
            if batch * tree.num_nodes <= MOST_TOKENS:
                methods.append((head if tree.depth else None, tree))
                prompts.append(one.rows(batch))
    return fit(time_steps(base, methods, prompts, generation=generation, rounds=rounds))


# --- finals ------------------------------------------------------------------------------------


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
            each = _counts(base, head, tree, texts.judged, generation)
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
    head: Head,
    tree: policies.TreePolicy,
    texts: Sequence[TuningText],
    generation: GenerationSettings,
) -> list[DepthCounts]:
    """Return the counts of each text: by replay if the tree is fixed, else decoded."""
    sources = tuple(one.source for one in texts)
    if fixed_tree(tree) is not None:
        pairs = [(one.prompt, one.continuation) for one in texts]
        return replay_texts(tree, [one.ranks for one in texts], pairs, sources)
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


# --- the tree of an evaluation -----------------------------------------------------------------


def decoded_context(prompts: PromptSet, max_new_tokens: int) -> int:
    """Return the context length of a typical text of an evaluation, half of it decoded."""
    lengths = [len(prompt.tokens) for prompt in prompts.prompts]
    return round(median(lengths) + max_new_tokens / 2)


def choose_tree(
    base: FrozenBase,
    head: Head,
    corpus: Data,
    generation: GenerationSettings,
    context: int,
    *,
    prompt_tokens: int,
    num_prompts: int,
) -> tuple[policies.TreePolicy, Tuned | None]:
    """Return the tree of `tree=tuned` for an evaluation: the tuned tree, or one chosen now.

    The tuned tree is used if `specheads tune` measured it on a machine like this one and the
    evaluation is greedy. It is the tree of this batch size and context for all steps, so that it
    can be replayed. Otherwise a tree is chosen now with fewer steps and this sampling, on
    validation prompts of a corpus, and the measurements are returned as well.
    """
    sampling, batch = generation.sampling, generation.batch_size
    if head.tuned and head.tuned.fits(base.device, base.dtype) and sampling.temperature == 0:
        return head.tuned.best(batch, context).policy(), None
    longest, seed = base.max_length // 2, sampling.seed
    prompts = validation_prompts(
        corpus, base, prompt_tokens, num_prompts, longest=longest, seed=seed
    )
    generation = replace(generation, max_new_tokens=TUNING_TOKENS, sources=())
    context = max(min(context, base.max_length - room(head.depth)), 1)
    texts = write_texts(base, head, prompts, context, generation)
    tuned = choose(base, head, [texts], [batch], generation, QUICK_NODES, quick=True)
    return tuned.trees[0].policy(), tuned


def candidates(tuned: Tuned) -> list[Candidate]:
    """Return the timed trees as in results.json."""
    names = [item.name for item in fields(Candidate)]
    return [Candidate(**{name: getattr(row, name) for name in names}) for row in tuned.tried]


def table(tuned: Tuned) -> ConsoleTable:
    """Return the timed trees as a table for the console."""
    rows = [
        (
            str(one.batch),
            str(one.context),
            one.tree + (" *" if one.chosen else ""),
            str(one.num_nodes),
            f"{one.tokens_per_forward:.2f}",
            f"{one.step_overhead:.2f}",
            with_interval(one.speedup, one.interval),
        )
        for one in tuned.tried
    ]
    columns = ("batch", "context", "tree (* chosen)", "nodes", "tokens per forward", "step")
    error = tuned.cost_error
    title = (
        f"ways to draft, timed; costs fitted to {error['points']:.0f} times are off by "
        f"{error['median']:.1%} (median), {error['largest']:.1%} (largest)"
    )
    return ConsoleTable(title, rows, (*columns, "speed-up"))
