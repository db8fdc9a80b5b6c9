"""One step of the inference loop for a batch of rows: draft, verify, accept, commit.

Rows come and go between steps; see docs/serve.md.
"""

import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from specheads.base.cache import RowCache, upload
from specheads.base.compile import map_tensors, pad_batch, padded_rows, tensors_in
from specheads.base.forward import Verification
from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Memory
from specheads.core.features import Committed, Features
from specheads.core.kernels import without_cudnn_attention
from specheads.core.machine import synchronise
from specheads.core.tree import TokenTree
from specheads.decoding.accept import RULES, AcceptanceRule, Verdict
from specheads.decoding.processors import build_processors
from specheads.decoding.recorded import DraftRecorder
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState
from specheads.decoding.suffix_decoding import LookupText, SuffixAutomaton
from specheads.decoding.trees.hybrid import HybridTree, remove_lookup
from specheads.decoding.trees.policies import TreePolicy, root_only


class StepTimes(NamedTuple):
    """Times of a step of the whole batch, in seconds of `time.perf_counter`."""

    began: float
    ended: float
    """When the verdict was on the host."""


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """Result of one base forward for one row, on the host."""

    tokens: list[int]
    """New tokens, the bonus last; the last step may exceed the limit."""
    path: list[int]
    """Accepted nodes with the root: `len(path) == len(tokens)`."""
    drafted: list[int]
    """Token of each node of the tree, the root first."""
    parents: list[int]
    """Parent of each node, -1 for the root and for padding."""
    times: StepTimes = field(compare=False)
    """Times of the step, shared by the rows of a batch. Equal steps may differ in them."""
    num_copied: int = 0
    """How many of the tree's last nodes were copied by prompt lookup."""

    @property
    def drafted_beyond(self) -> bool:
        """Whether a node below the last accepted one was refused."""
        return self.path[-1] in self.parents

    @property
    def num_drafted(self) -> int:
        """Number of nodes that the head drafted."""
        return len(self.drafted) - self.num_copied - 1

    @property
    def num_accepted(self) -> int:
        """Number of nodes that the head drafted and the base accepted."""
        return sum(node <= self.num_drafted for node in self.path) - 1


@dataclass(slots=True)
class DecodingState:
    """State of the running rows between two steps."""

    cache: RowCache
    committed: Committed
    """Tokens committed since the drafter read last, in one step or several."""
    memory: Memory | None
    sampling: SamplingState
    """Sampling settings, positions and noise of the rows."""
    texts: list[LookupText]
    """Each row's text up to the root, on the host, for prompt lookup."""
    recorded_drafts: DraftRecorder | None = None
    """What records the drafts of these rows; None before the first one."""

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, at least one, in this order."""
        index = upload(rows, self.committed.counts.device)
        self.cache.keep_rows(rows)
        self.committed = self.committed.keep(index)
        self.sampling = self.sampling.keep(rows)
        self.texts = [self.texts[row] for row in rows]
        if self.memory is not None:
            self.memory = self.memory.keep(index)

    @torch.inference_mode()
    def join(self, other: "DecodingState") -> None:
        """Append another state's rows; the other state must not be used again."""
        self.cache.join(other.cache)
        self.committed = self.committed.join(other.committed)
        self.sampling = self.sampling.join(other.sampling)
        self.texts += other.texts
        if self.memory is not None and other.memory is not None:
            self.memory = self.memory.join(other.memory)


PARTS = ("draft", "verify", "accept", "host")
"""Parts of a step in order: the tree, the base's forward, the rule with the copy of its verdict to
the host, and the rest, which commits the accepted path. A recorded rule commits it itself."""


@dataclass(slots=True)
class StepLedger:
    """Seconds of each part of decoding steps, summed over steps of whole batches.

    The device is synchronised at the end of each part in `synchronised`, so that its work counts
    where it was launched. That takes time on CUDA: a step with a ledger is slower. Without a device
    the ledger stays empty.
    """

    device: torch.device | None
    synchronised: tuple[str, ...] = PARTS
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_steps: int = 0
    _last: float = 0.0

    def begin_step(self) -> None:
        """Start the clock of a step."""
        if self.device is not None:
            synchronise(self.device)
            self.num_steps += 1
            self._last = time.perf_counter()

    def end_part(self, name: str) -> None:
        """Add the time since the last call to a part."""
        if self.device is not None:
            if name in self.synchronised:
                synchronise(self.device)
            clock = time.perf_counter()
            self.seconds[name] += clock - self._last
            self._last = clock


NO_LEDGER = StepLedger(None)
"""Measures nothing."""


@torch.inference_mode()
def step(
    base: FrozenBase,
    drafter: Drafter | None,
    tree: TreePolicy,
    acceptance: AcceptanceRule,
    state: DecodingState,
    *,
    ledger: StepLedger = NO_LEDGER,
) -> list[DecodingStep]:
    """Decode one step for every row and advance `state`; without a drafter, with the base alone.

    A drafter with a memory reads the tokens of steps without a draft when it drafts again, or when
    there are as many as it reads at once. `ledger` adds up the seconds of the step's parts.
    """
    ledger.begin_step()
    began = time.perf_counter()
    # draft
    state.sampling.depth = tree.depth
    unread = None
    with without_cudnn_attention(base.device):
        drafted = grow_tree(base, drafter, tree, state)
        if drafter is not None and not tree.draft_depth and state.memory is not None:
            if state.committed.next_tokens.shape[1] < drafter.max_unread_positions:
                unread = state.committed
                if base.forwards.graphs is not None:
                    # a recorded step overwrites what the one before returned
                    unread = map_tensors(torch.clone, unread)
            else:
                drafter.store_committed(state.committed, state.memory)
    ledger.end_part("draft")
    # verify
    verified = base.verify(drafted, state.cache, drafter.aux_layers if drafter else ())
    ledger.end_part("verify")
    # accept
    accepted = accept_drafts(base, acceptance, drafted, verified, state, tree.depth)
    drafted, verdict, committed = accepted
    rows = copy_to_host(drafted, verdict)
    steps = decode_rows(rows, drafted, StepTimes(began, time.perf_counter()))
    ledger.end_part("accept")
    # commit
    state.cache.commit([row.path for row in steps], moved=committed is not None)
    if committed is None:
        width = max(len(row.path) for row in steps)
        padded = [row.tokens + row.tokens[-1:] * (width - len(row.tokens)) for row in steps]
        features = verified.features.gather(verdict.path[:, :width])
        committed = Committed(features, upload(padded, verdict.path.device), verdict.count)
    state.committed = committed
    state.sampling.advance(state.committed.next_tokens, state.cache.positions)
    for text, row in zip(state.texts, steps, strict=True):
        text.extend(row.tokens)
    if unread is not None:
        state.committed = unread.append(state.committed)
    ledger.end_part("host")
    return steps


def grow_tree(
    base: FrozenBase, drafter: Drafter | None, tree: TreePolicy, state: DecodingState
) -> TokenTree:
    """Draft one tree per row: from a recording if the base has fixed shapes and all allow it."""
    head_tree, recorder, memory = remove_lookup(tree), base.forwards.graphs, state.memory
    can_record = head_tree.can_record and not state.sampling.has_processors
    if recorder is None or drafter is None or not (can_record and drafter.can_record):
        return tree.grow(drafter, state.committed, memory, state.sampling, state.texts)
    recorded_drafts = state.recorded_drafts
    if recorded_drafts is None:
        spare = base.spare_recordings.setdefault(drafter, deque(maxlen=1))
        recorded_drafts = spare.pop() if spare else DraftRecorder(recorder)
        state.recorded_drafts = recorded_drafts
        # the next rows reuse the recordings when these have ended
        weakref.finalize(state.cache, spare.append, recorded_drafts).atexit = False
    inputs = state.committed, memory, state.sampling, state.cache.longest
    drafted, state.memory = recorded_drafts.grow(drafter, head_tree, *inputs)
    return tree.add_copied(drafted, state.texts) if isinstance(tree, HybridTree) else drafted


def accept_drafts(
    base: FrozenBase,
    acceptance: AcceptanceRule,
    tree: TokenTree,
    verified: Verification,
    state: DecodingState,
    depth: int,
) -> tuple[TokenTree, Verdict, Committed | None]:
    """Accept drafts; a base with fixed shapes also commits all nodes of their paths at once.

    That takes no value from the host, so it is recorded with the rules of this package. The tree is
    returned because a base alone has it in what the last step committed, which is overwritten.
    """
    recorder, cache = base.forwards.graphs, state.cache
    if recorder is None or not cache.static:
        return tree, acceptance(tree, verified.logits, verified.ancestors, state.sampling), None
    noise, num_rows = state.sampling.noise, len(tree.tokens)

    def accept(
        tree: TokenTree, sampling: SamplingState, *places: Tensor
    ) -> tuple[TokenTree, Verdict, Committed]:
        sampling.noise = noise
        # a recording has as many rows as the outputs
        outputs = map_tensors(lambda tensor: tensor[: len(tree.tokens)], verified.outputs)
        verdict = acceptance(tree, outputs[0], tree.ancestors(), sampling)
        path = verdict.path[:, : depth + 1]
        with cache.at(places):
            cache.move(path)
        # after the last accepted node the bonus follows, and is the padding
        is_node = torch.arange(1, path.shape[1] + 1, device=path.device) < verdict.count[:, None]
        tokens = tree.tokens.gather(1, path.roll(-1, dims=1))
        tokens = torch.where(is_node, tokens, verdict.bonus[:, None])
        features = Features(*outputs[1:], tokens=tree.tokens).gather(path)
        return tree, verdict, Committed(features, tokens, verdict.count)

    tree = replace(tree, ancestor_mask=verified.ancestors)
    if state.sampling.has_processors or acceptance not in RULES.values():
        return accept(tree, state.sampling, *cache.places(num_rows))
    branches = tree.branch_sampling and tree.branch_sampling.branches
    key = ("acceptance", acceptance, depth, branches, *state.sampling.shape_key)
    inputs = tree, state.sampling.draft_inputs()
    if places := cache.places(padded_rows(num_rows)):
        inputs = pad_batch(inputs, num_rows)
    buffers = [*cache.buffers, *tensors_in((verified.outputs, noise))]
    accepted = recorder(cache.graphs, key, accept, (*inputs, *places), buffers)
    return map_tensors(lambda tensor: tensor[:num_rows], accepted)


def copy_to_host(tree: TokenTree, verdict: Verdict) -> list[list[int]]:
    """Copy verdict and tree to the host: the only synchronisation of a step."""
    ends = [verdict.count[:, None], verdict.bonus[:, None]]
    return torch.cat([*ends, tree.tokens, tree.parents, verdict.path], dim=1).tolist()


def decode_rows(rows: list[list[int]], tree: TokenTree, times: StepTimes) -> list[DecodingStep]:
    """Return the step of each row from the values that `copy_to_host` returned."""
    size = tree.tokens.shape[1]
    steps = []
    for count, bonus, *row in rows:
        drafted, parents, path = row[:size], row[size : 2 * size], row[2 * size :][:count]
        tokens = [*(drafted[node] for node in path[1:]), bonus]
        steps.append(DecodingStep(tokens, path, drafted, parents, times, tree.num_copied))
    return steps


@torch.inference_mode()
def start(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    capacity: int,
    sampling: list[Sampling] | None = None,
    cache: RowCache | None = None,
    coupled: bool = True,
    eos_ids: Sequence[Sequence[int]] = (),
    memory: SuffixAutomaton | None = None,
) -> tuple[DecodingState, list[int]]:
    """Read the prompts with base and drafter; return the state and each row's first token.

    A row has at most `capacity` tokens, with the nodes of its last tree. By default rows are greedy
    and their cache is contiguous. `eos_ids` are those of each row; `memory` is that of
    `Engine`. Raises PoolFullError if the cache's pool cannot hold the prompts.
    """
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    padded = padded.to(base.device)
    cache = base.cache(batch, capacity) if cache is None else cache
    head_memory = drafter.memory(batch, capacity) if drafter else None
    aux_layers = drafter.aux_layers if drafter else ()
    logits, features = base.prefill(padded, cache, lengths, aux_layers)
    counts = upload(lengths, base.device)
    text = pad(padded, (0, capacity - padded.shape[1]))
    sampling = sampling or [GREEDY] * batch
    rows = zip(sampling, lengths, eos_ids or [()] * batch, strict=True)
    processors = [build_processors(*row, base.device) for row in rows]
    state = SamplingState(
        sampling, counts - 1, text, logits.shape[-1], logits.dtype, coupled, processors
    )
    root = root_only(Committed(features, padded, counts))
    # there is no draft yet: under every rule the first token is the base's own
    first = state.choose(root, logits[:, None], root.ancestors())
    state.advance(first, counts)
    roots = first[:, 0].tolist()
    pairs = zip(prompts, roots, strict=True)
    texts = [LookupText([*prompt, root], memory) for prompt, root in pairs]
    next_tokens = padded.roll(-1, dims=1).scatter(1, counts[:, None] - 1, first)
    committed = Committed(features, next_tokens, counts)
    if drafter is None or head_memory is None:
        committed = committed.last_positions()
    elif min(lengths) > 1:
        # all but the last position are read, so that rows that join are not wider than others
        with without_cudnn_attention(base.device):
            drafter.store_committed(replace(committed, counts=counts - 1), head_memory)
        committed = committed.last_positions()
    return DecodingState(cache, committed, head_memory, state, texts), roots


class Origin(NamedTuple):
    """Origin of one token."""

    kind: Literal["base", "drafted", "copied"]
    depth: int
    """Depth in the tree; zero for the base's own tokens."""

    def __str__(self) -> str:
        """Return a short description."""
        return "the base's own" if self.kind == "base" else f"{self.kind} at depth {self.depth}"


BASE_ORIGIN = Origin("base", 0)


def node_origins(parents: Sequence[int], num_copied: int) -> list[Origin]:
    """Return the origin of each node of a tree; the root is the base's own token."""
    first_copied = len(parents) - num_copied
    origins = [BASE_ORIGIN]
    for node, parent in enumerate(parents[1:], start=1):
        kind = "copied" if node >= first_copied else "drafted"
        # a node without a parent is padding and never accepted
        origins.append(Origin(kind, origins[parent].depth + 1 if parent >= 0 else 0))
    return origins


def step_origins(step: DecodingStep) -> list[Origin]:
    """Return the origin of each of `step.tokens`; the last one is the base's own."""
    origins = node_origins(step.parents, step.num_copied)
    return [*(origins[node] for node in step.path[1:]), BASE_ORIGIN]
