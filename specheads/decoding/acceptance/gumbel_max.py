"""The draw itself, with noise made for no more tokens than can still win."""

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from specheads.decoding.acceptance import noise
from specheads.decoding.acceptance.accept import BLOCK

CACHED = 2**17
"""Numbers that are made at once: as many as stay in a processor's cache between operations."""

LIKELY = 8
"""Blocks of a row whose sums are computed first: the best of them rules out most of the others."""

_SLACK = 1024
"""Roundings by which noise may be off: two logarithms of numbers below 64 are off by less."""


def gumbel_max(
    scores: Float[Tensor, "node vocab"], keys: Int64[Tensor, " node"]
) -> Int[Tensor, " node"]:
    """Return the token whose score and noise together are the largest, the first of equals.

    It is `likeliest(scores + gumbel(keys))`, for a vocabulary of whole blocks: of tokens that
    cannot win only the product is made, and the two logarithms, most of the cost, are not.

    No sum of a block exceeds its bound, the block's best score plus the noise of its smallest
    product: noise falls as the product grows, to within the rounding that `_SLACK` allows for,
    and floats keep their order when they are added. So a block whose bound is below a sum found
    elsewhere holds neither the largest nor its equal.
    """
    dtype, count = scores.dtype, scores.shape[-1] // BLOCK
    tokens = noise.constants(scores.shape[-1], scores.device)
    blocks, constants = scores.reshape(-1, BLOCK), tokens.view(count, BLOCK)

    def sums(nodes: Tensor, places: Tensor) -> Float[Tensor, "any vocab"]:
        """Return the sums of one block of each of these nodes."""
        products = noise.products(keys[nodes], constants.index_select(0, places), dtype)
        return noise.of_products(products).add_(blocks.index_select(0, nodes * count + places))

    most = noise.of_products(_smallest(keys, tokens, dtype)).add_(_SLACK * torch.finfo(dtype).eps)
    bounds = blocks.amax(-1).view_as(most).add_(most)
    likely = bounds.topk(min(LIKELY, count)).indices
    nodes = torch.arange(len(keys), device=keys.device)
    first = sums(nodes.repeat_interleave(likely.shape[1]), likely.flatten())
    reached = first.view(len(keys), -1).amax(-1, keepdim=True)
    # said so that what is not a number counts as the largest, as it does for argmax
    able = ~(bounds < reached)
    best = torch.full_like(bounds, -torch.inf)
    best[able] = sums(*able.nonzero(as_tuple=True)).amax(-1)
    at = best.argmax(-1)
    return at * BLOCK + sums(nodes, at).argmax(-1)


def _smallest(
    keys: Int64[Tensor, " node"], constants: Int64[Tensor, " vocab"], dtype: torch.dtype
) -> Float[Tensor, "node block"]:
    """Return the smallest product of each block of tokens."""
    found = [
        noise.products(some, constants, dtype).unflatten(-1, (-1, BLOCK)).amin(-1)
        for some in keys.split(max(1, CACHED // len(constants)))
    ]
    return torch.cat(found)
