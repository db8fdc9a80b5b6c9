"""The inference loop: grow, verify, accept, commit; the base alone is the loop without a draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads import accept, grow, rules
from specheads.base import FrozenBase, Verification
from specheads.cache import RowCache
from specheads.drafter import Drafter, Features, Memory
from specheads.sampling import GREEDY, Rows, Sampling, each_prompt
from specheads.tree import TokenTree


@dataclass(slots=True)
class Step:
    """What one forward of the base gave one prompt, on the host."""

    tokens: list[int]
    """What it added, the bonus last; more than was asked for at the very end."""
    path: list[int]
    """Accepted nodes, root included: `len(path) == len(tokens)`."""


@dataclass(slots=True)
class Decoding:
    """What `generate` returns; every list has one entry a prompt."""

    tokens: list[list[int]]
    """The new tokens, cut at the limit and after the first end-of-text token."""
    forwards: list[int]
    """Base forwards each prompt took, prefill excluded."""
    steps: list[list[Step]] = field(default_factory=list)
    """The same forwards one by one, for measuring."""


@dataclass(slots=True)
class State:
    """What the loop carries from one step to the next, for the rows still decoding."""

    cache: RowCache
    features: Features
    """The base at the positions committed last."""
    tokens: Tensor
    """(batch, time): the token after each of those positions; the last counted is the root."""
    count: Tensor
    """(batch): how many of those positions count in each row."""
    memory: Memory | None
    rows: Rows
    """What rules and policies may know of the rows."""


@torch.inference_mode()
def step(
    base: FrozenBase,
    drafter: Drafter | None,
    policy: grow.Policy,
    rule: rules.Rule,
    state: State,
) -> list[Step]:
    """Decode one step for every row and advance `state`."""
    taps = drafter.taps if drafter is not None else ()
    if drafter is None:
        tree = grow.root_only(state.tokens, state.count)
    else:
        read = (state.features, state.tokens, state.count, state.memory)
        tree = policy.grow(drafter, *read, state.rows)
    verified = base.verify(tree, state.cache, taps)
    verdict = rule(tree, verified.logits, verified.ancestors, state.rows)
    steps = _read(tree, verdict)
    state.cache.commit([taken.path for taken in steps])
    _advance(state, verified, verdict, steps)
    return steps


def _read(tree: TokenTree, verdict: accept.Verdict) -> list[Step]:
    """Bring the verdict to the host: the one synchronisation of a step."""
    accepted = tree.tokens.gather(1, verdict.path)
    counts, bonus = verdict.count[:, None], verdict.bonus[:, None]
    rows = torch.cat([counts, bonus, verdict.path, accepted], dim=1).tolist()
    width = verdict.path.shape[1]
    return [
        Step(tokens=[*row[2 + width + 1 : 2 + width + row[0]], row[1]], path=row[2 : 2 + row[0]])
        for row in rows
    ]


def _advance(
    state: State, verified: Verification, verdict: accept.Verdict, steps: list[Step]
) -> None:
    width = max(len(taken.path) for taken in steps)
    state.features = verified.features.at(verdict.path[:, :width])
    padded = [taken.tokens + taken.tokens[-1:] * (width - len(taken.tokens)) for taken in steps]
    state.tokens = torch.tensor(padded, device=verdict.path.device)
    state.count = verdict.count
    state.rows.advance(state.tokens, state.cache.positions)


@torch.inference_mode()
def start(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    capacity: int,
    settings: list[Sampling] | None = None,
) -> tuple[State, list[Step]]:
    """Read the prompts; return the loop's state and each row's first token as a step.

    Args:
        base: The model that decides.
        drafter: What guesses; None decodes with the base alone.
        prompts: Token ids.
        capacity: Tokens of a row at most, the nodes of a last tree included.
        settings: How each row wants its tokens chosen; None is greedily.
    """
    batch = len(prompts)
    counts = [len(prompt) for prompt in prompts]
    padded = torch.zeros(batch, max(counts), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    padded = padded.to(base.device)
    cache = base.cache(batch, capacity)
    memory = drafter.memory(batch, capacity) if drafter is not None else None
    taps = drafter.taps if drafter is not None else ()
    logits, features = base.prefill(padded, cache, counts, taps)
    count = torch.tensor(counts, device=base.device)
    room = torch.zeros(batch, capacity - padded.shape[1], dtype=torch.long, device=base.device)
    text = torch.cat([padded, room], dim=1)
    rows = Rows(settings or [GREEDY] * batch, count - 1, text, logits.shape[-1])
    root = grow.root_only(padded, count)
    # there is no draft to judge yet: every rule begins with a token of the base's own
    first = rules.match(root, logits[:, None], root.ancestors(), rows).bonus
    rows.advance(first[:, None], count)
    following = torch.cat([padded[:, 1:], padded[:, :1]], dim=1)
    following[torch.arange(batch, device=base.device), count - 1] = first
    state = State(cache, features, following, count, memory, rows)
    return state, [Step([token], [0]) for token in first.tolist()]


@torch.inference_mode()
def generate(
    base: FrozenBase,
    head: Drafter | None,
    prompts: list[list[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    settings: Sequence[Sampling] | None = None,
    tree: grow.Policy | None = None,
    rule: str | rules.Rule = "match",
    stop_at_eos: bool = True,
) -> Decoding:
    """Decode prompts, several tokens a forward where the head's guesses are right.

    With the rule `match` the output is that of the base alone, token for token, at every
    temperature (up to ties in rounding: see docs/losslessness.md); with `rejection` it has the
    same law; with `typical` it has not, above temperature zero.

    Args:
        base: The model that decides.
        head: The drafter that guesses; None decodes with the base alone, in the same loop.
        prompts: Token ids; none may be empty.
        max_new_tokens: Limit for each prompt.
        temperature: Zero is greedy; above it tokens are sampled.
        top_k: Tokens sampled from, the likeliest ones. Zero samples from all.
        top_p: Probability that the tokens sampled from reach together. One is all.
        min_p: Probability they need, as a share of the likeliest one's. Zero is none.
        repetition_penalty: Of tokens already in the text. One is none.
        seed: Of sampling; each prompt draws with a seed of its own that follows from this one.
        settings: All of sampling for each prompt, in place of the ones above.
        tree: How drafts grow; None is a chain as deep as the head.
        rule: What is kept of a verified tree: "match", "rejection", "typical", or a function
            like those in `specheads.rules`.
        stop_at_eos: Whether the base's end-of-text token ends a row.

    Raises:
        ValueError: A prompt is empty, or prompt, new tokens and tree exceed the context, or a
            setting of sampling lies outside its range.
    """
    shared = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    each = each_prompt(shared if settings is None else settings, len(prompts))
    judge = rules.rule_named(rule) if isinstance(rule, str) else rule
    policy = grow.NOTHING if head is None else tree if tree is not None else grow.chain(head.depth)
    _refuse(base, head, prompts, max_new_tokens, policy)
    if not prompts or max_new_tokens == 0:
        return Decoding([[] for _ in prompts], [0] * len(prompts), [[] for _ in prompts])
    # a row may overshoot its limit by one draft, and the tree of its last step needs slots too
    capacity = max(map(len, prompts)) + max_new_tokens + 2 * policy.num_nodes
    state, first = start(base, head, prompts, capacity, each)
    eos = set(base.eos_ids) if stop_at_eos else set()
    tokens = [list(taken.tokens) for taken in first]
    steps: list[list[Step]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    while live := _drop_finished(state, head, live, tokens, max_new_tokens, eos):
        for row, taken in zip(live, step(base, head, policy, judge, state), strict=True):
            tokens[row] += taken.tokens
            steps[row].append(taken)
    return Decoding(
        [_cut(row, max_new_tokens, eos) for row in tokens], [len(row) for row in steps], steps
    )


def _drop_finished(
    state: State,
    drafter: Drafter | None,
    live: list[int],
    tokens: list[list[int]],
    limit: int,
    eos: set[int],
) -> list[int]:
    """Forget the rows that are done; return the prompts that the remaining rows belong to."""
    kept = [
        place
        for place, row in enumerate(live)
        if len(tokens[row]) < limit and not eos.intersection(tokens[row])
    ]
    if len(kept) < len(live) and kept:
        index = torch.tensor(kept, device=state.tokens.device)
        state.cache.keep_rows(kept)
        state.features = state.features.rows(index)
        state.tokens, state.count = state.tokens[index], state.count[index]
        state.rows = state.rows.keep(kept)
        if drafter is not None and state.memory is not None:
            state.memory = drafter.keep_rows(state.memory, index)
    return [live[place] for place in kept]


def _cut(tokens: list[int], limit: int, eos: set[int]) -> list[int]:
    """Return the tokens up to the limit and to the first end of text, that token included."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in eos), limit)
    return tokens[: min(end, limit)]


def _refuse(
    base: FrozenBase,
    head: Drafter | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    policy: grow.Policy,
) -> None:
    if empty := [place for place, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"a prompt needs at least one token; prompt {empty[0]} has none")
    if head is not None and policy.depth > head.depth:
        raise ValueError(
            f"the tree has {policy.depth} levels but the head drafts {head.depth}; "
            "choose a shallower tree"
        )
    longest = max(map(len, prompts), default=0)
    if longest + max_new_tokens > base.max_length:
        raise ValueError(
            f"prompt and new tokens must fit the context: {longest} + {max_new_tokens} exceed "
            f"{base.max_length}; shorten the prompt or max_new_tokens"
        )
