import pytest
import torch

from specheads.decoding.acceptance import noise


def test_the_first_numbers_are_those_of_splitmix64():
    # the reference generator's outputs from state 0: state n of it is n steps, and so is key n
    step = 0x9E3779B97F4A7C15
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = torch.tensor([(n * step + 2**63) % 2**64 - 2**63 for n in range(3)])
    assert [value % 2**64 for value in noise.bits(keys).tolist()] == wanted


def test_a_number_follows_from_its_keys_alone():
    seeds, places = torch.tensor([3, 9, 4]), torch.arange(50)
    table = noise.uniform(seeds[:, None], places, 1)
    assert torch.equal(table[1, 7], noise.uniform(9, torch.tensor(7), 1))
    assert torch.equal(table.T, noise.uniform(seeds, places[:, None], 1))
    assert not (table == noise.uniform(seeds[:, None], places, 2)).any()
    assert len(table.unique()) == table.numel()


def test_numbers_are_uniform_and_those_of_neighbouring_keys_unrelated():
    table = noise.uniform(torch.arange(300)[:, None], torch.arange(1000), 0)
    assert 0 < table.min() < 1e-4
    assert 1 - 1e-4 < table.max() < 1
    shares = torch.histc(table.flatten(), bins=100, min=0, max=1) / table.numel()
    # six standard errors of a share of one in a hundred
    torch.testing.assert_close(shares, torch.full_like(shares, 0.01), atol=1.1e-3, rtol=0.0)
    centred = table - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1))):
        assert (centred * other).mean().abs() * 12 < 6 / table.numel() ** 0.5


def test_the_largest_noisy_log_probability_is_a_draw():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    keys = noise.bits(torch.arange(40_000))
    drawn = (probs.log() + noise.gumbel(keys, 4)).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares.double(), probs, atol=0.012, rtol=0.0)


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_prompts_get_seeds_of_their_own(seed):
    seeds = [noise.derive(seed, index) for index in range(1000)]
    assert len({*seeds}) == 1000
    assert all(0 <= one < 2**63 for one in seeds)
    assert seeds[7] == int(noise.bits(torch.tensor(seed), 7)) % 2**63
    # runs with neighbouring seeds share no prompt's noise
    assert not {*seeds} & {noise.derive((seed + 1) % 2**63, index) for index in range(1000)}
