import pytest
import torch

from specheads.decoding import noise
from specheads.decoding.noise import derive_seed


def test_the_first_numbers_are_those_of_splitmix64():
    # the reference generator's outputs from state 0: state n of it is n steps, and so is key n
    step = 0x9E3779B97F4A7C15
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = torch.tensor([(n * step + 2**63) % 2**64 - 2**63 for n in range(3)])
    assert [value % 2**64 for value in noise.bits(keys).tolist()] == expected


def test_a_number_follows_from_its_keys_alone():
    seeds, positions = torch.tensor([3, 9, 4]), torch.arange(50)
    table = noise.uniform(seeds[:, None], positions, 1)
    assert torch.equal(table[1, 7], noise.uniform(9, torch.tensor(7), 1))
    assert torch.equal(table.T, noise.uniform(seeds, positions[:, None], 1))
    assert not (table == noise.uniform(seeds[:, None], positions, 2)).any()
    assert len(table.unique()) == table.numel()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the deviation of counts from their expectation, in standard deviations.

    The cube root of a chi-square variable is nearly normal (Wilson and Hilferty 1931).
    """
    free = counts.numel() - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / free) ** (1 / 3) - 1 + 2 / (9 * free)) / (2 / (9 * free)) ** 0.5


FAR = 4.75
"""One sample in a million is further away."""

PROBS = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)


def drawn(seeds: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    gumbels = noise.gumbel(noise.bits(seeds, positions, noise.TOKEN), len(PROBS), dtype)
    assert gumbels.dtype == dtype
    return (PROBS.log().to(dtype) + gumbels).argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_the_largest_noisy_log_probability_is_a_draw(over, dtype):
    indices, constant = torch.arange(100_000), torch.full((100_000,), 6)
    seeds, positions = (indices, constant) if over == "seeds" else (constant, indices)
    counts = torch.bincount(drawn(seeds, positions, dtype), minlength=len(PROBS))
    assert chi_square(counts, PROBS * len(indices)) < FAR


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (1, -1), (0, 2)])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(step):
    seeds, positions = torch.arange(1, 318)[:, None], torch.arange(10, 327)
    seeds, positions = seeds.expand(317, 317), positions.expand(317, 317)
    first = drawn(seeds, positions, torch.float64)
    second = drawn(seeds + step[0], positions + step[1], torch.float64)
    common = PROBS[:6]
    is_small = (first < 6) & (second < 6)
    counts = torch.bincount((first * 6 + second)[is_small], minlength=36)
    share = (common / common.sum())[:, None] * (common / common.sum())
    assert chi_square(counts, share.flatten() * is_small.sum()) < FAR
    # the same counts must show positions that share their noise
    counts = torch.bincount((first * 6 + first)[is_small], minlength=36)
    assert chi_square(counts, share.flatten() * is_small.sum()) > 10 * FAR


def test_gumbel_noise_has_its_distribution_to_the_tails():
    keys = noise.bits(torch.arange(20))
    for dtype in (torch.float32, torch.float64):
        gumbels = noise.gumbel(keys, 50_000, dtype).double()
        assert gumbels.isfinite().all()
        shares = torch.histc((-(-gumbels).exp()).exp(), bins=200, min=0, max=1)
        assert chi_square(shares, torch.full_like(shares, 5_000)) < FAR
        # a token of probability 1e-5 beats another once in 100,000: clocks below 1e-5 are as many
        rare = (gumbels > torch.tensor(1e5).log()).sum()
        assert 0 <= rare <= 30
        assert abs(float((gumbels > torch.tensor(1e3).log()).sum()) - 1_000) < 4.75 * 1_000**0.5


def test_float32_tells_the_largest_noise_apart_as_float64_does():
    keys = noise.bits(torch.arange(50))
    single, double = (noise.gumbel(keys, 49_152, dtype) for dtype in (torch.float32, torch.float64))
    assert single.topk(64, dim=-1).values.diff(dim=-1).abs().min() > 0
    assert torch.equal(single.argmax(-1), double.argmax(-1))
    # a token's noise does not depend on the number of tokens
    assert torch.equal(noise.gumbel(keys, 61), noise.gumbel(keys, 49_152)[:, :61])


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_prompts_get_seeds_of_their_own(seed):
    seeds = [derive_seed(seed, index) for index in range(1000)]
    assert len({*seeds}) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[7] == int(noise.bits(torch.tensor(seed), 7)) % 2**63
    # runs with neighbouring seeds share no prompt's noise
    assert not {*seeds} & {derive_seed((seed + 1) % 2**63, index) for index in range(1000)}
