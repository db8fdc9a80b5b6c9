"""Seeds of many requests, derived from one seed."""

STEP = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: the golden ratio's bits
FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
SECOND = -7723592293110705685  # 0x94D049BB133111EB
"""Constants of SplitMix64, as signed numbers."""


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th of many requests with one seed.

    It is `decoding.noise.bits(seed, index)` without the sign, in Python: fast for one number.
    """
    state = 0
    for key in (seed, index):
        state = (state + key + STEP) % 2**64
        state = (state ^ (state >> 30)) * FIRST % 2**64
        state = (state ^ (state >> 27)) * SECOND % 2**64
        state ^= state >> 31
    return state % 2**63
