"""Sampling settings of requests: from logits to probabilities and samples.

Base and drafter use transformers' own logits processors. The samples of a request depend on its
seed and on positions in its text only. See docs/losslessness.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, Gt, Le
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads.base.cache import upload
from specheads.core.drafter import Drafter, Nodes, State
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.ranges import (
    NonNegativeInt,
    PositiveProbability,
    Probability,
    Rule,
    check_fields,
)
from specheads.core.tree import TokenTree
from specheads.decoding import noise
from specheads.decoding.noise import derive_seed, likeliest

NodeScores = Float[Tensor, "batch node vocab"]
"""Logits, scores or probabilities of the token after each node."""
Ancestors = Bool[Tensor, "batch node node"]
Paths = Int[Tensor, "batch node path"]
"""Tokens from the root to each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a request are chosen; the default is greedy."""

    # logits divided by less overflow in float32
    temperature: Annotated[float, Rule(lambda t: t == 0 or t >= 1e-30, "0 or at least 1e-30")] = 0.0
    """Divides logits; zero is greedy and ignores `top_k`, `top_p` and `min_p`."""
    top_k: NonNegativeInt = 0
    """Sample from this many likeliest tokens. Zero is all."""
    top_p: PositiveProbability = 1.0
    """Sample from the likeliest tokens that reach this total probability. One is all."""
    min_p: Probability = 0.0
    """Smallest probability of a token, relative to the likeliest one's. Zero is off."""
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that are already in the
    prompt or the text. One is off."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, settings: Any, seed: int) -> "Sampling":
        """Return the sampling of settings with temperature, top_k and top_p."""
        names = ("temperature", "top_k", "top_p")
        return cls(seed=seed, **{name: getattr(settings, name) for name in names})

    @property
    def greedy(self) -> bool:
        """Whether it always takes the base's likeliest token."""
        return self.temperature == 0 and self.repetition_penalty == 1

    def of_prompt(self, index: int) -> "Sampling":
        """Return these settings with the seed of the `index`-th prompt."""
        return replace(self, seed=derive_seed(self.seed, index))


GREEDY = Sampling()
# a copy without the seed would be checked again
_without_seed = attrgetter(*(field.name for field in fields(Sampling) if field.name != "seed"))
CHUNK = 2**22
"""Numbers of noise computed at once, to limit temporary memory."""


@dataclass(slots=True)
class SamplingState:
    """Sampling settings, positions and noise of a batch's rows."""

    sampling: list[Sampling]
    lengths: Int[Tensor, " batch"]
    """Position of each row's root, which is the number of committed tokens before it."""
    text: Int[Tensor, "batch time"]
    """Tokens of each row up to the root at `lengths`, with room for all new tokens. It is updated
    only for a repetition penalty."""
    vocab_size: int
    """Columns of the base's logits."""
    dtype: torch.dtype = torch.float32
    """Dtype of the base's logits. Samples are computed in it, or in float32 if that is wider."""
    coupled: bool = True
    """Whether drafts see the noise that the base samples with: see `CoupledDrafter`."""
    depth: int | None = None
    """Most levels of the next trees; None is the number of nodes. Noise is computed for this
    many positions at once."""
    greedy: bool = field(init=False)
    """Whether every row is greedy."""
    any_sampled: bool = field(init=False)
    """Whether any row samples, at a temperature above zero."""
    all_sampled: bool = field(init=False)
    """Whether every row samples."""
    penalised: bool = field(init=False)
    """Whether any row has a repetition penalty."""
    is_sampled: Bool[Tensor, " batch"] = field(init=False)
    """Which rows sample."""
    seeds: Int[Tensor, " batch"] = field(init=False)
    """Seed of each row."""
    _seed_bits: Int[Tensor, " batch"] = field(init=False)
    """Random bits of each seed, the start of those of its positions."""
    _groups: list[tuple[Sampling, Tensor]] = field(init=False)
    _noise: Float[Tensor, "batch level vocab"] | None = field(init=False)

    def __post_init__(self) -> None:
        device = self.lengths.device
        self.dtype = torch.promote_types(self.dtype, torch.float32)
        self.greedy = all(settings.greedy for settings in self.sampling)
        self.penalised = any(settings.repetition_penalty != 1 for settings in self.sampling)
        is_sampled = [settings.temperature > 0 for settings in self.sampling]
        self.any_sampled, self.all_sampled = any(is_sampled), all(is_sampled)
        self.is_sampled = upload(is_sampled, device).bool()
        self.seeds = upload([settings.seed for settings in self.sampling], device)
        self._seed_bits, self._noise = noise.bits(self.seeds), None
        groups: dict[Any, list[int]] = {}
        for row, settings in enumerate(self.sampling):
            groups.setdefault(_without_seed(settings), []).append(row)
        self._groups = [(self.sampling[rows[0]], upload(rows, device)) for rows in groups.values()]

    def keep(self, rows: list[int]) -> "SamplingState":
        """Return the state of these rows."""
        index = upload(rows, self.lengths.device)
        return replace(
            self,
            sampling=[self.sampling[row] for row in rows],
            lengths=self.lengths[index],
            text=self.text[index],
        )

    def join(self, other: "SamplingState") -> "SamplingState":
        """Return the state of both batches' rows; both `text`s must have the same width."""
        lengths = torch.cat([self.lengths, other.lengths])
        text = torch.cat([self.text, other.text])
        return replace(self, sampling=self.sampling + other.sampling, lengths=lengths, text=text)

    def advance(self, tokens: Int[Tensor, "batch path"], lengths: Int[Tensor, " batch"]) -> None:
        """Append the tokens to each row, and move the roots to `lengths`."""
        if self.penalised:
            offsets = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            self.text.scatter_(1, self.lengths[:, None] + offsets, tokens)
        self.lengths, self._noise = lengths, None

    def scores(self, logits: NodeScores, paths: Paths) -> NodeScores:
        """Apply each row's sampling settings to logits over the base's vocabulary after each node.

        At temperature zero only the largest score has a meaning.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if len(self._groups) == 1:
            return _group_scores(self._groups[0][0], scores, paths, self.text, self.lengths)
        out = torch.empty_like(scores)
        for settings, rows in self._groups:
            inputs = (values[rows] for values in (scores, paths, self.text, self.lengths))
            out[rows] = _group_scores(settings, *inputs)
        return out

    def probs(self, logits: NodeScores, paths: Paths) -> NodeScores:
        """Return the distribution that each row samples from; at temperature zero it is a point."""
        scores = self.scores(logits, paths)
        probs = scores.softmax(-1)
        if self.all_sampled:
            return probs
        best = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.is_sampled[:, None, None], probs, best)

    def tree_probs(self, tree: TokenTree, logits: NodeScores, ancestors: Ancestors) -> NodeScores:
        """Return the base's distribution after each node of a tree."""
        return self.probs(logits, _paths(tree, ancestors))

    def choose(self, tree: TokenTree, logits: NodeScores, ancestors: Ancestors) -> Nodes:
        """Return the token that the base alone would choose after each node of a tree.

        It is the argmax of the scores plus the position's noise, a sample of their distribution.
        """
        if self.greedy:
            return likeliest(logits)
        scores = self.scores(logits, _paths(tree, ancestors))
        if not self.any_sampled:
            return likeliest(scores)
        deepest = tree.tokens.shape[1] - 1
        gumbels = self._gumbels(deepest if self.depth is None else min(deepest, self.depth))
        if gumbels.shape[1] > 1:
            rows = torch.arange(len(gumbels), device=gumbels.device)[:, None]
            indices = (rows * gumbels.shape[1] + tree.depths()).flatten()
            gumbels = gumbels.flatten(0, 1).index_select(0, indices).view_as(scores)
        return likeliest(scores + gumbels)

    def level_noise(self, level: int) -> Float[Tensor, "batch 1 vocab"]:
        """Return the noise of the tokens after the nodes at depth `level`."""
        # verification needs the noise after the last level too
        gumbels = self._gumbels(level if self.depth is None else max(level, self.depth))
        return gumbels[:, level, None]

    def _gumbels(self, depth: int) -> Float[Tensor, "batch level vocab"]:
        """Return the noise after each level of this step's trees; greedy rows have zeros."""
        # computed once for draft and verification
        if self._noise is None or self._noise.shape[1] <= depth:
            offsets = torch.arange(1, depth + 2, device=self.lengths.device)
            positions = self.lengths[:, None] + offsets
            keys = noise.bits(positions, noise.TOKEN, state=self._seed_bits[:, None])
            chunks = [
                noise.gumbel(chunk, self.vocab_size, self.dtype)
                for chunk in keys.flatten().split(max(1, CHUNK // self.vocab_size))
            ]
            gumbels = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
            gumbels = gumbels.unflatten(0, keys.shape)
            self._noise = gumbels if self.all_sampled else gumbels * self.is_sampled[:, None, None]
        return self._noise

    def uniforms(self, ancestors: Ancestors) -> Float64[Tensor, "batch node"]:
        """Return the uniform number that samples the token after each node in `rejection`."""
        return noise.uniform(self.seeds[:, None], self._next_positions(ancestors), noise.BONUS)

    def coins(self, ancestors: Ancestors) -> Float64[Tensor, "batch node"]:
        """Return the uniform number that decides the test of each node."""
        nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
        return noise.uniform(
            self.seeds[:, None], self._next_positions(ancestors) - 1, noise.COIN, nodes
        )

    def _next_positions(self, ancestors: Tensor) -> Tensor:
        """Return the position after each node."""
        return self.lengths[:, None] + ancestors.sum(-1)


def _paths(tree: TokenTree, ancestors: Ancestors) -> Paths:
    """Return the tokens from the root to each node, with the root's token as padding."""
    return torch.where(ancestors, tree.tokens[:, None], tree.tokens[:, :1, None])


def _group_scores(
    settings: Sampling, scores: Tensor, paths: Tensor, text: Tensor, lengths: Tensor
) -> Tensor:
    """Apply the logits processors of transformers to rows with the same settings."""
    shape, tokens = scores.shape, paths.flatten(0, 1)
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1:
        positions = torch.arange(text.shape[1], device=text.device)
        root = text.gather(1, lengths[:, None])
        prefix = torch.where(positions <= lengths[:, None], text, root)
        tokens = torch.cat([prefix.repeat_interleave(shape[1], dim=0), tokens], dim=1)
        processors.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    if settings.temperature > 0:
        if settings.temperature != 1:
            processors.append(TemperatureLogitsWarper(float(settings.temperature)))
        if settings.top_k:
            processors.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            processors.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p:
            processors.append(MinPLogitsWarper(settings.min_p))
    return processors(cast(torch.LongTensor, tokens), scores.flatten(0, 1)).view(shape)


def expand_sampling(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling]:
    """Return the sampling of each of `count` prompts; None is greedy.

    Settings for all prompts give each prompt its own seed; those in a list keep their seeds.
    """
    if sampling is None or isinstance(sampling, Sampling):
        return [(sampling or GREEDY).of_prompt(index) for index in range(count)]
    if not isinstance(sampling, Sequence) or len(sampling) != count:
        raise InputError(
            f"sampling must be a Sampling(...) or a list of {count}, got {sampling!r:.80}"
        )
    return list(sampling)


# --- drafts that see the noise ------------------------------------------------------------------


class CoupledDrafter(Drafter):
    """Adds the noise of each position to a drafter's logits.

    The logits get each row's temperature, cuts and penalties, and then the noise that the base
    samples with at that position. The argmax is the base's token with a probability of at least
    (1 - TV) / (1 + TV), where TV is the total variation distance of both distributions. Rows at
    temperature zero keep their logits. The decoded text is the same for every drafter.

    Source: Daliri, Musco and Suresh 2024, arXiv:2408.07978.
    """

    def __init__(self, drafter: Drafter, sampling: SamplingState) -> None:
        self.drafter, self.sampling = drafter, sampling
        self.depth, self.aux_layers = drafter.depth, drafter.aux_layers
        self.drafted_size = drafter.drafted_size

    def to_tokens(self, drafted: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the tokens of these columns of its logits."""
        return self.drafter.to_tokens(drafted)

    def confidence(self, state: State) -> Float[Tensor, "batch node"] | None:
        """Return the drafter's own estimate of acceptance, which does not use the noise."""
        return self.drafter.confidence(state[0])

    def begin(self, committed: Committed, memory: Any) -> tuple[Tensor, State]:
        """Read the committed tokens; return logits for the token after the root."""
        logits, state = self.drafter.begin(committed, memory)
        paths = committed.root()[..., None]
        return with_noise(self.drafter, logits, paths, self.sampling), (state, paths)

    def extend(self, state: State, tokens: Tensor, parents: Tensor) -> tuple[Tensor, State]:
        """Read one level of nodes; return logits for the token after each node."""
        state, paths = state
        logits, state = self.drafter.extend(state, tokens, parents)
        parent_paths = paths.take_along_dim(parents[..., None], dim=1)
        paths = torch.cat([parent_paths, tokens[..., None]], dim=-1)
        return with_noise(self.drafter, logits, paths, self.sampling), (state, paths)


def with_noise(
    drafter: Drafter,
    logits: Float[Tensor, "batch node drafted"],
    paths: Paths,
    sampling: SamplingState,
) -> Float[Tensor, "batch node drafted"]:
    """Return a drafter's logits after the nodes of one level with the noise added.

    `paths` are the tokens from the root to each node. Greedy rows keep their logits.
    """
    base_logits = over_vocabulary(drafter, logits, sampling.vocab_size)
    noisy = sampling.scores(base_logits, paths) + sampling.level_noise(paths.shape[-1] - 1)
    if base_logits is not logits:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        noisy = noisy[..., drafter.to_tokens(columns)]
    if sampling.all_sampled:
        return noisy
    return torch.where(sampling.is_sampled[:, None, None], noisy, logits)


def over_vocabulary(drafter: Drafter, logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits over the base's vocabulary; tokens that cannot be drafted get -inf."""
    if logits.shape[-1] == vocab_size:
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device)
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    out[..., drafter.to_tokens(columns)] = logits
    return out
