"""From logits to the distribution a request asks for, and the random numbers it draws with.

Probs are those of transformers' own logits processors, for base and drafter alike, and what a
request draws depends on its own seed and on places in its text alone. See docs/losslessness.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from typing import cast

import torch
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

from specheads.core.bounds import whole
from specheads.core.errors import InputError
from specheads.core.seeds import derive_seed
from specheads.core.tree import TokenTree
from specheads.decoding import noise
from specheads.decoding.noise import NoiseCache, likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request wants its tokens chosen; as it stands, greedily."""

    temperature: float = 0.0
    """Divides logits, at least 1e-30. Zero is greedy, whatever `top_k`, `top_p` and `min_p` say."""

    top_k: int = 0
    """Tokens drawn from, the likeliest ones. Zero draws from all."""

    top_p: float = 1.0
    """Probability that the tokens drawn from reach together, likeliest first. One is all."""

    min_p: float = 0.0
    """Probability that a token needs, as a share of the likeliest one's. Zero is none."""

    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens already in the text, the
    prompt included. One is none."""

    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, whole(getattr(self, name), name, None))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
                raise InputError(f"{name} must be a finite number, got {value!r:.80}")
        for name, allowed, holds in (
            # a float32 has no room for logits over less
            (
                "temperature",
                "0 (greedy) or at least 1e-30",
                self.temperature == 0 or self.temperature >= 1e-30,
            ),
            ("top_k", "at least 0, where 0 is all", self.top_k >= 0),
            ("top_p", "above 0 and at most 1, where 1 is all", 0 < self.top_p <= 1),
            ("min_p", "from 0 (none) to 1", 0 <= self.min_p <= 1),
            ("repetition_penalty", "above 0, where 1 is none", self.repetition_penalty > 0),
            ("seed", "from 0 to 2**63 - 1", 0 <= self.seed < 2**63),
        ):
            if not holds:
                raise InputError(f"{name} must be {allowed}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether the base's likeliest token is what it wants, and nothing else."""
        return self.temperature == 0 and self.repetition_penalty == 1

    def of_prompt(self, index: int) -> "Sampling":
        """Return these settings with a seed of its own for the `index`-th of many prompts."""
        return replace(self, seed=derive_seed(self.seed, index))


GREEDY = Sampling()


@dataclass(slots=True)
class SamplingState:
    """What acceptance rules and tree policies may know of a batch: settings, places, texts."""

    sampling: list[Sampling]
    lengths: Int[Tensor, " batch"]
    """Position of each row's root: how many tokens were committed before it."""
    text: Int[Tensor, "batch time"]
    """Each row's tokens, the root at `lengths` the last that counts; wide enough for all that
    is to come, and kept up where a repetition penalty asks for it."""
    vocab_size: int
    """Columns of the base's logits."""
    dtype: torch.dtype = torch.float32
    """That of the base's logits. Draws are computed in it, and in float32 at least."""
    coupled: bool = True
    """Whether drafts see the noise that the base draws with: see `trees.coupling`."""
    depth: int | None = None
    """Levels of the trees to come, at most; None is as many as they have nodes. The noise of that
    many positions is looked up at once."""
    greedy: bool = field(init=False)
    """Whether every row is."""
    draws: bool = field(init=False)
    """Whether any row draws: has a temperature above zero."""
    all_draw: bool = field(init=False)
    """Whether every row draws."""
    penalised: bool = field(init=False)
    """Whether any row has a repetition penalty."""
    drawing: Bool[Tensor, " batch"] = field(init=False)
    """Which rows draw."""
    seeds: Int[Tensor, " batch"] = field(init=False)
    """Seed of each row."""
    _groups: list[tuple[Sampling, Tensor]] = field(init=False)
    _noise: NoiseCache = field(init=False)

    def __post_init__(self) -> None:
        device = self.lengths.device
        self.dtype = torch.promote_types(self.dtype, torch.float32)
        self.greedy = all(one.greedy for one in self.sampling)
        self.penalised = any(one.repetition_penalty != 1 for one in self.sampling)
        drawing = [one.temperature > 0 for one in self.sampling]
        self.draws, self.all_draw = any(drawing), all(drawing)
        self.drawing = torch.tensor(drawing, device=device)
        self.seeds = torch.tensor([one.seed for one in self.sampling], device=device)
        self._noise = NoiseCache(self.seeds, drawing, self.vocab_size, self.dtype)
        places: dict[Sampling, list[int]] = {}
        for place, settings in enumerate(self.sampling):
            places.setdefault(replace(settings, seed=0), []).append(place)
        self._groups = [
            (settings, torch.tensor(rows, device=device)) for settings, rows in places.items()
        ]

    def keep(self, rows: list[int]) -> "SamplingState":
        """Return what is known of these rows: finished requests leave the batch."""
        index = torch.tensor(rows, device=self.lengths.device)
        sampling = [self.sampling[row] for row in rows]
        kept = replace(self, sampling=sampling, lengths=self.lengths[index], text=self.text[index])
        kept._noise = self._noise.keep(rows, index)
        return kept

    def join(self, other: "SamplingState") -> "SamplingState":
        """Return what is known of both batches' rows: new requests join, with texts as wide."""
        lengths = torch.cat([self.lengths, other.lengths])
        text = torch.cat([self.text, other.text])
        joined = replace(self, sampling=self.sampling + other.sampling, lengths=lengths, text=text)
        joined._noise = self._noise.join(other._noise)
        return joined

    def advance(
        self,
        tokens: Int[Tensor, "batch path"],
        lengths: Int[Tensor, " batch"],
        counts: list[int],
    ) -> None:
        """Note what a step added after the root: tokens, padding last, and how many they are.

        The new root stands at `lengths`.
        """
        if self.penalised:
            offsets = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            self.text.scatter_(1, self.lengths[:, None] + offsets, tokens)
        self.lengths = lengths
        if self.draws:
            self._noise.advance(counts)

    def scores(
        self, logits: Float[Tensor, "batch node vocab"], paths: Int[Tensor, "batch node path"]
    ) -> Float[Tensor, "batch node vocab"]:
        """Return the logits of what each row asks for, from a base's or drafter's after each node.

        Logits cover the base's vocabulary. Paths lead from the root to each node, and any token
        of them may stand twice. At temperature zero the largest score is all that counts.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if len(self._groups) == 1:
            return _group_scores(self._groups[0][0], scores, paths, self.text, self.lengths)
        out = torch.empty_like(scores)
        for settings, rows in self._groups:
            inputs = (values[rows] for values in (scores, paths, self.text, self.lengths))
            out[rows] = _group_scores(settings, *inputs)
        return out

    def probs(
        self, logits: Float[Tensor, "batch node vocab"], paths: Int[Tensor, "batch node path"]
    ) -> Float[Tensor, "batch node vocab"]:
        """Return the distribution of what each row asks for: see `scores`.

        At temperature zero one token has it all.
        """
        scores = self.scores(logits, paths)
        probs = scores.softmax(-1)
        if self.all_draw:
            return probs
        best = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.drawing[:, None, None], probs, best)

    def tree_probs(
        self,
        tree: TokenTree,
        logits: Float[Tensor, "batch node vocab"],
        ancestors: Bool[Tensor, "batch node node"],
    ) -> Float[Tensor, "batch node vocab"]:
        """Return the base's distribution after each node of a tree."""
        return self.probs(logits, self._paths(tree, ancestors))

    def choose(
        self,
        tree: TokenTree,
        logits: Float[Tensor, "batch node vocab"],
        ancestors: Bool[Tensor, "batch node node"],
    ) -> Int[Tensor, "batch node"]:
        """Return the token that the base alone would say after each node of a tree.

        It is the largest of the scores with the position's noise added, which is a draw from
        their distribution; at temperature zero there is no noise.
        """
        scores = self.scores(logits, self._paths(tree, ancestors))
        if not self.draws:
            return likeliest(scores)
        deepest = tree.tokens.shape[1] - 1
        deepest = deepest if self.depth is None else min(deepest, self.depth)
        return self._noise.draw(scores, self.lengths, tree.depths(), deepest + 1)

    def level_noise(self, level: int) -> Float[Tensor, "batch 1 vocab"]:
        """Return the noise of the tokens after the nodes `level` edges below the root."""
        # what is drafted is verified: that takes the noise after the last level too
        soon = level if self.depth is None else max(level, self.depth)
        return self._noise.after(self.lengths, level, soon + 1)

    def uniforms(self, ancestors: Bool[Tensor, "batch node node"]) -> Float64[Tensor, "batch node"]:
        """Return the number that draws what rejection leaves over after each node."""
        return noise.uniform(self.seeds[:, None], self._after(ancestors), noise.BONUS)

    def coins(self, ancestors: Bool[Tensor, "batch node node"]) -> Float64[Tensor, "batch node"]:
        """Return the number that decides the test of each node."""
        nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
        return noise.uniform(self.seeds[:, None], self._after(ancestors) - 1, noise.COIN, nodes)

    def _after(self, ancestors: Tensor) -> Tensor:
        """Return the position after each node."""
        return self.lengths[:, None] + ancestors.sum(-1)

    def _paths(self, tree: TokenTree, ancestors: Tensor) -> Int[Tensor, "batch node path"]:
        """Return the tokens from the root to each node, the root's in place of those not above it.

        Only a repetition penalty reads them: without one, just the root's tokens.
        """
        root = tree.tokens[:, :1, None]
        if not self.penalised:
            return root.expand(-1, tree.tokens.shape[1], -1)
        return torch.where(ancestors, tree.tokens[:, None], root)


def _group_scores(
    settings: Sampling, scores: Tensor, paths: Tensor, text: Tensor, lengths: Tensor
) -> Tensor:
    """Return the scores of rows with the same settings: what transformers would apply, in order."""
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
    """Return how each of `count` prompts is sampled; None is greedily.

    What is given for all gives each prompt a seed of its own; a list's seeds are taken as they are.
    """
    if sampling is None or isinstance(sampling, Sampling):
        return [(sampling or GREEDY).of_prompt(index) for index in range(count)]
    if not isinstance(sampling, Sequence):
        raise InputError(f"sampling must be a Sampling(...) or a list, got {sampling!r:.80}")
    if len(sampling) != count:
        raise InputError(
            f"sampling needs settings for each prompt, got {len(sampling)} for {count}; give a "
            "list as long as the prompts"
        )
    return list(sampling)
