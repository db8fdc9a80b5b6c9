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
from specheads.core.drafter import Drafter, State
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.ranges import (
    NonNegativeInt,
    PositiveProbability,
    Probability,
    Rule,
    check_fields,
)
from specheads.core.seeds import derive_seed
from specheads.core.tree import TokenTree
from specheads.decoding import noise
from specheads.decoding.noise import likeliest

Nodes = Int[Tensor, "batch node"]
Scores = Float[Tensor, "batch node vocab"]
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
_without_seed = attrgetter(*(one.name for one in fields(Sampling) if one.name != "seed"))
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
    """Whether drafts see the noise that the base draws with: see `Coupled`."""
    depth: int | None = None
    """Most levels of the next trees; None is the number of nodes. Noise is computed for this
    many positions at once."""
    greedy: bool = field(init=False)
    """Whether every row is greedy."""
    draws: bool = field(init=False)
    """Whether any row samples, at a temperature above zero."""
    all_draw: bool = field(init=False)
    """Whether every row samples."""
    penalised: bool = field(init=False)
    """Whether any row has a repetition penalty."""
    drawing: Bool[Tensor, " batch"] = field(init=False)
    """Which rows sample."""
    seeds: Int[Tensor, " batch"] = field(init=False)
    """Seed of each row."""
    _seeded: Int[Tensor, " batch"] = field(init=False)
    """Random bits of each seed, the start of those of its positions."""
    _groups: list[tuple[Sampling, Tensor]] = field(init=False)
    _noise: Float[Tensor, "batch level vocab"] | None = field(init=False)

    def __post_init__(self) -> None:
        device = self.lengths.device
        self.dtype = torch.promote_types(self.dtype, torch.float32)
        self.greedy = all(one.greedy for one in self.sampling)
        self.penalised = any(one.repetition_penalty != 1 for one in self.sampling)
        drawing = [one.temperature > 0 for one in self.sampling]
        self.draws, self.all_draw = any(drawing), all(drawing)
        self.drawing = upload(drawing, device).bool()
        self.seeds = upload([one.seed for one in self.sampling], device)
        self._seeded, self._noise = noise.bits(self.seeds), None
        places: dict[Any, list[int]] = {}
        for place, settings in enumerate(self.sampling):
            places.setdefault(_without_seed(settings), []).append(place)
        self._groups = [(self.sampling[rows[0]], upload(rows, device)) for rows in places.values()]

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

    def scores(self, logits: Scores, paths: Paths) -> Scores:
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

    def probs(self, logits: Scores, paths: Paths) -> Scores:
        """Return the distribution that each row samples from; at temperature zero it is a point."""
        scores = self.scores(logits, paths)
        probs = scores.softmax(-1)
        if self.all_draw:
            return probs
        best = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.drawing[:, None, None], probs, best)

    def tree_probs(self, tree: TokenTree, logits: Scores, ancestors: Ancestors) -> Scores:
        """Return the base's distribution after each node of a tree."""
        return self.probs(logits, _paths(tree, ancestors))

    def choose(self, tree: TokenTree, logits: Scores, ancestors: Ancestors) -> Nodes:
        """Return the token that the base alone would choose after each node of a tree.

        It is the argmax of the scores plus the position's noise, a sample of their distribution.
        """
        if self.greedy:
            return likeliest(logits)
        scores = self.scores(logits, _paths(tree, ancestors))
        if not self.draws:
            return likeliest(scores)
        deepest = tree.tokens.shape[1] - 1
        found = self._made_noise(deepest if self.depth is None else min(deepest, self.depth))
        if found.shape[1] > 1:
            rows = torch.arange(len(found), device=found.device)[:, None]
            places = (rows * found.shape[1] + tree.depths()).flatten()
            found = found.flatten(0, 1).index_select(0, places).view_as(scores)
        return likeliest(scores + found)

    def level_noise(self, level: int) -> Float[Tensor, "batch 1 vocab"]:
        """Return the noise of the tokens after the nodes at depth `level`."""
        # verification needs the noise after the last level too
        found = self._made_noise(level if self.depth is None else max(level, self.depth))
        return found[:, level, None]

    def _made_noise(self, depth: int) -> Float[Tensor, "batch level vocab"]:
        """Return the noise after each level of this step's trees; greedy rows have zeros."""
        # computed once for draft and verification
        if self._noise is None or self._noise.shape[1] <= depth:
            after = self.lengths[:, None] + torch.arange(1, depth + 2, device=self.lengths.device)
            keys = noise.bits(after, noise.TOKEN, state=self._seeded[:, None])
            made = [
                noise.gumbel(some, self.vocab_size, self.dtype)
                for some in keys.flatten().split(max(1, CHUNK // self.vocab_size))
            ]
            values = (made[0] if len(made) == 1 else torch.cat(made)).unflatten(0, keys.shape)
            self._noise = values if self.all_draw else values * self.drawing[:, None, None]
        return self._noise

    def uniforms(self, ancestors: Ancestors) -> Float64[Tensor, "batch node"]:
        """Return the uniform number that samples the token after each node in `rejection`."""
        return noise.uniform(self.seeds[:, None], self._after(ancestors), noise.BONUS)

    def coins(self, ancestors: Ancestors) -> Float64[Tensor, "batch node"]:
        """Return the uniform number that decides the test of each node."""
        nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
        return noise.uniform(self.seeds[:, None], self._after(ancestors) - 1, noise.COIN, nodes)

    def _after(self, ancestors: Tensor) -> Tensor:
        """Return the position after each node."""
        return self.lengths[:, None] + ancestors.sum(-1)


def _paths(tree: TokenTree, ancestors: Ancestors) -> Paths:
    """Return the tokens from the root to each node, with the root's token as padding."""
    return torch.where(ancestors, tree.tokens[:, None], tree.tokens[:, :1, None])


def _group_scores(
    settings: Sampling, scores: Tensor, paths: Tensor, text: Tensor, lengths: Tensor
) -> Tensor:
    """Apply the logits processors of transformers to rows with the same settings."""
    shape, flat, read = scores.shape, scores.flatten(0, 1), paths.flatten(0, 1)
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1:
        places = torch.arange(text.shape[1], device=text.device)
        root = text.gather(1, lengths[:, None])
        before = torch.where(places <= lengths[:, None], text, root)
        read = torch.cat([before.repeat_interleave(shape[1], dim=0), read], dim=1)
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
    return processors(cast(torch.LongTensor, read), flat).view(shape)


def each_prompt(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling]:
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


class Coupled(Drafter):
    """Adds the noise of each position to a drafter's logits.

    The logits get each row's temperature, cuts and penalties, and then the noise that the base
    samples with at that position. The argmax is the base's token with a probability of at least
    (1 - TV) / (1 + TV), where TV is the total variation distance of both distributions. Rows at
    temperature zero keep their logits. The decoded text is the same for every drafter.

    Source: Daliri, Musco and Suresh 2024, arXiv:2408.07978.
    """

    def __init__(self, drafter: Drafter, rows: SamplingState) -> None:
        self.drafter, self.rows = drafter, rows
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
        return with_noise(self.drafter, logits, paths, self.rows), (state, paths)

    def extend(self, state: State, tokens: Tensor, parents: Tensor) -> tuple[Tensor, State]:
        """Read one level of nodes; return logits for the token after each node."""
        state, paths = state
        logits, state = self.drafter.extend(state, tokens, parents)
        above = paths.take_along_dim(parents[..., None], dim=1)
        paths = torch.cat([above, tokens[..., None]], dim=-1)
        return with_noise(self.drafter, logits, paths, self.rows), (state, paths)


def with_noise(
    drafter: Drafter, logits: Float[Tensor, "batch node drafted"], paths: Paths, rows: SamplingState
) -> Float[Tensor, "batch node drafted"]:
    """Return a drafter's logits after the nodes of one level with the noise added.

    `paths` are the tokens from the root to each node. Greedy rows keep their logits.
    """
    wide = over_vocabulary(drafter, logits, rows.vocab_size)
    noisy = rows.scores(wide, paths) + rows.level_noise(paths.shape[-1] - 1)
    if wide is not logits:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        noisy = noisy[..., drafter.to_tokens(columns)]
    if rows.all_draw:
        return noisy
    return torch.where(rows.drawing[:, None, None], noisy, logits)


def over_vocabulary(drafter: Drafter, logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits over the base's vocabulary; tokens that cannot be drafted get -inf."""
    if logits.shape[-1] == vocab_size:
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device)
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    out[..., drafter.to_tokens(columns)] = logits
    return out
