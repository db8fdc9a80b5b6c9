"""Is speculative text that of the base alone, and if not, was it rounding or a mistake?"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.bounds import refuse_bytes
from specheads.core.errors import InputError
from specheads.core.machine import dtype_name
from specheads.decoding.acceptance.sampling import GREEDY, Rows, Sampling, each_prompt
from specheads.measure.results import Lossless

IDENTICAL, TIED, WRONG = "identical", "parted at a tie", "wrong"
"""Verdicts; of text that is only drawn from the same distribution there is none."""

SLACK = 4
"""Roundings that may lie between two scores of a tie: two logits, each computed in two ways."""

PROMPTS = 4
"""Prompts on which a base of fewer digits is held to itself in float32."""

Texts = Sequence[tuple[list[int], list[int], list[int]]]
"""Prompts, their new tokens with a drafter, and those of the base alone."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where a text is not that of the base alone."""

    gap: float
    """Score of the base's own token there less that of the other."""
    ulps: float
    """The same in units of the spacing that the logits' dtype has at their size."""
    rounding_ulps: float
    """What the base's scores differ by there when it reads at once and token by token, in the
    same units: one at least."""

    @property
    def tied(self) -> bool:
        """Whether rounding explains it."""
        return abs(self.ulps) <= SLACK * self.rounding_ulps


def hold(base: FrozenBase, texts: Texts, sampling: Sampling = GREEDY) -> Lossless:
    """Hold speculative texts against those of the base alone: the `lossless` section.

    Where a text parts from the base's, the base reads what stands before, at once and token by
    token. Two tokens whose scores lie within the rounding that this shows were a tie; others
    are told apart by the base, so that decoding is wrong. Scores are logits as `sampling` has them,
    with the noise that the base drew with, and without cuts.
    """
    partings = [
        part(base, *text, one)
        for text, one in zip(texts, each_prompt(sampling, len(texts)), strict=True)
        if text[1] != text[2]
    ]
    tied = sum(one.tied for one in partings)
    return Lossless(
        compared=len(texts),
        identical=len(texts) - len(partings),
        first_divergence_logit_gap=max((one.gap for one in partings), default=None),
        first_divergence_ulps=max((one.ulps for one in partings), default=None),
        rounding_ulps=max((one.rounding_ulps for one in partings), default=None),
        tied=tied,
        wrong=len(partings) - tied,
        verdict=_verdict(len(texts), len(partings), tied),
        dtype=dtype_name(base.dtype),
    )


def _verdict(compared: int, parted: int, tied: int) -> str:
    if not compared:
        return ""
    return WRONG if tied < parted else TIED if parted else IDENTICAL


def part(
    base: FrozenBase, prompt: list[int], mine: list[int], theirs: list[int], sampling: Sampling
) -> Parting:
    """Return how close a call it was where two different texts part."""
    place = first_difference(mine, theirs)
    text = prompt + theirs[:place]
    whole, stepwise = _read(base, text)
    scores, others = (_scores(logits, text, sampling) for logits in (whole, stepwise))
    if place < min(len(mine), len(theirs)):
        pair = [theirs[place], mine[place]]
    else:
        # one of them ends where the other goes on: no two tokens, so its own best two
        pair = scores.topk(2).indices.tolist()
    best, other = scores[pair].tolist()
    spacing = _spacing(whole[pair]) / (sampling.temperature or 1.0)
    rounding = (scores - others).abs().nan_to_num(0.0).max().item()
    return Parting(best - other, (best - other) / spacing, max(rounding / spacing, 1.0))


def first_difference(mine: list[int], theirs: list[int]) -> int:
    """Return the first place at which two texts differ, or at which the shorter one ends."""
    shorter = min(len(mine), len(theirs))
    return next((place for place in range(shorter) if mine[place] != theirs[place]), shorter)


@torch.inference_mode()
def _read(base: FrozenBase, text: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits after a text, read at once and with its last token behind a cache."""
    tokens = torch.tensor([text], device=base.device)
    whole = base.logits_of(base.read(tokens).hidden[0, -1])
    if len(text) == 1:
        return whole, whole
    cache = base.cache(1, len(text))
    base.prefill(tokens[:, :-1], cache, [len(text) - 1])
    return whole, base.prefill(tokens[:, -1:], cache, [1])[0][0]


def _scores(
    logits: Float[Tensor, " vocab"], text: list[int], sampling: Sampling
) -> Float[Tensor, " vocab"]:
    """Return what the base chooses the largest of, no token being cut off."""
    uncut = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    tokens = torch.tensor([text], device=logits.device)
    length = torch.tensor([len(text) - 1], device=logits.device)
    rows = Rows([uncut], length, tokens, len(logits), dtype=logits.dtype)
    scores = rows.scores(logits[None, None], tokens[:, None, -1:])
    return (scores + rows.level_noise(0) if rows.draws else scores)[0, 0]


def _spacing(logits: Float[Tensor, " some"]) -> float:
    """Return the distance between neighbouring numbers of a dtype, at the size of the largest."""
    _, exponent = torch.frexp(logits.float().abs().max())
    return 2.0 ** (int(exponent) - 1) * torch.finfo(logits.dtype).eps


def in_float32(base: FrozenBase) -> FrozenBase | None:
    """Return a copy of a base of fewer digits in float32; None for others, or without room."""
    if base.dtype.itemsize >= 4 or base.sharding or getattr(base.model, "hf_quantizer", None):
        return None
    try:
        refuse_bytes(4 * base.num_parameters, base.device, "the base in float32", "take a part")
    except InputError:
        return None
    return FrozenBase(deepcopy(base.model).float(), base.tokenizer, name=base.name)
