"""Tune a head to this machine: measure costs and acceptance, search, time the best, choose."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config import Tune
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt
from specheads.decoding.cost import StepCost
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import Acceptance, CostError, Machine, Tuned
from specheads.measure.counts import DepthCounts
from specheads.measure.how import How
from specheads.measure.replay import copied, replay
from specheads.measure.tables import Fitted, with_interval
from specheads.measure.tune import search
from specheads.measure.tune.acceptance import match_rates, path_rates
from specheads.measure.tune.cost import Way, fit, room, time_ways
from specheads.measure.tune.finals import COPIED, Effort, finalists, judge
from specheads.measure.tune.texts import Texts, prompts_for, write

MOST_TOKENS = 512
"""Tokens of one forward that costs are fitted to: rows times nodes."""

CONTEXTS = (64, 512)
"""Tokens of the text so far, as far as the base holds them, where none are asked for."""

GRID = (4, 8, 16, 32, 64)
"""Nodes of the trees that costs are fitted to, besides the chains."""


def tune_head(base: FrozenBase, head: Head, settings: Tune) -> Tuned:
    """Choose how a head drafts, for each batch and context that the settings name."""
    needed = max(settings.new_tokens, room(head.depth + max(COPIED)))
    longest = base.max_length - needed
    contexts = settings.contexts or [one for one in CONTEXTS if one <= longest]
    if not contexts or max(contexts) > longest:
        raise InputError(
            f"a context needs room for {needed} tokens more, and the base holds "
            f"{base.max_length}: contexts can be at most {longest}, got "
            f"{max(contexts or CONTEXTS)}; lower contexts or new_tokens"
        )
    how = How(max_new_tokens=settings.new_tokens, progress=True)
    texts = []
    for one in contexts:
        prompts = _prompts(base, settings, one, longest)
        each = replace(how, sources=tuple(prompt.source for prompt in prompts))
        texts.append(write(base, head, [prompt.tokens for prompt in prompts], one, each))
    effort = Effort(max_nodes=settings.max_nodes)
    return choose(base, head, texts, settings.batch_sizes, how, effort)


def _prompts(base: FrozenBase, settings: Tune, context: int, longest: int) -> list[Prompt]:
    """Return validation prompts, whole, of about so many tokens, and at most of the longest.

    Windows of text have just as many. What users ask has the length that it has: of four times as
    many prompts those are taken that come nearest, since a prompt that is cut has less to copy.
    """
    if base.tokenizer is None:
        raise InputError(f"tuning reads text: the base {base.name} needs a tokenizer")
    asked = base.tokenizer, context, 4 * settings.num_prompts, settings.seed
    found = [one for one in prompts_for(settings.data, *asked) if len(one.tokens) <= longest]
    if len(found) < 2:
        raise InputError(
            f"tuning needs 2 prompts of about {context} tokens, got {len(found)}; lower contexts"
        )
    nearest = sorted(range(len(found)), key=lambda place: abs(len(found[place].tokens) - context))
    return [found[place] for place in sorted(nearest[: settings.num_prompts])]


def choose(
    base: FrozenBase,
    head: Head,
    texts: Sequence[Texts],
    batches: Sequence[int],
    how: How,
    effort: Effort,
) -> Tuned:
    """Choose how a head drafts at each batch, and at the context of each of these texts.

    Texts and steps are sampled as `how` says, and drafts see the noise there or not.
    """
    grown = [rows for one in texts for rows in one.grown.ranks]
    trees = search.candidates(grown, head.depth, effort.max_nodes)
    cost, error = measure_cost(base, head, texts, trees, batches, how, effort.grid_rounds)
    lookup = PromptLookup(base.vocab_size, max(COPIED), device=base.device)
    tried, chosen = [], []
    for one in texts:
        ways = finalists(base, head, one, trees, cost, batches, effort)
        for batch in batches:
            rows, tree = judge(base, one, ways[batch], cost, batch, how, effort.rounds)
            tried += rows
            chosen.append(tree)
    return Tuned(
        machine=Machine.of(base.device, base.dtype),
        base=base.fingerprint,
        cost=cost,
        cost_error=error,
        acceptance=Acceptance(
            per_depth=_of_steps([rows for one in texts for rows in one.ranks], head.depth),
            by_context=[path_rates(one.ranks, one.context) for one in texts],
            matches=match_rates(
                [copied(lookup, *pair, max(COPIED)) for one in texts for pair in one.pairs()]
            ),
        ),
        trees=chosen,
        tried=tried,
        new_tokens=how.max_new_tokens,
    )


def _of_steps(ranks: Sequence[Tensor], depth: int) -> list[float]:
    """Return how often the best guess of each depth is right, in the steps of a chain.

    Of all places of a text more are easy: those that a right draft steps over.
    """
    counts = [replay(rows, policies.chain(depth)) for rows in ranks]
    return DepthCounts.total(counts, depth).levels()


def measure_cost(
    base: FrozenBase,
    head: Head,
    texts: Sequence[Texts],
    trees: Sequence[policies.Static],
    batches: Sequence[int],
    how: How,
    rounds: int,
) -> tuple[StepCost, CostError]:
    """Time chains and trees of several sizes at every batch and context; fit costs to that."""
    sizes = {one.num_nodes: one for one in trees if one.name == "tree"}
    grid = [one for one in trees if one.name == "chain"]
    grid += [sizes[size] for size in GRID if size in sizes]
    ways: list[Way] = []
    prompts: list[list[list[int]]] = []
    # of all batches and contexts in turn: a machine changes its pace within minutes
    for one, batch in product(texts, batches):
        own = [tree for tree in grid if batch * tree.num_nodes <= MOST_TOKENS]
        ways += [(None, policies.NOTHING), *((head, tree) for tree in own)]
        prompts += [one.rows(batch)] * (1 + len(own))
    return fit(time_ways(base, ways, prompts, how=how, rounds=rounds))


def tables(tuned: Tuned) -> Iterator[Fitted]:
    """Yield what was measured as tables for the console."""
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
    yield Fitted(title, rows, (*columns, "power of tokens"))
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
    yield Fitted("ways to draft, timed", tried, (*columns, "speed-up", "by costs"))
