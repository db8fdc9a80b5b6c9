"""Choose a draft tree for this machine: fit step times, predict, time the best, choose."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import PromptSet
from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies, tuned
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.named import (
    TimedTree,
    TunedTree,
    candidate_policies,
    fixed_tree,
)
from specheads.decoding.trees.tuned import Tuned
from specheads.measure import tune_trees
from specheads.measure.counts import DepthCounts, compute_rate
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.measure.offline import lookup_drafts, replay
from specheads.measure.step_times import (
    CostError,
    fit_cost,
    measure_until_it_fits,
    time_steps,
    tokens_after,
)
from specheads.measure.tables import ConsoleTable, with_interval
from specheads.measure.tune_trees import TuningTexts, trace_texts, validation_prompts, write_texts
from specheads.runs.progress import progress_bar

COPIED = (4, 10)
"""Numbers of prompt-lookup nodes that are tried next to the head's tree."""
MAX_TOKENS = 512
"""Largest number of tokens of one forward in the cost fit: rows times nodes."""
CONTEXTS = (64, 512)
"""Default context lengths, as far as the base has room for them."""
GRID = (4, 8, 16, 32, 64)
"""Node counts of the trees in the cost fit; the chains are added."""
TUNING_TOKENS = 64
"""New tokens after each prompt when an evaluation chooses a tree."""
TUNING_PROMPTS = 24
"""Most validation prompts on which an evaluation chooses a tree."""
QUICK_NODES = 16
"""Nodes of the largest tree when an evaluation chooses, root included."""


def tune_head(
    base: FrozenBase,
    head: Head,
    corpus: DataSettings,
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
    needed = max(new_tokens, tokens_after(head.depth + max(COPIED)))
    longest = base.max_length - needed
    contexts = contexts or [context for context in CONTEXTS if context <= longest]
    if not contexts or max(contexts) > longest:
        raise InputError(
            f"contexts can be at most {longest}, as {needed} tokens follow in a context of "
            f"{base.max_length}, got {max(contexts or CONTEXTS)}; lower contexts or new_tokens"
        )
    generation = GenerationSettings(max_new_tokens=new_tokens, progress=True)
    texts = []
    for context in contexts:
        prompts = validation_prompts(corpus, base, context, num_prompts, longest=longest, seed=seed)
        texts.append(write_texts(base, head, prompts, context, generation))
    return tune_on_texts(base, head, texts, batch_sizes, generation, max_nodes)


def choose_tree(
    base: FrozenBase,
    head: Head,
    corpus: DataSettings,
    generation: GenerationSettings,
    prompts: PromptSet,
    *,
    prompt_tokens: int,
    num_prompts: int,
) -> tuple[policies.TreePolicy, Tuned | None]:
    """Return the tree of `tree=tuned` for an evaluation: the tuned tree, or one chosen now.

    The tuned tree is used if `specheads tune` measured it on a machine like this one and the
    evaluation is greedy: that of this batch size and of a typical text that is half decoded, for
    all steps. Otherwise a tree is chosen now with fewer steps and this sampling, and the
    measurements are returned as well.
    """
    sampling, batch = generation.sampling, generation.batch_size
    length = statistics.median(len(prompt.tokens) for prompt in prompts.prompts)
    context = round(length + generation.max_new_tokens / 2)
    if head.tuned and head.tuned.fits(base.device, base.dtype) and sampling.temperature == 0:
        return head.tuned.best(batch, context).policy(), None
    num_prompts, longest = min(TUNING_PROMPTS, num_prompts), base.max_length // 2
    corpus_prompts = validation_prompts(
        corpus, base, prompt_tokens, num_prompts, longest=longest, seed=sampling.seed
    )
    generation = replace(generation, max_new_tokens=TUNING_TOKENS, sources=())
    context = max(min(context, base.max_length - tokens_after(head.depth)), 1)
    texts = write_texts(base, head, corpus_prompts, context, generation)
    measured = tune_on_texts(base, head, [texts], [batch], generation, QUICK_NODES, quick=True)
    return measured.trees[0].policy(), measured


def tune_on_texts(
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
    ranks = [text.ranks for group in texts for text in group.fit_texts]
    trees = tune_trees.candidate_trees(ranks, head.depth, max_nodes)
    measure = partial(measure_cost, base, head, texts, trees, batches, generation, quick=quick)
    # a quick choice times its finalists, whatever the fit predicts
    cost, error = measure_until_it_fits(measure, is_required=not quick)
    traces = [trace_texts(base, head, [text.tokens for text in group.fit_texts]) for group in texts]
    timed, chosen = list[TimedTree](), list[TunedTree]()
    for group, group_traces in zip(texts, traces, strict=True):
        further = list[policies.TreePolicy]()
        if group_traces and not quick:
            estimate = tune_trees.fit_estimate(group_traces)
            stop = tune_trees.best_stop(group_traces, estimate, cost, group.context)
            further = [stop] if stop and stop.num_nodes <= max_nodes else []
        for batch in batches:
            finalists = choose_finalists(
                base, head, group, trees, further, cost, batch, max_nodes, quick=quick
            )
            rounds = 6 if quick else 8
            times, tree = time_finalists(base, head, finalists, group, batch, generation, rounds)
            timed += times
            chosen.append(tree)
    return Tuned(
        machine=tuned.Machine.of(base.device, base.dtype),
        base=base.fingerprint,
        cost=cost,
        cost_error=error,
        acceptance=measure_acceptance(base, head, texts, traces),
        trees=chosen,
        tried=timed,
        new_tokens=generation.max_new_tokens,
    )


def measure_cost(
    base: FrozenBase,
    head: Head,
    texts: Sequence[TuningTexts],
    trees: Sequence[policies.Static],
    batches: Sequence[int],
    generation: GenerationSettings,
    *,
    quick: bool,
) -> tuple[StepCost, CostError]:
    """Time steps of chains and trees of many sizes; return the fitted cost and its error."""
    grid = [policies.NOTHING, *(tree for tree in trees if tree.name == "chain")]
    by_size = {tree.num_nodes: tree for tree in trees if tree.name == "tree"}
    grid += [by_size[size] for size in GRID if size in by_size]
    # all batch sizes and contexts in turns, because a machine changes its pace within minutes
    runs = [
        ((head if tree.depth else None, tree), group.rows(batch))
        for group, batch, tree in product(texts, batches, grid)
        if batch * tree.num_nodes <= MAX_TOKENS
    ]
    methods, rows = zip(*runs, strict=True)
    rounds = 3 if quick else 5
    return fit_cost(time_steps(base, methods, rows, generation=generation, rounds=rounds))


def choose_finalists(
    base: FrozenBase,
    head: Head,
    texts: TuningTexts,
    trees: Sequence[policies.Static],
    further: Sequence[policies.TreePolicy],
    cost: StepCost,
    batch: int,
    max_nodes: int,
    *,
    quick: bool,
) -> list[policies.TreePolicy]:
    """Return the trees to time at a batch size, as far as the context has room for them.

    These are the best by prediction, two of another size, the best chain, `further` trees and,
    unless the choice is quick, those of `candidate_policies`, some also with prompt lookup.
    """
    ranks = [text.ranks for text in texts.test_texts]
    ordered = sorted(
        trees, key=lambda tree: -tune_trees.predict(tree, ranks, cost, batch, texts.context)
    )
    best, chain = ordered[0], next(tree for tree in ordered if tree.name == "chain")
    other_sizes = [tree for tree in ordered if abs(tree.num_nodes - best.num_nodes) > 1]
    finalists: list[policies.TreePolicy] = [best, chain]
    if not quick:
        finalists += candidate_policies(head.depth, head.drafted_size, best.num_nodes, max_nodes)
    hybrids = [HybridTree(tree, size) for tree in dict.fromkeys(finalists) for size in COPIED]
    distinct = dict.fromkeys([*finalists, *other_sizes[:2], *further, *hybrids])
    longest = base.max_length - texts.context
    return [tree for tree in distinct if tokens_after(tree.depth) <= longest]


def time_finalists(
    base: FrozenBase,
    head: Head,
    trees: Sequence[policies.TreePolicy],
    texts: TuningTexts,
    batch: int,
    generation: GenerationSettings,
    rounds: int,
) -> tuple[list[TimedTree], TunedTree]:
    """Time the base alone and trees, count tokens on other texts; return all and the best."""
    methods = [(None, policies.NOTHING), *((head, tree) for tree in trees)]
    turns, silent = max(1, rounds // batch), replace(generation, progress=False)
    # the number of prompt-lookup tokens differs from text to text: each turn continues others
    times = [
        time_steps(
            base,
            methods,
            [texts.rows(batch, turn * batch)] * len(methods),
            generation=silent,
            rounds=rounds // turns,
        )
        for turn in progress_bar(range(turns), "step times", generation.progress)
    ]
    seconds = [
        statistics.fmean(time.seconds for time in column) for column in zip(*times, strict=True)
    ]
    timed = []
    for (_, tree), step_seconds in zip(methods, seconds, strict=True):
        rate = compute_rate(count_tokens(base, head, tree, texts, generation))
        overhead = step_seconds / seconds[0]
        timed.append(
            TimedTree(
                batch=batch,
                context=texts.context,
                tree=tree.name,
                num_nodes=tree.num_nodes,
                depth=tree.depth,
                tokens_per_forward=rate.tokens_per_forward,
                step_overhead=overhead,
                speedup=rate.tokens_per_forward / overhead,
                interval=[bound / overhead for bound in rate.interval],
            )
        )
    fastest = max(range(len(timed)), key=lambda i: timed[i].speedup)
    timed[fastest] = replace(timed[fastest], chosen=True)
    return timed, TunedTree.of(methods[fastest][1], timed[fastest])


def count_tokens(
    base: FrozenBase,
    head: Head,
    tree: policies.TreePolicy,
    texts: TuningTexts,
    generation: GenerationSettings,
) -> list[DepthCounts]:
    """Count accepted drafts of a tree on the texts that judge trees, replayed if possible."""
    if fixed_tree(tree) is not None:
        return [replay(text.ranks, tree, text.source, text.tokens) for text in texts.test_texts]
    sources = tuple(text.source for text in texts.test_texts)
    generation = replace(generation, tree=tree, batch_size=8, sources=sources)
    prompts = [text.prompt for text in texts.test_texts]
    return [text.counts for text in decode_prompts(base, head, prompts, generation)]


def measure_acceptance(
    base: FrozenBase,
    head: Head,
    texts: Sequence[TuningTexts],
    traces: Sequence[Sequence[tune_trees.Trace]],
) -> tuned.AcceptanceRates:
    """Return the acceptance rates of drafted and copied tokens; `traces` are of the fit texts.

    Rates are those of a chain's steps: other positions, which accepted drafts skip, are easier.
    """
    all_texts = [text for group in texts for text in (*group.fit_texts, *group.test_texts)]
    counts = [replay(text.ranks, policies.chain(head.depth)) for text in all_texts]
    lookups = [lookup_drafts(*text.tokens, max(COPIED)) for text in all_texts]
    test_tokens = [text.tokens for group in texts for text in group.test_texts]
    return tuned.AcceptanceRates(
        per_depth=DepthCounts.total(counts, head.depth).levels(),
        matches=tune_trees.match_rates(lookups, max(COPIED)),
        curves=tune_trees.calibrate(
            [trace for group in traces for trace in group],
            trace_texts(base, head, test_tokens),
            head.depth,
        ),
    )


def tuning_table(measured: Tuned) -> ConsoleTable:
    """Return the timed trees as a table for the console."""
    rows = [
        (
            f"{tree.batch}, {tree.context}",
            tree.tree + (" *" if tree.chosen else ""),
            str(tree.num_nodes),
            f"{tree.tokens_per_forward:.2f}",
            f"{tree.step_overhead:.2f}",
            with_interval(tree.speedup, tree.interval),
        )
        for tree in measured.tried
    ]
    columns = "batch, context", "tree (* chosen)", "nodes", "tokens per forward", "step time"
    error = measured.cost_error
    title = (
        f"ways to draft, timed; costs fitted to {error['points']:.0f} step times are off by "
        f"{error['median']:.1%} (median), {error['largest']:.1%} (largest)"
    )
    return ConsoleTable(title, rows, (*columns, "speed-up"), num_names=2)
