"""Sampling settings of requests: from logits to probabilities and samples.

Base and drafter use transformers' own logits processors. The samples of a request depend on its
seed and on positions in its text only. See docs/losslessness.md.
"""

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
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
from specheads.decoding.processors import AllowedTokens, is_bias, is_words

NodeScores = Float[Tensor, "batch node vocab"]
"""Logits, scores or probabilities of the token after each node."""
Ancestors = Bool[Tensor, "batch node node"]
Paths = Int[Tensor, "batch node path"]
"""Tokens from the root to each node."""


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


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
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are already in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is already in the answer."""
    logit_bias: Annotated[
        Any, Rule(is_bias, "token ids, or tuples of them, with numbers below infinity")
    ] = field(default_factory=dict)
    """Numbers added to logits. A tuple adds to its last token after the tokens before it."""
    bad_words: Annotated[Any, Rule(is_words, "lists of token ids, none empty")] = ()
    """Token sequences that the answer must not complete."""
    min_new_tokens: NonNegativeInt = 0
    """New tokens before an end-of-text token may follow; stop strings end the text before."""
    prefix_allowed_tokens_fn: Annotated[Any, Rule(_is_function, "a function or none")] = None
    """Function from the index of the prompt and the tokens so far to the tokens that may follow, as
    for transformers' `generate`; see `processors.AllowedTokens`."""
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
        penalised = self.repetition_penalty != 1 or self.has_processors
        return self.temperature == 0 and not penalised

    @property
    def has_processors(self) -> bool:
        """Whether scores depend on the whole text by more than a repetition penalty."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.min_new_tokens
            or self.prefix_allowed_tokens_fn
        )

    def of_prompt(self, index: int) -> "Sampling":
        """Return these settings with the seed of the `index`-th prompt."""
        return replace(self.with_index(index), seed=derive_seed(self.seed, index))

    def with_index(self, index: int) -> "Sampling":
        """Return these settings with a function that gets this index of the prompt."""
        function = self.prefix_allowed_tokens_fn
        if function is None:
            return self
        return replace(self, prefix_allowed_tokens_fn=lambda _, tokens: function(index, tokens))


GREEDY = Sampling()
_group_settings = attrgetter(
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "has_processors")
)
"""Settings that rows of a group share. The seed and the processors are each row's own."""
FORBIDDEN = -1e30
"""Replaces -inf in drafts: sums over the levels of a tree are finite in float32 too."""
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
    only for rows whose scores depend on it."""
    vocab_size: int
    """Columns of the base's logits."""
    dtype: torch.dtype = torch.float32
    """Dtype of the base's logits. Samples are computed in it, or in float32 if that is wider."""
    coupled: bool = True
    """Whether drafts see the noise that the base samples with: see `CoupledDrafter`."""
    processors: list[LogitsProcessorList] = field(default_factory=list)
    """Each row's own processors, which apply before temperature and cuts."""
    depth: int | None = None
    """Most levels of the next trees; None is the number of nodes. Noise is computed for this
    many positions at once."""
    greedy: bool = field(init=False)
    """Whether every row is greedy."""
    any_sampled: bool = field(init=False)
    """Whether any row samples, at a temperature above zero."""
    all_sampled: bool = field(init=False)
    """Whether every row samples."""
    reads_text: bool = field(init=False)
    """Whether any row's scores depend on its text."""
    has_processors: bool = field(init=False)
    """Whether any row has processors of its own."""
    is_sampled: Bool[Tensor, " batch"] = field(init=False)
    """Which rows sample."""
    adjusts_draft: Bool[Tensor, " batch"] = field(init=False)
    """Rows that sample or have processors: their drafts get the scores and noise of the base."""
    seeds: Int[Tensor, " batch"] = field(init=False)
    """Seed of each row."""
    _seed_bits: Int[Tensor, " batch"] = field(init=False)
    """Random bits of each seed, the start of those of its positions."""
    _groups: list[tuple[Sampling, Tensor]] = field(init=False)
    noise: Float[Tensor, "batch level vocab"] | None = field(init=False)
    """Noise after each level of this step's trees, from the draft for the verification."""

    def __post_init__(self) -> None:
        device = self.lengths.device
        self.dtype = torch.promote_types(self.dtype, torch.float32)
        self.greedy = all(settings.greedy for settings in self.sampling)
        self.processors = self.processors or [LogitsProcessorList() for _ in self.sampling]
        self.has_processors = any(self.processors)
        self.reads_text = self.has_processors or any(
            settings.repetition_penalty != 1 for settings in self.sampling
        )
        is_sampled = [settings.temperature > 0 for settings in self.sampling]
        self.any_sampled, self.all_sampled = any(is_sampled), all(is_sampled)
        self.is_sampled = upload(is_sampled, device).bool()
        self.adjusts_draft = self.is_sampled
        if self.has_processors:
            processed = upload(list(map(bool, self.processors)), device).bool()
            self.adjusts_draft = self.is_sampled | processed
        self.seeds = upload([settings.seed for settings in self.sampling], device)
        self._seed_bits, self.noise = noise.bits(self.seeds), None
        groups: dict[Any, list[int]] = {}
        for row, settings in enumerate(self.sampling):
            groups.setdefault(_group_settings(settings), []).append(row)
        self._groups = [(self.sampling[rows[0]], upload(rows, device)) for rows in groups.values()]

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """What the operations of a draft depend on, apart from tensors."""
        groups = [_group_settings(settings) for settings, _ in self._groups]
        return (self.coupled, self.greedy, self.any_sampled, self.all_sampled, self.depth, *groups)

    def draft_inputs(self) -> "SamplingState":
        """Return a copy with what drafts and acceptance read, if no row has processors.

        It has no noise yet: acceptance gets that of the draft.
        """
        inputs = copy(self)
        inputs.sampling, inputs.processors, inputs.noise = [], [], None
        if not self.reads_text:
            inputs.text = self.text[:, :0]
        return inputs

    def keep(self, rows: list[int]) -> "SamplingState":
        """Return the state of these rows."""
        index = upload(rows, self.lengths.device)
        lengths, text = self.lengths[index], self.text[index]
        sampling = [self.sampling[row] for row in rows]
        processors = [self.processors[row] for row in rows]
        return replace(self, sampling=sampling, lengths=lengths, text=text, processors=processors)

    def join(self, other: "SamplingState") -> "SamplingState":
        """Return the state of both batches' rows; both `text`s must have the same width."""
        lengths = torch.cat([self.lengths, other.lengths])
        text = torch.cat([self.text, other.text])
        sampling, processors = self.sampling + other.sampling, self.processors + other.processors
        return replace(self, sampling=sampling, lengths=lengths, text=text, processors=processors)

    def advance(self, tokens: Int[Tensor, "batch path"], lengths: Int[Tensor, " batch"]) -> None:
        """Append the tokens to each row, and move the roots to `lengths`."""
        if self.reads_text:
            offsets = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            self.text.scatter_(1, self.lengths[:, None] + offsets, tokens)
        self.lengths, self.noise = lengths, None
        for processor in itertools.chain(*self.processors):
            if isinstance(processor, AllowedTokens):
                processor.clear()

    def scores(
        self, logits: NodeScores, paths: Paths, path_lengths: Nodes | None = None
    ) -> NodeScores:
        """Apply each row's sampling settings to logits over the base's vocabulary after each node.

        At temperature zero only the largest score has a meaning. `path_lengths` are the tokens of
        each path that count for processors, zero for an absent node; None is all.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.has_processors:
            scores = self._process(scores, paths, path_lengths)
        if len(self._groups) == 1:
            return _group_scores(self._groups[0][0], scores, paths, self.text, self.lengths)
        out = torch.empty_like(scores)
        for settings, rows in self._groups:
            inputs = (values[rows] for values in (scores, paths, self.text, self.lengths))
            out[rows] = _group_scores(settings, *inputs)
        return out

    def _process(self, scores: NodeScores, paths: Paths, path_lengths: Nodes | None) -> NodeScores:
        """Apply each row's own processors to its nodes, those of one depth together.

        They get the text from its first token to the node, so they need not know of trees.
        """
        if path_lengths is None:
            path_lengths = torch.full_like(paths[..., 0], paths.shape[-1])
        scores, lengths = scores.clone(), self.lengths.tolist()
        prefix_lengths = path_lengths.tolist()
        for row, processors in enumerate(self.processors):
            # from the root on, because constraints know a prefix by the one before it
            for length in sorted({*prefix_lengths[row]} - {0}) if processors else ():
                nodes = (path_lengths[row] == length).nonzero()[:, 0]
                text = self.text[row, : lengths[row]].expand(len(nodes), -1)
                prefixes = torch.cat([text, paths[row, nodes, :length]], dim=1)
                scores[row, nodes] = processors(cast(Any, prefixes), scores[row, nodes])
        return scores

    def probs(
        self, logits: NodeScores, paths: Paths, path_lengths: Nodes | None = None
    ) -> NodeScores:
        """Return the distribution that each row samples from; at temperature zero it is a point."""
        scores = self.scores(logits, paths, path_lengths)
        probs = scores.softmax(-1)
        if self.all_sampled:
            return probs
        best = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.is_sampled[:, None, None], probs, best)

    def tree_probs(self, tree: TokenTree, logits: NodeScores, ancestors: Ancestors) -> NodeScores:
        """Return the base's distribution after each node of a tree."""
        return self.probs(logits, *self._paths(tree, ancestors))

    def choose(self, tree: TokenTree, logits: NodeScores, ancestors: Ancestors) -> Nodes:
        """Return the token that the base alone would choose after each node of a tree.

        It is the argmax of the scores plus the position's noise, a sample of their distribution.
        """
        if self.greedy:
            return likeliest(logits)
        scores = self.scores(logits, *self._paths(tree, ancestors))
        if not self.any_sampled:
            return likeliest(scores)
        deepest = tree.tokens.shape[1] - 1
        gumbels = self._gumbels(deepest if self.depth is None else min(deepest, self.depth))
        if gumbels.shape[1] > 1:
            rows = torch.arange(len(gumbels), device=gumbels.device)[:, None]
            indices = (rows * gumbels.shape[1] + tree.depths()).flatten()
            gumbels = gumbels.flatten(0, 1).index_select(0, indices).view_as(scores)
        return likeliest(scores + gumbels)

    @property
    def adjusts_any_draft(self) -> bool:
        """Whether any row's drafts are adjusted."""
        return self.any_sampled or self.has_processors

    def level_noise(self, level: int) -> Float[Tensor, "batch 1 vocab"]:
        """Return the noise of the tokens after the nodes at depth `level`."""
        # verification needs the noise after the last level too
        gumbels = self._gumbels(level if self.depth is None else max(level, self.depth))
        return gumbels[:, level, None]

    def _gumbels(self, depth: int) -> Float[Tensor, "batch level vocab"]:
        """Return the noise after each level of this step's trees; greedy rows have zeros."""
        # computed once for draft and verification
        if self.noise is None or self.noise.shape[1] <= depth:
            offsets = torch.arange(1, depth + 2, device=self.lengths.device)
            positions = self.lengths[:, None] + offsets
            keys = noise.bits(positions, noise.TOKEN, state=self._seed_bits[:, None])
            chunks = [
                noise.gumbel(chunk, self.vocab_size, self.dtype)
                for chunk in keys.flatten().split(max(1, CHUNK // self.vocab_size))
            ]
            gumbels = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
            gumbels = gumbels.unflatten(0, keys.shape)
            self.noise = gumbels if self.all_sampled else gumbels * self.is_sampled[:, None, None]
        # that of a recorded draft may have the further rows of a padded batch
        return self.noise[: len(self.lengths)]

    def _paths(self, tree: TokenTree, ancestors: Ancestors) -> tuple[Paths, Nodes | None]:
        """Return the tokens from the root to each node, and their number where it matters.

        The root's token is padding. A repetition penalty needs no order, so that of nodes is kept.
        """
        paths = torch.where(ancestors, tree.tokens[:, None], tree.tokens[:, :1, None])
        if not self.has_processors:
            return paths, None
        order = (~ancestors).to(torch.uint8).argsort(dim=-1, stable=True)
        is_present = tree.parents >= 0
        is_present[:, 0] = True
        return paths.gather(-1, order), ancestors.sum(-1) * is_present

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


def _group_scores(
    settings: Sampling, scores: Tensor, paths: Tensor, text: Tensor, lengths: Tensor
) -> Tensor:
    """Apply the logits processors of transformers to rows with the same settings."""
    tokens, flat = paths.flatten(0, 1), scores.flatten(0, 1)
    processors: list[Any] = []
    # the processors of a row have the penalty too, in its place among them
    if settings.repetition_penalty != 1 and not settings.has_processors:
        positions = torch.arange(text.shape[1], device=text.device)
        root = text.gather(1, lengths[:, None])
        prefix = torch.where(positions <= lengths[:, None], text, root)
        tokens = torch.cat([prefix.repeat_interleave(scores.shape[1], dim=0), tokens], dim=1)
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
    # one by one, because the compiler cannot trace transformers' list of them
    for processor in processors:
        flat = processor(tokens, flat)
    return flat.view(scores.shape)


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
    return [settings.with_index(index) for index, settings in enumerate(sampling)]


# --- drafts that see the noise ------------------------------------------------------------------


class CoupledDrafter(Drafter):
    """Adds the noise of each position to a drafter's logits.

    The logits get each row's temperature, cuts and penalties, and then the noise that the base
    samples with at that position. The argmax is the base's token with a probability of at least
    (1 - TV) / (1 + TV), where TV is the total variation distance of both distributions. Rows at
    temperature zero keep their logits, except that their own processors apply. The decoded text is
    the same for every drafter.

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

    `paths` are the tokens from the root to each node. Greedy rows without processors keep their
    logits.
    """
    base_logits = over_vocabulary(drafter, logits, sampling.vocab_size)
    noisy = sampling.scores(base_logits, paths)
    if sampling.any_sampled:
        noisy = noisy + sampling.level_noise(paths.shape[-1] - 1)
    if base_logits is not logits:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        noisy = noisy[..., drafter.to_tokens(columns)]
    if sampling.has_processors:
        # finite, because a drafter may know none of the allowed tokens
        noisy = noisy.clamp(min=FORBIDDEN)
    if sampling.all_sampled:
        return noisy
    return torch.where(sampling.adjusts_draft[:, None, None], noisy, logits)


def over_vocabulary(drafter: Drafter, logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits over the base's vocabulary; tokens that cannot be drafted get -inf."""
    if logits.shape[-1] == vocab_size:
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device)
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    out[..., drafter.to_tokens(columns)] = logits
    return out
