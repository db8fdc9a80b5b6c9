"""One step of the inference loop for a batch of rows: grow, verify, accept, commit.

Rows come and go between steps; see docs/serving_loop.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.base.cache import RowCache, upload
from specheads.base.model import FrozenBase, Verification
from specheads.core.drafter import Drafter, Memory
from specheads.core.features import Features, stack_rows
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance import accept, rules
from specheads.decoding.acceptance.sampling import GREEDY, Rows, Sampling
from specheads.decoding.trees import policies


@dataclass(slots=True)
class Step:
    """What one forward of the base gave one prompt, on the host."""

    tokens: list[int]
    """What it added, the bonus last; more than was asked for at the very end."""
    path: list[int]
    """Accepted nodes, root included: `len(path) == len(tokens)`."""


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
    def keep(self, rows: list[int], drafter: Drafter | None) -> None:
        """Forget every row but these, at least one, in this order."""
        index = upload(rows, self.tokens.device)
        self.cache.keep_rows(rows)
        self.features = self.features.rows(index)
        self.tokens, self.count = self.tokens[index], self.count[index]
        self.rows = self.rows.keep(rows)
        if drafter is not None and self.memory is not None:
            self.memory = drafter.keep_rows(self.memory, index)

    @torch.inference_mode()
    def join(self, other: "State", drafter: Drafter | None) -> None:
        """Take over another state's rows, behind the own ones; the other is used up.

        Let each take a step first: until then what a row hands to its drafter is as wide as its
        prompt, and every neighbour would be padded to that.
        """
        self.cache.join(other.cache)
        self.features = self.features.join(other.features)
        self.tokens = stack_rows(self.tokens, other.tokens)
        self.count = torch.cat([self.count, other.count])
        self.rows = self.rows.join(other.rows)
        if drafter is not None and self.memory is not None:
            self.memory = drafter.join_rows(self.memory, other.memory)


@torch.inference_mode()
def step(
    base: FrozenBase,
    drafter: Drafter | None,
    policy: policies.TreePolicy,
    acceptance: rules.AcceptanceRule,
    state: State,
) -> list[Step]:
    """Decode one step for every row and advance `state`."""
    aux_layers = drafter.aux_layers if drafter is not None else ()
    if drafter is None:
        tree = policies.root_only(state.tokens, state.count)
    else:
        read = (state.features, state.tokens, state.count, state.memory)
        tree = policy.grow(drafter, *read, state.rows)
    verified = base.verify(tree, state.cache, aux_layers)
    verdict = acceptance(tree, verified.logits, verified.ancestors, state.rows)
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
    state.tokens = upload(padded, verdict.path.device)
    state.count = verdict.count
    state.rows.advance(state.tokens, state.cache.positions)


@torch.inference_mode()
def start(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    capacity: int,
    settings: list[Sampling] | None = None,
    cache: RowCache | None = None,
) -> tuple[State, list[Step]]:
    """Read the prompts; return the loop's state and each row's first token as a step.

    Args:
        base: The model that decides.
        drafter: What guesses; None decodes with the base alone.
        prompts: Token ids.
        capacity: Tokens of a row at most, the nodes of a last tree included.
        settings: How each row wants its tokens chosen; None is greedily.
        cache: Empty, a row a prompt; None is contiguous rows of this capacity.

    Raises:
        PoolFullError: The cache's pool cannot hold the prompts.
    """
    batch = len(prompts)
    counts = [len(prompt) for prompt in prompts]
    padded = torch.zeros(batch, max(counts), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    padded = padded.to(base.device)
    cache = base.cache(batch, capacity) if cache is None else cache
    memory = drafter.memory(batch, capacity) if drafter is not None else None
    aux_layers = drafter.aux_layers if drafter is not None else ()
    logits, features = base.prefill(padded, cache, counts, aux_layers)
    count = torch.tensor(counts, device=base.device)
    room = torch.zeros(batch, capacity - padded.shape[1], dtype=torch.long, device=base.device)
    text = torch.cat([padded, room], dim=1)
    rows = Rows(settings or [GREEDY] * batch, count - 1, text, logits.shape[-1])
    root = policies.root_only(padded, count)
    # there is no draft to judge yet: every rule begins with a token of the base's own
    first = rules.match(root, logits[:, None], root.ancestors(), rows).bonus
    rows.advance(first[:, None], count)
    following = torch.cat([padded[:, 1:], padded[:, :1]], dim=1)
    following[torch.arange(batch, device=base.device), count - 1] = first
    state = State(cache, features, following, count, memory, rows)
    return state, [Step([token], [0]) for token in first.tolist()]
