"""The inference loop: grow, verify, accept, commit; the base alone is the loop without a draft."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads import accept, grow
from specheads.base import FrozenBase, Verification
from specheads.cache import KVCache
from specheads.drafter import Drafter, Features, Memory
from specheads.tree import TokenTree

Accept = Callable[[TokenTree, Tensor, Tensor], accept.Verdict]


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

    cache: KVCache
    features: Features
    """The base at the positions committed last."""
    tokens: Tensor
    """(batch, time): the token after each of those positions; the last counted is the root."""
    count: Tensor
    """(batch): how many of those positions count in each row."""
    memory: Memory | None


@torch.inference_mode()
def step(
    base: FrozenBase,
    drafter: Drafter | None,
    policy: grow.Policy,
    rule: Accept,
    state: State,
) -> list[Step]:
    """Decode one step for every row and advance `state`."""
    taps = drafter.taps if drafter is not None else ()
    if drafter is None:
        tree = grow.root_only(state.tokens, state.count)
    else:
        tree = policy.grow(drafter, state.features, state.tokens, state.count, state.memory)
    verified = base.verify(tree, state.cache, taps)
    verdict = rule(tree, verified.logits, verified.ancestors)
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


@torch.inference_mode()
def start(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    capacity: int,
    rule: Accept = accept.greedy,
) -> tuple[State, list[Step]]:
    """Read the prompts; return the loop's state and each row's first token as a step."""
    batch = len(prompts)
    counts = [len(prompt) for prompt in prompts]
    padded = torch.zeros(batch, max(counts), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    padded = padded.to(base.device)
    cache = base.cache(batch, capacity)
    memory = drafter.memory(batch, capacity) if drafter is not None else None
    read = base.prefill(padded, cache, counts, drafter.taps if drafter is not None else ())
    count = torch.tensor(counts, device=base.device)
    rows = torch.arange(batch, device=base.device)
    root = grow.root_only(padded, count)
    first = rule(root, read.logits[rows, count - 1][:, None], root.ancestors()).bonus
    following = torch.cat([padded[:, 1:], padded[:, :1]], dim=1)
    following[rows, count - 1] = first
    state = State(cache, read.features, following, count, memory)
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
    seed: int = 0,
    tree: grow.Policy | None = None,
    rule: Accept | None = None,
    stop_at_eos: bool = True,
) -> Decoding:
    """Decode prompts, several tokens a forward where the head's guesses are right.

    At temperature zero the output is that of the base alone, token for token (up to ties in
    rounding: see docs/losslessness.md); above it, it has the base's own law.

    Args:
        base: The model that decides.
        head: The drafter that guesses; None decodes with the base alone, in the same loop.
        prompts: Token ids; none may be empty.
        max_new_tokens: Limit for each prompt.
        temperature: Zero is greedy; above it tokens are sampled.
        top_k: Tokens sampled from, the likeliest ones. Zero samples from all.
        seed: Of sampling.
        tree: How drafts grow; None is a chain as deep as the head.
        rule: What is kept of a verified tree; None is what the temperature asks for.
        stop_at_eos: Whether the base's end-of-text token ends a row.

    Raises:
        ValueError: A prompt is empty, or prompt, new tokens and tree exceed the context.
    """
    policy = grow.NOTHING if head is None else tree if tree is not None else grow.chain(head.depth)
    _refuse(base, head, prompts, max_new_tokens, policy)
    if not prompts or max_new_tokens == 0:
        return Decoding([[] for _ in prompts], [0] * len(prompts), [[] for _ in prompts])
    if rule is None:
        rule = (
            accept.Sampling(temperature, top_k=top_k, seed=seed) if temperature else accept.greedy
        )
    # a row may overshoot its limit by one draft, and the tree of its last step needs slots too
    capacity = max(map(len, prompts)) + max_new_tokens + 2 * policy.num_nodes
    state, first = start(base, head, prompts, capacity, rule)
    eos = set(base.eos_ids) if stop_at_eos else set()
    tokens = [list(taken.tokens) for taken in first]
    steps: list[list[Step]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    while live := _drop_finished(state, head, live, tokens, max_new_tokens, eos):
        for row, taken in zip(live, step(base, head, policy, rule, state), strict=True):
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
