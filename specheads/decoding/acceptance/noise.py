"""Random numbers as pure functions of integers: no generator, no state, the same everywhere.

What a request draws follows from its own seed and the place in its text, and so neither from
its neighbours in the batch nor from how many tokens a step happened to accept.
"""

import functools

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

TOKEN, BONUS, COIN, DRAFT = range(4)
"""Kinds of noise, the third key of each: of the token at a position, and for drafts that are drawn
and tested the token after the last one kept, a node's test, and the draft itself."""

_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: the golden ratio's bits
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def bits(
    *keys: Int64[Tensor, "..."] | int, state: Int64[Tensor, "..."] | None = None
) -> Int64[Tensor, "..."]:
    """Return 64 random bits for each combination of keys, which broadcast.

    Each key is mixed in by one step of SplitMix64. Whoever needs numbers of several kinds for
    the same keys gives each kind a key of its own. `state` is what this returned for earlier keys.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators.
    """
    if state is None:
        device = next((key.device for key in keys if isinstance(key, Tensor)), None)
        state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        # products and sums wrap round, as the algorithm wants them to
        state = _mix(state + (key + _STEP))
    return state


def uniform(*keys: Int64[Tensor, "..."] | int) -> Float64[Tensor, "..."]:
    """Return a uniform number for each combination of keys: above zero and below one."""
    return (_unsigned_shift(bits(*keys), 12).double() + 0.5) * 2.0**-52


def gumbel(
    keys: Int64[Tensor, "*batch"], size: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch vocab"]:
    """Return Gumbel noise for each of `size` tokens under each key, which is itself random bits.

    The largest of log-probabilities with this added is a draw from their distribution, and the
    largest k in order are k draws without replacement (Kool et al. 2019, arXiv:1903.06059).

    A key costs one product a token: it and every token's constant are random odd numbers, so their
    product modulo 2**64 is as random, and its upper bits depend on all of both. Large noise comes
    from small products, which floats tell apart down to 2**-63: rare tokens have their chance.

    Source: Dietzfelbinger et al. 1997, A reliable randomized algorithm for the closest-pair
    problem, for the product; Daliri et al. 2024, arXiv:2408.07978, for noise shared with drafts.
    """
    return of_products(products(keys, constants(size, keys.device), dtype))


def products(
    keys: Int64[Tensor, "*batch"], constants: Int64[Tensor, "*#batch vocab"], dtype: torch.dtype
) -> Float[Tensor, "*batch vocab"]:
    """Return the size of each key's products with these tokens' constants.

    The smaller a product, the larger the noise that it stands for.
    """
    # an odd number is never zero, and so noise is finite
    return ((keys | 1)[..., None] * constants).to(dtype).abs_()


def of_products(products: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the noise that products stand for, in their place."""
    # the factor keeps the share below one: noise is finite at this end too
    below_one = 1 - torch.finfo(products.dtype).eps / 2
    return products.mul_(-(2.0**-63) * below_one).log1p_().neg_().log_().neg_()


@functools.lru_cache(maxsize=8)
def constants(size: int, device: torch.device) -> Int64[Tensor, " vocab"]:
    """Return a random odd number for each token, the same whatever the size."""
    return bits(torch.arange(size, device=device)) | 1


def derive(seed: int, index: int) -> int:
    """Return a seed of its own for the `index`-th of many requests made with one seed.

    It is `bits(seed, index)` without its sign, in whole numbers of Python: many prompts would
    wait long for as many little tensors.
    """
    state = 0
    for key in (seed, index):
        state = (state + key + _STEP) % 2**64
        state = (state ^ (state >> 30)) * _FIRST % 2**64
        state = (state ^ (state >> 27)) * _SECOND % 2**64
        state ^= state >> 31
    return state % 2**63


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _unsigned_shift(value, 30)) * _FIRST
    value = (value ^ _unsigned_shift(value, 27)) * _SECOND
    return value ^ _unsigned_shift(value, 31)


def _unsigned_shift(value: Tensor, places: int) -> Tensor:
    # torch shifts signed numbers and drags the sign along
    return (value >> places) & ((1 << (64 - places)) - 1)
