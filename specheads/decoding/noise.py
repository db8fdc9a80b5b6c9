"""Sampling noise as a pure function of integers, without a generator or state.

The samples of a request depend on its seed and on positions in its text only. They do not depend on
other rows of the batch or on the number of tokens that a step accepts.
"""

import functools

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

STEP = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: the golden ratio's bits
FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
SECOND = -7723592293110705685  # 0x94D049BB133111EB
"""Constants of SplitMix64, as signed numbers."""
BLOCK = 128
"""Numbers of a row that are compared at once; most vocabularies are a multiple."""


def likeliest(logits: Float[Tensor, "*batch vocab"]) -> Int[Tensor, "*batch"]:
    """Return the index of the largest number of each row, the first of equals.

    On a CPU finding the block of the largest number first takes at most a third of the time.
    """
    if logits.device.type != "cpu" or logits.shape[-1] % BLOCK:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, BLOCK))
    index = blocks.amax(-1).argmax(-1)
    block = blocks.gather(-2, index[..., None, None].expand(*index.shape, 1, BLOCK))
    return index * BLOCK + block[..., 0, :].argmax(-1)


TOKEN, BONUS, COIN, DRAFT = range(4)
"""Kinds of noise, which are the last key: the token at a position, and, for sampled drafts, the
token after the last accepted one, the test of a node, and the draft itself."""


def bits(
    *keys: Int64[Tensor, "..."] | int, state: Int64[Tensor, "..."] | None = None
) -> Int64[Tensor, "..."]:
    """Return 64 random bits for each combination of keys, which broadcast.

    Each key is mixed in by one step of SplitMix64. `state` is the result for earlier keys.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators.
    """
    if state is None:
        device = next((key.device for key in keys if isinstance(key, Tensor)), None)
        state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        # products and sums overflow, as the algorithm requires
        state = _mix(state + (key + STEP))
    return state


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th of many requests with one seed."""
    return int(bits(seed, index)) % 2**63


def uniform(*keys: Int64[Tensor, "..."] | int) -> Float64[Tensor, "..."]:
    """Return a uniform number in (0, 1) for each combination of keys."""
    return (_unsigned_shift(bits(*keys), 12).double() + 0.5) * 2.0**-52


def gumbel(
    keys: Int64[Tensor, "*batch"], size: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch vocab"]:
    """Return Gumbel noise for each of `size` tokens under each key; keys are random bits.

    The argmax of log-probabilities plus this noise is a sample of their distribution, and the
    largest k in order are k samples without replacement (Kool et al. 2019, arXiv:1903.06059).

    The key and the token's constant are random odd numbers, so their product modulo 2**64 is random
    too. Large noise comes from small products, which floats can distinguish down to 2**-63, so that
    rare tokens can be sampled.

    Source: Dietzfelbinger et al. 1997, A reliable randomized algorithm for the closest-pair
    problem, for the product; Daliri et al. 2024, arXiv:2408.07978, for noise shared with drafts.
    """
    # an odd number is never zero, and the factor keeps the uniform number below one: all is finite
    products = ((keys | 1)[..., None] * constants(size, keys.device)).to(dtype).abs_()
    below_one = 1 - torch.finfo(dtype).eps / 2
    return products.mul_(-(2.0**-63) * below_one).log1p_().neg_().log_().neg_()


@functools.cache
def constants(size: int, device: torch.device) -> Int64[Tensor, " vocab"]:
    """Return a random odd number for each token; it does not depend on the size.

    CUDA graphs read it at its address.
    """
    return bits(torch.arange(size, device=device)) | 1


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _unsigned_shift(value, 30)) * FIRST
    value = (value ^ _unsigned_shift(value, 27)) * SECOND
    return value ^ _unsigned_shift(value, 31)


def _unsigned_shift(value: Tensor, num_bits: int) -> Tensor:
    # torch's right shift keeps the sign
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)
