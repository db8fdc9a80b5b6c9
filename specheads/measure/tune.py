"""Choose a draft tree for this machine: fit step times, predict, time the best, choose."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import PromptSet
from specheads.decoding.cost import StepCost
from specheads.decoding.engine import can_verify
from specheads.decoding.trees import policies, tuned
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.tuned import (
    TimedTree,
    Tuned,
    TunedTree,
    candidate_policies,
    fixed_tree,
)
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
from specheads.measure.summary import ConsoleTable, with_interval
from specheads.measure.tune_trees import (
    Trace,
    TuningTexts,
    trace_texts,
    validation_prompts,
    write_texts,
)
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
    return Tuner(base, head, generation, max_nodes).tune(texts, batch_sizes)


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
    measured = Tuner(base, head, generation, QUICK_NODES, quick=True).tune([texts], [batch])
    return measured.trees[0].policy(), measured


@dataclass(frozen=True)
class Tuner:
    """Chooses trees for a head by measurements on texts."""

    base: FrozenBase
    head: Head
    generation: GenerationSettings
    max_nodes: int
    """Most nodes of a head's tree, root included."""
    quick: bool = False
    """Take fewer steps, among trees that can be replayed."""

    def tune(self, texts: Sequence[TuningTexts], batches: Sequence[int]) -> Tuned:
        """Choose a tree at each batch size and at the context length of each of the texts."""
        base, ranks = self.base, [text.ranks for group in texts for text in group.fit_texts]
        trees = tune_trees.candidate_trees(ranks, self.head.depth, self.max_nodes)
        trees = [tree for tree in trees if can_verify(base, tree)]
        # a quick choice times its finalists, whatever the fit predicts
        cost, error = measure_until_it_fits(
            partial(self.measure_cost, texts, trees, batches), is_required=not self.quick
        )
        traces = [
            trace_texts(base, self.head, [text.tokens for text in group.fit_texts])
            for group in texts
        ]
        timed, chosen = list[TimedTree](), list[TunedTree]()
        for group, group_traces in zip(texts, traces, strict=True):
            stops = list[policies.TreePolicy]()
            if group_traces and not self.quick:
                stop = tune_trees.best_stop(group_traces, cost, group.context)
                stops = [stop] if stop and stop.num_nodes <= self.max_nodes else []
            for batch in batches:
                finalists = self.choose_finalists(group, trees, cost, batch)
                times, tree = self.time_finalists([*finalists, *stops], group, batch)
                timed += times
                chosen.append(tree)
        return Tuned(
            machine=tuned.Machine.of(base.device, base.dtype),
            base=base.fingerprint,
            cost=cost,
            cost_error=error,
            acceptance=self.measure_acceptance(texts, traces),
            trees=chosen,
            tried=timed,
            new_tokens=self.generation.max_new_tokens,
        )

    def measure_cost(
        self, texts: Sequence[TuningTexts], trees: Sequence[policies.Static], batches: Sequence[int]
    ) -> tuple[StepCost, CostError]:
        """Time steps of chains and trees of many sizes; return the fitted cost and its error."""
        grid = [policies.NOTHING, *(tree for tree in trees if tree.name == "chain")]
        by_size = {tree.num_nodes: tree for tree in trees if tree.name == "tree"}
        grid += [by_size[size] for size in GRID if size in by_size]
        # all batch sizes and contexts in turns, because a machine changes its pace within minutes
        runs = [
            ((self.head if tree.depth else None, tree), group.rows(batch))
            for group, batch, tree in product(texts, batches, grid)
            if batch * tree.num_nodes <= MAX_TOKENS
        ]
        methods, rows = zip(*runs, strict=True)
        rounds = 3 if self.quick else 5
        times = time_steps(self.base, methods, rows, generation=self.generation, rounds=rounds)
        return fit_cost(times)

    def choose_finalists(
        self, texts: TuningTexts, trees: Sequence[policies.Static], cost: StepCost, batch: int
    ) -> list[policies.TreePolicy]:
        """Return the trees to time at a batch size, as far as the context has room for them.

        These are the best by prediction, two of another size, the best chain and, unless the choice
        is quick, those of `candidate_policies`, some also with prompt lookup.
        """
        ranks, head = [text.ranks for text in texts.test_texts], self.head
        ordered = sorted(
            trees, key=lambda tree: -tune_trees.predict(tree, ranks, cost, batch, texts.context)
        )
        best, chain = ordered[0], next(tree for tree in ordered if tree.name == "chain")
        other_sizes = [tree for tree in ordered if abs(tree.num_nodes - best.num_nodes) > 1]
        finalists: list[policies.TreePolicy] = [best, chain]
        if not self.quick:
            sizes = best.num_nodes, self.max_nodes
            finalists += candidate_policies(head.depth, head.drafted_size, *sizes)
        hybrids = [HybridTree(tree, size) for tree in dict.fromkeys(finalists) for size in COPIED]
        distinct = dict.fromkeys([*finalists, *other_sizes[:2], *hybrids])
        longest = self.base.max_length - texts.context
        possible = [tree for tree in distinct if can_verify(self.base, tree)]
        return [tree for tree in possible if tokens_after(tree.depth) <= longest]

    def time_finalists(
        self, trees: Sequence[policies.TreePolicy], texts: TuningTexts, batch: int
    ) -> tuple[list[TimedTree], TunedTree]:
        """Time the base alone and trees, count tokens on other texts; return all and the best."""
        methods = [(None, policies.NOTHING), *((self.head, tree) for tree in trees)]
        rounds = 6 if self.quick else 8
        turns, silent = max(1, rounds // batch), replace(self.generation, progress=False)
        # the number of prompt-lookup tokens differs from text to text: each turn continues others
        times = [
            time_steps(
                self.base,
                methods,
                [texts.rows(batch, turn * batch)] * len(methods),
                generation=silent,
                rounds=rounds // turns,
            )
            for turn in progress_bar(range(turns), "step times", self.generation.progress)
        ]
        seconds = [
            statistics.fmean(time.seconds for time in column) for column in zip(*times, strict=True)
        ]
        timed = []
        for (_, tree), step_seconds in zip(methods, seconds, strict=True):
            rate = compute_rate(self.count_tokens(tree, texts))
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

    def count_tokens(self, tree: policies.TreePolicy, texts: TuningTexts) -> list[DepthCounts]:
        """Count accepted drafts of a tree on the texts that judge trees, replayed if possible."""
        if fixed_tree(tree) is not None:
            return [replay(text.ranks, tree, text.source, text.tokens) for text in texts.test_texts]
        sources = tuple(text.source for text in texts.test_texts)
        generation = replace(self.generation, tree=tree, batch_size=8, sources=sources)
        prompts = [text.prompt for text in texts.test_texts]
        decoded = decode_prompts(self.base, self.head, prompts, generation)
        return [text.counts for text in decoded]

    def measure_acceptance(
        self, texts: Sequence[TuningTexts], fit_traces: Sequence[Sequence[Trace]]
    ) -> tuned.AcceptanceRates:
        """Return the acceptance rates of drafted and copied tokens.

        Rates are those of a chain's steps: other positions, which accepted drafts skip, are easier.
        """
        depth, size = self.head.depth, max(COPIED)
        all_texts = [text for group in texts for text in (*group.fit_texts, *group.test_texts)]
        counts = [replay(text.ranks, policies.chain(depth)) for text in all_texts]
        lookups = [lookup_drafts(*text.tokens, size) for text in all_texts]
        test_texts = [text.tokens for group in texts for text in group.test_texts]
        test_traces = trace_texts(self.base, self.head, test_texts)
        traces = [trace for group in fit_traces for trace in group]
        return tuned.AcceptanceRates(
            per_depth=DepthCounts.total(counts, depth).levels(),
            matches=tune_trees.match_rates(lookups, size),
            curves=tune_trees.calibrate(traces, test_traces),
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
