"""Tree policies: grow a token tree from a drafter's guesses."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.core.drafter import Drafter, State
from specheads.core.errors import InputError, require_integer
from specheads.core.features import Committed
from specheads.core.tree import BranchSampling, TokenTree, from_paths, level_sizes, refuse_nodes
from specheads.decoding import noise
from specheads.decoding.calibration import AcceptanceEstimate, acceptance_chances
from specheads.decoding.cost import RequestRates, StepLoad
from specheads.decoding.noise import likeliest
from specheads.decoding.sampling import CoupledDrafter, NodeScores, SamplingState, over_vocabulary
from specheads.decoding.suffix_decoding import LookupText


class TreePolicy:
    """Grows one tree per row with a drafter, level by level; subclasses have `draft` or `grow`."""

    name: str
    num_nodes: int
    """Nodes of every tree, with the root."""
    depth: int
    """Levels below the root."""
    num_guesses: int = 1
    """Most guesses taken after one node."""
    can_record: bool = False
    """Whether all its trees have one shape and `draft` reads nothing back: see recorded.py."""
    lookup_length: int = 0
    """Most tokens that prompt lookup copies in addition to drafted ones: see `hybrid`."""

    @property
    def draft_depth(self) -> int:
        """Levels that the drafter drafts, without copied text; with zero it reads nothing."""
        return self.depth

    @property
    def is_chain(self) -> bool:
        """Whether no node of its trees has two children."""
        return self.num_nodes == self.depth + 1 and self.num_guesses == 1

    def start_rates(self, text: LookupText) -> RequestRates:
        """Return the acceptance rates to follow for a new request with this text."""
        return RequestRates()

    def choose_policy(self, load: StepLoad) -> "TreePolicy":
        """Return the policy for the next step, none larger than this one."""
        return self

    def grow(
        self,
        drafter: Drafter | None,
        committed: Committed,
        memory: Any,
        sampling: SamplingState | None = None,
        texts: Sequence[LookupText] = (),
    ) -> TokenTree:
        """Draft one tree per row; `sampling` has the settings and noise, `texts` are for lookup.

        If rows sample, the drafter's logits get the noise that the base samples with, and the
        processors of a row apply to them. Copied text and the base alone need no drafter.
        """
        if not self.depth:
            return root_only(committed)
        assert drafter is not None
        if sampling is not None and sampling.adjusts_any_draft and sampling.coupled:
            drafter = CoupledDrafter(drafter, sampling)
        logits, state = drafter.begin(committed, memory)
        return self.draft(drafter, committed.root(), logits, state)

    def draft(self, drafter: Drafter, root: Tensor, logits: Tensor, state: State) -> TokenTree:
        """Draft one tree per row (batch, 1), from the logits after the root (batch, 1, vocab)."""
        raise NotImplementedError


RankPath = tuple[int, ...]
"""Ranks of drafts, from the root down."""


class StaticLevel(NamedTuple):
    """One level of a static tree; the drafter reads only nodes with children."""

    parents: Int[Tensor, " node"]
    """Each node's parent, as an index into the nodes of the level above that were read."""
    guesses: Int[Tensor, " node"]
    """Index of each node into the guesses of all parents."""
    inner: Int[Tensor, " node"]
    """The nodes that are read."""
    inner_parents: Int[Tensor, " node"]
    """Parents of the nodes that are read."""
    width: int
    """Guesses taken after each parent."""


class StaticShape(NamedTuple):
    """A static tree on one device, so that a step uploads nothing."""

    parents: Int[Tensor, " node"]
    """As in `TokenTree`."""
    ancestors: Bool[Tensor, "1 node node"]
    levels: list[StaticLevel]


def static_shape(paths: Sequence[RankPath], device: torch.device) -> StaticShape:
    """Return the shape of rank paths that are sorted by length and closed under prefixes."""
    node_of = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
    parents = torch.tensor([-1] + [node_of[path[:-1]] for path in paths])
    has_children = {path[:-1] for path in paths}
    levels: list[StaticLevel] = []
    # index of each node that was read in the level above
    parent_of: dict[RankPath, int] = {(): 0}
    for _, group in itertools.groupby(paths, len):
        level = list(group)
        inner = [node for node, path in enumerate(level) if path in has_children]
        width = 1 + max(path[-1] for path in level)
        level_parents = [parent_of[path[:-1]] for path in level]
        pairs = zip(level_parents, level, strict=True)
        guesses = [parent * width + path[-1] for parent, path in pairs]
        inner_parents = [level_parents[node] for node in inner]
        indices = [
            torch.tensor(values, dtype=torch.long).to(device)
            for values in (level_parents, guesses, inner, inner_parents)
        ]
        levels.append(StaticLevel(*indices, width=width))
        parent_of = {level[node]: index for index, node in enumerate(inner)}
    ancestors = TokenTree(parents[None], parents[None]).ancestors()
    return StaticShape(parents.to(device), ancestors.to(device), levels)


class Static(TreePolicy):
    """The same shape in every step: each path gives the ranks of the guesses along it.

    `((0,), (1,), (0, 0))` drafts the two best next tokens and the best token after the first.

    Paths must be distinct and closed under prefixes. Nothing is drafted below a token whose
    probability under the drafter, or whose `estimate`, is less than `confidence`. The token itself
    is verified: dropping it would change the output's distribution (docs/losslessness.md).

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3; Mamou et al. 2024,
    arXiv:2405.04304, for stopping.
    """

    def __init__(
        self,
        paths: Sequence[Sequence[int]],
        name: str = "static",
        confidence: float = 0.0,
        estimate: AcceptanceEstimate | None = None,
    ) -> None:
        refuse_nodes(1 + len(paths), "tree.paths")
        ranks = [
            tuple(require_integer(rank, "a rank of tree.paths") for rank in path) for path in paths
        ]
        ordered = sorted(ranks, key=lambda path: (len(path), path))
        prefixes = {(), *ordered}
        orphans = [path for path in ordered if path[:-1] not in prefixes]
        if orphans or len(prefixes) <= len(ordered) or () in ordered:
            raise InputError(
                f"a static tree needs distinct, non-empty rank paths with parents, got {ordered}"
            )
        self.name, self.paths = name, tuple(ordered)
        self.confidence, self.estimate = confidence, estimate
        self.num_nodes, self.depth = len(prefixes), max(map(len, ordered), default=0)
        self.num_guesses = 1 + max((path[-1] for path in ordered), default=0)
        self.can_record = bool(ordered) and not confidence
        self._shapes: dict[torch.device, StaticShape] = {}

    def shape(self, device: torch.device) -> StaticShape:
        """Return the shape on a device; it is copied there once."""
        if device not in self._shapes:
            self._shapes[device] = static_shape(self.paths, device)
        return self._shapes[device]

    def draft(self, drafter: Drafter, root: Tensor, logits: Tensor, state: State) -> TokenTree:
        """Draft `num_nodes - 1` tokens by their ranks."""
        batch, (parents, ancestors, levels) = len(root), self.shape(root.device)
        drafted = [root]
        # nodes whose path has not stopped
        present = [torch.ones_like(root, dtype=torch.bool)]
        continues = present[0]
        for index, level in enumerate(levels):
            # argmax is much cheaper than topk
            best = logits.topk(level.width).indices if level.width > 1 else likeliest(logits)
            best = best.flatten(1).index_select(1, level.guesses)
            drafted.append(drafter.to_tokens(best))
            if self.confidence:
                present.append(continues[:, level.parents])
                chance = acceptance_chances(
                    drafter, self.estimate, logits, state, best, level.parents, index
                )
                is_likely = present[-1] & (chance >= self.confidence)
                continues = is_likely.index_select(1, level.inner)
            # reading whether any path continues synchronises
            if index + 1 == self.depth or (self.confidence and not continues.any()):
                break
            inner = drafted[-1].index_select(1, level.inner)
            logits, state = drafter.extend(state, inner, level.inner_parents.expand(batch, -1))
        tokens = torch.cat(drafted, dim=1)
        # fewer nodes if all paths have stopped
        size = tokens.shape[1]
        parents = parents[:size].expand(batch, -1)
        if self.confidence:
            # an absent node may be an ancestor of another absent node, which has no effect
            parents = parents.masked_fill(~torch.cat(present, dim=1), -1)
        return TokenTree(tokens, parents, ancestors[:, :size, :size].expand(batch, -1, -1))


class BestFirst(TreePolicy):
    """The likeliest nodes under the drafter, as in EAGLE-2 and OPT-Tree.

    The score of a node is the probability of its path. Each level expands the `beam` best nodes of
    the level above into `branch` children each, and the best `num_nodes - 1` nodes of all levels
    are kept. Scores decrease along a path, so the kept nodes are a tree.

    Source: Li et al. 2024, arXiv:2406.16858, section 4; Wang et al. 2024, arXiv:2406.17276.
    """

    can_record = True

    def __init__(self, num_nodes: int, depth: int, beam: int = 4, branch: int = 4) -> None:
        max_nodes, width = 1, 1
        for _ in range(refuse_nodes(depth, "tree.depth")):
            width = min(width, beam) * branch
            max_nodes = refuse_nodes(max_nodes + width, "tree.beam, tree.depth")
        if not 2 <= num_nodes <= max_nodes:
            raise InputError(
                f"a best-first tree of depth {depth}, beam {beam} and branch {branch} has 2 to "
                f"{max_nodes} nodes, got {num_nodes}; raise beam, branch or depth"
            )
        self.name = "best_first"
        self.num_nodes, self.depth, self.beam, self.branch = num_nodes, depth, beam, branch
        self.num_guesses = branch

    def draft(self, drafter: Drafter, root: Tensor, logits: Tensor, state: State) -> TokenTree:
        """Draft level by level, then keep the best nodes of all levels."""
        drafted, parents, scores = [], [], []
        above = torch.zeros_like(root)
        score = torch.zeros(root.shape, dtype=logits.dtype, device=root.device)
        first = 1
        for level in range(self.depth):
            best, guesses = logits.log_softmax(-1).topk(self.branch, dim=-1)
            total = (score[..., None] + best).flatten(1)
            drafted.append(drafter.to_tokens(guesses).flatten(1))
            parents.append(above.repeat_interleave(self.branch, dim=1))
            scores.append(total)
            if level + 1 < self.depth:
                score, inner = total.topk(min(self.beam, total.shape[1]), dim=1)
                above = first + inner
                tokens = drafted[-1].gather(1, inner)
                logits, state = drafter.extend(state, tokens, inner // self.branch)
            first += total.shape[1]
        # a stable sort prefers the shallower of equal nodes: the kept nodes are a tree
        order = torch.cat(scores, dim=1).argsort(dim=1, descending=True, stable=True)
        best_nodes = order[:, : self.num_nodes - 1].sort(dim=1).values
        tokens = torch.cat(drafted, dim=1).gather(1, best_nodes)
        old_parents = torch.cat(parents, dim=1).gather(1, best_nodes)
        old_ids = torch.cat([torch.zeros_like(root), best_nodes + 1], dim=1)
        new_parents = torch.searchsorted(old_ids, old_parents.contiguous())
        return TokenTree(
            torch.cat([root, tokens], dim=1),
            torch.cat([torch.full_like(root, -1), new_parents], dim=1),
        )


class Beam(TreePolicy):
    """Beam search: the `width` best paths of every length, as in ReDrafter.

    Every path of every level stays in the tree; the original keeps only the prefixes of the last
    level's. Probabilities are normalised over the `top` guesses after each node.

    Source: Cheng et al. 2024, arXiv:2403.09919, section 3.2; `recurrent_drafting` of
    apple/ml-recurrent-drafter for `top`.
    """

    can_record = True

    def __init__(self, width: int, depth: int, top: int = 50) -> None:
        if not 1 <= width <= top or depth < 1:
            raise InputError(
                f"a beam needs a width from 1 to {top} and a depth above 0, got {width}, {depth}"
            )
        self.name = "beam"
        self.num_nodes, self.depth = refuse_nodes(1 + width * depth, "tree.beam, tree.depth"), depth
        self.width, self.top = width, top
        self.num_guesses = width

    def draft(self, drafter: Drafter, root: Tensor, logits: Tensor, state: State) -> TokenTree:
        """Draft the last tokens of the `width` likeliest paths of each level."""
        drafted, parents = [root], [torch.full_like(root, -1)]
        score = torch.zeros(root.shape, dtype=logits.dtype, device=root.device)
        above = 0
        for level in range(self.depth):
            best, guesses = logits.topk(min(self.top, logits.shape[-1]), dim=-1)
            total = (score[..., None] + best.log_softmax(-1)).flatten(1)
            score, nodes = total.topk(self.width, dim=1)
            level_parents = nodes // best.shape[-1]
            drafted.append(drafter.to_tokens(guesses).flatten(1).gather(1, nodes))
            parents.append(above + level_parents)
            above = 1 + level * self.width
            if level + 1 < self.depth:
                logits, state = drafter.extend(state, drafted[-1], level_parents)
        return TokenTree(torch.cat(drafted, dim=1), torch.cat(parents, dim=1))


def root_only(committed: Committed) -> TokenTree:
    """Return the tree without a draft, which decodes with the base alone."""
    root = committed.root()
    alone = torch.ones_like(root, dtype=torch.bool)[..., None]
    return TokenTree(root, torch.full_like(root, -1), alone)


def chain(depth: int, confidence: float = 0.0) -> Static:
    """Return the policy that drafts one token per level; for `confidence` see `Static`."""
    refuse_nodes(depth + 1, "tree.depth")
    return Static([(0,) * length for length in range(1, depth + 1)], "chain", confidence)


NOTHING = Static([], name="none")
"""No draft: the base alone, in the same loop."""


class Product(TreePolicy):
    """The likeliest complete paths among all products of each level's best guesses.

    The drafter reads the whole product, of `branches` guesses after each node of a level. Complete
    paths are added by probability until the tree has `num_nodes` nodes, root included.

    Source: Wertheimer et al. 2024, arXiv:2404.19124; `generate_suffixes` of
    foundation-model-stack/fms-extras, which counts candidates where this counts nodes.
    """

    can_record = True

    def __init__(self, branches: Sequence[int], num_nodes: int) -> None:
        max_nodes = sum(level_sizes(branches))
        if not 2 <= num_nodes <= max_nodes:
            raise InputError(
                f"a product tree of branches {list(branches)} has 2 to {max_nodes} nodes, got "
                f"{num_nodes}; set tree.branches, tree.num_nodes"
            )
        self.name = "product"
        self.branches, self.num_nodes, self.depth = tuple(branches), num_nodes, len(branches)
        self.num_guesses = max(branches)

    def draft(self, drafter: Drafter, root: Tensor, logits: Tensor, state: State) -> TokenTree:
        """Draft the whole product, then keep the prefixes of its best paths."""
        paths = root[..., None]
        score = torch.zeros(paths.shape[:2], dtype=logits.dtype, device=logits.device)
        for level, branch in enumerate(self.branches):
            best, guesses = logits.log_softmax(-1).topk(branch, dim=-1)
            score = (score[..., None] + best).flatten(1)
            above = torch.arange(paths.shape[1], device=paths.device).repeat_interleave(branch)
            drafted = drafter.to_tokens(guesses).flatten(1)
            paths = torch.cat([paths[:, above], drafted[..., None]], dim=-1)
            if level + 1 < self.depth:
                logits, state = drafter.extend(state, drafted, above.expand_as(drafted))
        # each path adds at least one node, so more paths cannot change the tree
        order = score.topk(min(self.num_nodes, score.shape[1]), dim=1).indices
        return from_paths(paths.take_along_dim(order[..., None], dim=1), self.num_nodes)


_NO_CHANCE = -2000.0
"""Replaces the logarithm of zero: less than any log-probability with noise, but finite, and so
noise still orders tokens of probability zero."""


class Sampled(TreePolicy):
    """Tokens sampled from the drafter's distribution without replacement, for `rejection`.

    `branches` is the number of children of every node of a level, from the root on; `(1, 1, 1)` is
    the chain of speculative sampling. The same sampling settings apply to drafter and base. Rows at
    temperature zero get the drafter's best guesses.

    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2024, arXiv:2402.12374.
    """

    can_record = True

    def __init__(self, branches: Sequence[int]) -> None:
        self.name, self.branches = "sampled", tuple(branches)
        self.num_nodes, self.depth = sum(level_sizes(branches)), len(branches)
        self.num_guesses = max(branches)

    def grow(
        self,
        drafter: Drafter | None,
        committed: Committed,
        memory: Any,
        sampling: SamplingState | None = None,
        texts: Sequence[LookupText] = (),
    ) -> TokenTree:
        """Sample level by level."""
        assert drafter is not None
        assert sampling is not None
        logits, state = drafter.begin(committed, memory)
        drafted, probs = [committed.root()], []
        paths = drafted[0][..., None]
        batch, device = len(paths), paths.device
        nodes, above = [torch.full((1,), -1, device=device)], 0
        for level, width in enumerate(self.branches):
            logits = over_vocabulary(drafter, logits, sampling.vocab_size)
            probs.append(sampling.probs(logits, paths))
            tokens = _sample_children(sampling, logits, probs[-1], level, width).flatten(1)
            drafted.append(tokens)
            parents = torch.arange(logits.shape[1], device=device).repeat_interleave(width)
            nodes.append(above + parents)
            above += logits.shape[1]
            if level + 1 < self.depth:
                paths = torch.cat([paths[:, parents], tokens[..., None]], dim=-1)
                logits, state = drafter.extend(state, tokens, parents.expand(batch, -1))
        tokens, parents = torch.cat(drafted, dim=1), torch.cat(nodes).expand(batch, -1)
        branch_sampling = BranchSampling(self.branches, torch.cat(probs, dim=1))
        return TokenTree(tokens, parents, branch_sampling=branch_sampling)


def _sample_children(
    sampling: SamplingState, logits: NodeScores, probs: NodeScores, level: int, count: int
) -> Int[Tensor, "batch node path"]:
    """Return tokens sampled without replacement after each node at depth `level`, in order.

    A greedy row gets the likeliest tokens. Tokens of probability zero follow in random order.
    """
    order = logits.double().log_softmax(-1)
    if sampling.any_sampled:
        keys = noise.bits(sampling.seeds, sampling.lengths + level + 1, noise.DRAFT)
        gumbels = noise.gumbel(keys[:, None], logits.shape[-1])
        order = torch.where(sampling.is_sampled[:, None, None], gumbels, order)
    chance = probs.double().log().clamp(min=_NO_CHANCE)
    return (chance + order).topk(count, dim=-1).indices
