"""Choose a draft tree for this machine: fit step times, predict, time the best, choose."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config import Data, Tune
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt, PromptSet
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
from specheads.measure.tune_finals import (
    COPIED,
    Effort,
    methods_to_time,
    time_methods_for_real,
)
from specheads.measure.tune_texts import TuningTexts, validation_prompts, write_texts
from specheads.measure.tune_trees import candidate_trees, match_rates, path_rates

MOST_TOKENS = 512
"""Largest number of tokens of one forward in the cost fit: rows times nodes."""

CONTEXTS = (64, 512)
"""Default context lengths, as far as the base has room for them."""

GRID = (4, 8, 16, 32, 64)
"""Node counts of the trees in the cost fit; the chains are added."""

TUNING_TOKENS = 64
"""New tokens after each prompt when an evaluation chooses a tree."""

QUICK = Effort(max_nodes=16, grid_rounds=3, rounds=6, decodes=False)
"""Effort of an evaluation. It chooses among trees that can be replayed."""


def tune_head(base: FrozenBase, head: Head, settings: Tune) -> Tuned:
    """Choose a tree for each batch size and context length in the settings."""
    needed = max(settings.new_tokens, room(head.depth + max(COPIED)))
    longest = base.max_length - needed
    contexts = settings.contexts or [one for one in CONTEXTS if one <= longest]
    if not contexts or max(contexts) > longest:
        raise InputError(
            f"a context needs room for {needed} tokens more, and the base holds "
            f"{base.max_length}: contexts can be at most {longest}, got "
            f"{max(contexts or CONTEXTS)}; lower contexts or new_tokens"
        )
    generation = GenerationSettings(max_new_tokens=settings.new_tokens, progress=True)
    texts = []
    for one in contexts:
        prompts = _prompts(base, settings, one, longest)
        each = replace(generation, sources=tuple(prompt.source for prompt in prompts))
        texts.append(write_texts(base, head, [prompt.tokens for prompt in prompts], one, each))
    effort = Effort(max_nodes=settings.max_nodes)
    return choose(base, head, texts, settings.batch_sizes, generation, effort)


def _prompts(base: FrozenBase, settings: Tune, context: int, longest: int) -> list[Prompt]:
    """Return whole validation prompts of about `context` tokens, and at most `longest`.

    Windows of a corpus have exactly this length. Questions of users have any length, so the
    nearest of four times as many prompts are taken: a truncated prompt has less to copy.
    """
    if base.tokenizer is None:
        raise InputError(f"tuning reads text: the base {base.name} needs a tokenizer")
    wanted = base.tokenizer, context, 4 * settings.num_prompts, settings.seed
    found = [
        one for one in validation_prompts(settings.data, *wanted) if len(one.tokens) <= longest
    ]
    if len(found) < 2:
        raise InputError(
            f"tuning needs 2 prompts of about {context} tokens, got {len(found)}; lower contexts"
        )
    nearest = sorted(range(len(found)), key=lambda place: abs(len(found[place].tokens) - context))
    return [found[place] for place in sorted(nearest[: settings.num_prompts])]


def choose(
    base: FrozenBase,
    head: Head,
    texts: Sequence[TuningTexts],
    batches: Sequence[int],
    generation: GenerationSettings,
    effort: Effort,
) -> Tuned:
    """Choose a tree at each batch size and at the context length of each of the texts."""
    grown = [rows for one in texts for rows in one.grown.ranks]
    trees = candidate_trees(grown, head.depth, effort.max_nodes)
    cost, error = measure_cost(base, head, texts, trees, batches, generation, effort.grid_rounds)
    lookup = PromptLookup(base.vocab_size, max(COPIED), device=base.device)
    tried, chosen = [], []
    for one in texts:
        methods = methods_to_time(base, head, one, trees, cost, batches, effort)
        for batch in batches:
            rows, tree = time_methods_for_real(
                base, one, methods[batch], cost, batch, generation, effort.rounds
            )
            tried += rows
            chosen.append(tree)
    return Tuned(
        machine=Machine.of(base.device, base.dtype),
        base=base.fingerprint,
        cost=cost,
        cost_error=error,
        acceptance=AcceptanceRates(
            per_depth=_chain_rates([rows for one in texts for rows in one.ranks], head.depth),
            by_context=[path_rates(one.ranks, one.context) for one in texts],
            matches=match_rates(
                [copied(lookup, *pair, max(COPIED)) for one in texts for pair in one.pairs()]
            ),
        ),
        trees=chosen,
        tried=tried,
        new_tokens=generation.max_new_tokens,
    )


def _chain_rates(ranks: Sequence[Tensor], depth: int) -> list[float]:
    """Return how often the best guess of each depth is right in the steps of a chain.

    A mean over all positions would include those that accepted drafts skip, which are easier.
    """
    counts = [replay(rows, policies.chain(depth)) for rows in ranks]
    return DepthCounts.total(counts, depth).levels()


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
    """Return the tree of `tree=tuned` for an evaluation: the tuned tree, or one chosen now."""
    sampling, batch = generation.sampling, generation.batch_size
    if head.tuned and head.tuned.fits(base.device, base.dtype) and sampling.temperature == 0:
        return head.tuned.best(batch, context).policy(), None
    assert base.tokenizer is not None
    found = validation_prompts(corpus, base.tokenizer, prompt_tokens, num_prompts, sampling.seed)
    prompts = [one for one in found if len(one.tokens) <= base.max_length // 2] or found[:1]
    sources = tuple(one.source for one in prompts)
    generation = replace(generation, max_new_tokens=TUNING_TOKENS, sources=sources)
    context = max(min(context, base.max_length - room(head.depth)), 1)
    texts = write_texts(base, head, [one.tokens for one in prompts], context, generation)
    tuned = choose(base, head, [texts], [batch], generation, QUICK)
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
        (
            name,
            *(f"{1e6 * value:.3g}" for value in (one.fixed, one.several, one.token, one.context)),
            str(one.free),
            f"{one.power:g}",
        )
        for name, one in (("verify", cost.verify), ("draft a level", cost.draft))
    ]
    title = (
        f"costs in microseconds; fitted to {error.points} times, off by {error.median:.1%} "
        f"(median), {error.largest:.1%} (largest), {error.held_out:.1%} (held out)"
    )
    columns = "forward", "fixed", "beyond one token", "a token", "a position", "free tokens"
    yield ConsoleTable(title, rows, (*columns, "power of tokens"))
    tried = [
        (
            str(one.batch),
            str(one.context),
            one.tree + (" *" if one.chosen else ""),
            str(one.num_nodes),
            f"{one.tokens_per_forward:.2f}",
            f"{one.step_overhead:.2f}",
            with_interval(one.speedup, one.interval),
            "" if one.fitted is None else f"{one.fitted:.2f}",
        )
        for one in tuned.tried
    ]
    columns = ("batch", "context", "tree (* chosen)", "nodes", "tokens per forward", "step")
    yield ConsoleTable("ways to draft, timed", tried, (*columns, "speed-up", "by costs"))
