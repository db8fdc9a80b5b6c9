"""Sampling noise as a pure function of integers, without a generator or state.

The samples of a request depend on its seed and on positions in its text only. They do not depend on
other rows of the batch or on the number of tokens that a step accepts.
"""

import functools

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from specheads.base.cache import upload
from specheads.core.texts import FIRST, SECOND, STEP

BLOCK = 128
"""Numbers of a row that are compared at once; most vocabularies are a multiple."""


def likeliest(logits: Float[Tensor, "*batch vocab"]) -> Int[Tensor, "*batch"]:
    """Return the index of the largest number of each row, the first of equals.

    On a CPU torch's argmax compares one number at a time and amax many. Finding the block of the
    largest number first takes at most a third of the time.
    """
    if not in_blocks(logits):
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, BLOCK))
    at = blocks.amax(-1).argmax(-1)
    inside = blocks.gather(-2, at[..., None, None].expand(*at.shape, 1, BLOCK))
    return at * BLOCK + inside[..., 0, :].argmax(-1)


def in_blocks(logits: Float[Tensor, "*batch vocab"]) -> bool:
    """Return whether rows are searched block by block: on a CPU, if they are whole blocks."""
    return logits.device.type == "cpu" and logits.shape[-1] % BLOCK == 0


TOKEN, BONUS, COIN, DRAFT = range(4)
"""Kinds of noise, which are the last key: the token at a position, and, for sampled drafts, the
token after the last accepted one, the test of a node, and the draft itself."""


def bits(
    *keys: Int64[Tensor, "..."] | int, state: Int64[Tensor, "..."] | None = None
) -> Int64[Tensor, "..."]:
    """Return 64 random bits for each combination of keys, which broadcast.

    Each key is mixed in by one step of SplitMix64. Numbers of several kinds for the same keys need
    one more key for the kind. `state` is the result for earlier keys.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators.
    """
    if state is None:
        device = next((key.device for key in keys if isinstance(key, Tensor)), None)
        state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        # products and sums overflow, as the algorithm requires
        state = _mix(state + (key + STEP))
    return state


def uniform(*keys: Int64[Tensor, "..."] | int) -> Float64[Tensor, "..."]:
    """Return a uniform number in (0, 1) for each combination of keys."""
    return (_unsigned_shift(bits(*keys), 12).double() + 0.5) * 2.0**-52


def gumbel(
    keys: Int64[Tensor, "*batch"], size: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch vocab"]:
    """Return Gumbel noise for each of `size` tokens under each key; keys are random bits.

    The argmax of log-probabilities plus this noise is a sample of their distribution, and the
    largest k in order are k samples without replacement (Kool et al. 2019, arXiv:1903.06059).

    Each token costs one product: the key and the token's constant are random odd numbers, so their
    product modulo 2**64 is random too, and its upper bits depend on all bits of both. Large noise
    comes from small products, which floats can distinguish down to 2**-63, so that rare tokens can
    be sampled.

    Source: Dietzfelbinger et al. 1997, A reliable randomized algorithm for the closest-pair
    problem, for the product; Daliri et al. 2024, arXiv:2408.07978, for noise shared with drafts.
    """
    return of_products(products(keys, constants(size, keys.device), dtype))


def products(
    keys: Int64[Tensor, "*batch"], constants: Int64[Tensor, "*#batch vocab"], dtype: torch.dtype
) -> Float[Tensor, "*batch vocab"]:
    """Return the absolute product of each key with each token's constant.

    A smaller product gives larger noise.
    """
    # an odd number is never zero, so the noise is finite
    return ((keys | 1)[..., None] * constants).to(dtype).abs_()


def of_products(products: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the noise of these products, in place."""
    # the factor keeps the uniform number below one, and the noise finite
    below_one = 1 - torch.finfo(products.dtype).eps / 2
    return products.mul_(-(2.0**-63) * below_one).log1p_().neg_().log_().neg_()


@functools.lru_cache(maxsize=8)
def constants(size: int, device: torch.device) -> Int64[Tensor, " vocab"]:
    """Return a random odd number for each token; it does not depend on the size."""
    return bits(torch.arange(size, device=device)) | 1


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _unsigned_shift(value, 30)) * FIRST
    value = (value ^ _unsigned_shift(value, 27)) * SECOND
    return value ^ _unsigned_shift(value, 31)


def _unsigned_shift(value: Tensor, places: int) -> Tensor:
    # torch's right shift keeps the sign
    return (value >> places) & ((1 << (64 - places)) - 1)


CACHED = 2**17
"""Numbers computed at once, so that they stay in the CPU's cache between operations."""

LIKELY = 8
"""Blocks of a row whose sums are computed first; the best one excludes most other blocks."""

_SLACK = 1024
"""Bound on the error of the noise in roundings; two logarithms of numbers below 64 have less."""


def gumbel_max(
    scores: Float[Tensor, "node vocab"], keys: Int64[Tensor, " node"]
) -> Int[Tensor, " node"]:
    """Return the token with the largest sum of score and noise, the first of equals.

    The result is `likeliest(scores + gumbel(keys))` for a vocabulary of whole blocks. Tokens that
    cannot win need only the product, and not the two logarithms, which are most of the cost.

    The bound of a block is its best score plus the noise of its smallest product. No sum of the
    block exceeds it: noise decreases with the product, up to the rounding covered by `_SLACK`, and
    addition of floats is monotonic. A block whose bound is below a known sum cannot have the
    maximum.
    """
    dtype, count = scores.dtype, scores.shape[-1] // BLOCK
    tokens = constants(scores.shape[-1], scores.device)
    blocks, odd = scores.reshape(-1, BLOCK), tokens.view(count, BLOCK)

    def sums(nodes: Tensor, places: Tensor) -> Float[Tensor, "any vocab"]:
        """Return the sums of one block for each of these nodes."""
        found = products(keys[nodes], odd.index_select(0, places), dtype)
        return of_products(found).add_(blocks.index_select(0, nodes * count + places))

    most = of_products(_smallest(keys, tokens, dtype)).add_(_SLACK * torch.finfo(dtype).eps)
    bounds = blocks.amax(-1).view_as(most).add_(most)
    likely = bounds.topk(min(LIKELY, count)).indices
    nodes = torch.arange(len(keys), device=keys.device)
    first = sums(nodes.repeat_interleave(likely.shape[1]), likely.flatten())
    reached = first.view(len(keys), -1).amax(-1, keepdim=True)
    # negated, so that NaN counts as the largest, as in argmax
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
        products(some, constants, dtype).unflatten(-1, (-1, BLOCK)).amin(-1)
        for some in keys.split(max(1, CACHED // len(constants)))
    ]
    return torch.cat(found)


CHUNK = {"cpu": 2**16}
"""Numbers computed at once on a CPU, so that they stay in its cache between operations."""

DEVICE_CHUNK = 2**22
"""The same on other devices, to limit temporary memory."""


class NoiseCache:
    """Gumbel noise of each token at the positions after each row's root.

    A row's noise depends on its seed and the position only. Greedy rows have zeros, at no cost.
    Position i is in slot i modulo the number of slots, so that noise stays in place while roots
    advance.

    Args:
        seeds: Seed of each row.
        drawing: Whether each row samples.
        vocab_size: Number of tokens.
        dtype: Dtype of the noise.
    """

    def __init__(
        self,
        seeds: Int[Tensor, " batch"],
        drawing: list[bool],
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.seeds, self.drawing = seeds, drawing
        self.vocab_size, self.dtype = vocab_size, dtype
        self._seeded = bits(seeds)
        self._values: Float[Tensor, "batch slot vocab"] | None = None
        self._rows = torch.arange(len(drawing), device=seeds.device)[:, None]
        self._known = [0] * len(drawing)
        """Number of positions after each root whose noise is in the ring, known on the host."""

    def after(
        self,
        lengths: Int[Tensor, " batch"],
        depths: Int[Tensor, "batch node"] | int,
        num_positions: int,
    ) -> Float[Tensor, "batch node vocab"]:
        """Return the noise at the position after each node.

        Args:
            lengths: Position of each row's root.
            depths: Depth of each node below the root; a number is one node per row.
            num_positions: Positions after the root that this step needs.
        """
        values = self._filled(lengths, num_positions)
        slots = values.shape[1]
        places = self._rows * slots + (lengths[:, None] + (depths + 1)) % slots
        return values.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)

    def draw(
        self,
        scores: Float[Tensor, "batch node vocab"],
        lengths: Int[Tensor, " batch"],
        depths: Int[Tensor, "batch node"],
        num_positions: int,
    ) -> Int[Tensor, "batch node"]:
        """Return the token with the largest sum of score and noise after each node.

        The other arguments are those of `after`. If drafts have not computed the noise, it is
        computed only for tokens that can win.
        """
        scores = scores.to(self.dtype)
        if self._values is not None or not in_blocks(scores):
            return likeliest(self.after(lengths, depths, num_positions).add_(scores))
        after = lengths[:, None] + (depths + 1)
        keys = bits(after, TOKEN, state=self._seeded[:, None])
        drawn = gumbel_max(scores.flatten(0, 1), keys.flatten()).view_as(keys)
        if all(self.drawing):
            return drawn
        return torch.where(torch.tensor(self.drawing)[:, None], drawn, likeliest(scores))

    def _filled(self, lengths: Tensor, num_positions: int) -> Float[Tensor, "batch slot vocab"]:
        """Return the ring with the noise of `num_positions` positions after each root."""
        if self._values is None or self._values.shape[1] < num_positions:
            shape = len(self.drawing), num_positions, self.vocab_size
            self._values = torch.zeros(shape, dtype=self.dtype, device=lengths.device)
            self._known = [0] * len(self.drawing)
        slots = self._values.shape[1]
        missing = [
            [row, ahead + 1, row * slots]
            for row, (known, draws) in enumerate(zip(self._known, self.drawing, strict=True))
            for ahead in range(known, num_positions)
            if draws
        ]
        if missing:
            rows, ahead, first = upload(missing, lengths.device).unbind(-1)
            positions = lengths[rows] + ahead
            keys = bits(positions, TOKEN, state=self._seeded[rows])
            places = first + positions % slots
            size = max(1, CHUNK.get(lengths.device.type, DEVICE_CHUNK) // self.vocab_size)
            flat = self._values.flatten(0, 1)
            for some, where in zip(keys.split(size), places.split(size), strict=True):
                flat.index_copy_(0, where, gumbel(some, self.vocab_size, self.dtype))
        self._known = [max(known, num_positions) for known in self._known]
        return self._values

    def advance(self, counts: list[int]) -> None:
        """Drop the noise of committed positions, `counts[b]` in row b."""
        self._known = [
            max(known - count, 0) for known, count in zip(self._known, counts, strict=True)
        ]

    def keep(self, rows: list[int], index: Int[Tensor, " kept"]) -> "NoiseCache":
        """Return the noise of these rows, given on the host and on the device."""
        kept = NoiseCache(
            self.seeds[index], [self.drawing[row] for row in rows], self.vocab_size, self.dtype
        )
        if self._values is not None:
            kept._values = self._values[index]
            kept._known = [self._known[row] for row in rows]
        return kept

    def join(self, other: "NoiseCache") -> "NoiseCache":
        """Return the noise of both; it is recomputed if their rings differ in size."""
        joined = NoiseCache(
            torch.cat([self.seeds, other.seeds]),
            self.drawing + other.drawing,
            self.vocab_size,
            self.dtype,
        )
        ours, theirs = self._values, other._values
        if ours is not None and theirs is not None and ours.shape[1] == theirs.shape[1]:
            joined._values = torch.cat([ours, theirs])
            joined._known = self._known + other._known
        return joined
