"""Choose a draft tree for this machine: fit step times, predict, time the best, choose."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product

from specheads.base.model import FrozenBase
from specheads.config import Data
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import PromptSet
from specheads.decoding.cost import StepCost
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import AcceptanceRates, CostError, Machine, Tuned
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import GenerationSettings
from specheads.measure.offline import copied, replay
from specheads.measure.results import Candidate
from specheads.measure.tables import ConsoleTable, with_interval
from specheads.measure.tune_cost import TreeMethod, fit, room, time_steps
from specheads.measure.tune_finals import COPIED, finalists, stopping_chains, time_finals
from specheads.measure.tune_texts import TuningTexts, validation_prompts, write_texts
from specheads.measure.tune_trees import candidate_trees, match_rates

MOST_TOKENS = 512
"""Largest number of tokens of one forward in the cost fit: rows times nodes."""

CONTEXTS = (64, 512)
"""Default context lengths, as far as the base has room for them."""

GRID = (4, 8, 16, 32, 64)
"""Node counts of the trees in the cost fit; the chains are added."""

TUNING_TOKENS = 64
"""New tokens after each prompt when an evaluation chooses a tree."""

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
            f"a context needs room for {needed} tokens more, and the base holds "
            f"{base.max_length}: contexts can be at most {longest}, got "
            f"{max(contexts or CONTEXTS)}; lower contexts or new_tokens"
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
    lookup = PromptLookup(base.vocab_size, size, device=base.device)
    copies = [copied(lookup, text.prompt, text.continuation, size) for text in every]
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
) -> tuple[StepCost, CostError]:
    """Time chains and trees of several sizes at every batch size and context; fit costs to it."""
    sizes = {one.num_nodes: one for one in trees if one.name == "tree"}
    grid = [one for one in trees if one.name == "chain"]
    grid += [sizes[size] for size in GRID if size in sizes]
    methods: list[TreeMethod] = []
    prompts: list[list[list[int]]] = []
    # all batch sizes and contexts in turns, because a machine changes its pace within minutes
    for one, batch in product(texts, batches):
        own = [tree for tree in grid if batch * tree.num_nodes <= MOST_TOKENS]
        methods += [(None, policies.NOTHING), *((head, tree) for tree in own)]
        prompts += [one.rows(batch)] * (1 + len(own))
    return fit(time_steps(base, methods, prompts, generation=generation, rounds=rounds))


# --- the tree of an evaluation -----------------------------------------------------------------


def decoded_context(prompts: PromptSet, max_new_tokens: int) -> int:
    """Return the context length of a typical text of an evaluation, half of it decoded."""
    lengths = [len(prompt.tokens) for prompt in prompts.prompts]
    return round(statistics.median(lengths) + max_new_tokens / 2)


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


# --- tables ------------------------------------------------------------------------------------


def tables(tuned: Tuned) -> Iterator[ConsoleTable]:
    """Yield the measurements as tables for the console."""
    cost, error = tuned.cost, tuned.cost_error
    rows = [
        (name, *(f"{1e6 * value:.3g}" for value in (one.fixed, one.token, one.context)))
        for name, one in (("verify", cost.verify), ("draft a level", cost.draft))
    ]
    title = (
        f"costs in microseconds; fitted to {error.points} times, off by {error.median:.1%} "
        f"(median), {error.largest:.1%} (largest)"
    )
    yield ConsoleTable(title, rows, ("forward", "fixed", "a token", "a position"))
    tried = [
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
    yield ConsoleTable("ways to draft, timed", tried, (*columns, "speed-up"))
