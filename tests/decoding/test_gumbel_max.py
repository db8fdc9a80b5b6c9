"""The draw that makes noise for a few tokens only is the one that makes it for all, to the bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specheads.core.tree import TokenTree
from specheads.decoding import noise
from specheads.decoding.noise import gumbel_max
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState

VOCAB = 49_152
"""That of SmolLM2."""

CUTS = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}]


def logits_of(shape: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return logits after so many nodes, each of its own."""
    generator = torch.Generator().manual_seed(len(shape))
    if shape == "flat":
        return torch.full((count, VOCAB), -1.5, dtype=dtype)
    if shape == "normal":
        return torch.randn(count, VOCAB, generator=generator, dtype=dtype)
    # the n-th likeliest token has a share of n to this power, as in language
    power = {"language": 1.2, "peaked": 6.0}[shape]
    ranks = torch.rand(count, VOCAB, generator=generator).argsort(-1) + 1
    return -power * ranks.to(dtype).log()


def keys_of(count: int, position: int = 5) -> Tensor:
    return noise.bits(torch.arange(count), position, noise.TOKEN)


def plain(scores: Tensor, keys: Tensor) -> Tensor:
    return (scores + noise.gumbel(keys, scores.shape[-1], scores.dtype)).argmax(-1)


def row_per_setting(settings: list[Sampling], vocab: int, dtype: torch.dtype) -> SamplingState:
    count = len(settings)
    text = torch.zeros(count, 8, dtype=torch.long)
    return SamplingState(settings, torch.arange(count) % 5, text, vocab, dtype=dtype)


def family(count: int) -> TokenTree:
    """Return a root with two children and a grandchild for each row."""
    tokens = torch.tensor([0, 7, 9, 4]).expand(count, -1)
    return TokenTree(tokens, torch.tensor([-1, 0, 0, 1]).expand(count, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("shape", ["peaked", "language", "normal", "flat"])
def test_the_draw_is_that_of_the_whole_vocabulary(shape, temperature, dtype):
    settings = [Sampling(temperature=temperature, seed=3 + place, **CUTS[place % 4])
                for place in range(8)]  # fmt: skip
    rows = row_per_setting(settings, VOCAB, dtype)
    tree = family(8)
    logits = logits_of(shape, 32, dtype).view(8, 4, VOCAB)
    chosen = rows.choose(tree, logits, tree.ancestors())
    paths = torch.zeros(8, 4, 1, dtype=torch.long)
    places = rows.lengths[:, None] + torch.tensor([1, 2, 2, 3])
    found = noise.gumbel(noise.bits(rows.seeds[:, None], places, noise.TOKEN), VOCAB, dtype)
    assert torch.equal(chosen, (rows.scores(logits, paths) + found).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_draws_from_language_are_those_of_the_whole_vocabulary(dtype):
    scores = logits_of("language", 16, dtype)
    for position in range(20):
        keys = keys_of(16, position)
        assert torch.equal(gumbel_max(scores, keys), plain(scores, keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_all_sums_are_nearly_equal_the_last_bit_decides(dtype):
    # no block can be ruled out but by rounding: the worst case for a bound
    keys = keys_of(8)
    scores = -noise.gumbel(keys, VOCAB, dtype)
    assert torch.equal(gumbel_max(scores, keys), plain(scores, keys))
    scores += torch.linspace(0, 1e-5, VOCAB, dtype=dtype)
    assert torch.equal(gumbel_max(scores, keys), plain(scores, keys))


def test_of_equal_sums_the_first_wins():
    keys = keys_of(32)
    for size in (2.0**23, 2.0**25, 2.0**27):
        # so large that sums are rounded to multiples of 1, 4 and 16
        scores = torch.full((32, VOCAB), size)
        sums = scores + noise.gumbel(keys, VOCAB, torch.float32)
        assert ((sums == sums.amax(-1, keepdim=True)).sum(-1) > 1).any()
        assert torch.equal(gumbel_max(scores, keys), sums.argmax(-1))


def test_infinite_scores_and_those_that_are_no_numbers_count_as_argmax_counts_them():
    scores, keys = logits_of("language", 5, torch.float32), keys_of(5)
    scores[0] = -torch.inf
    scores[1, 1:] = -torch.inf
    scores[2, [300, 40_000]] = torch.inf
    scores[3, [500, 40_000]] = torch.nan
    scores[4, :1000] = -torch.inf
    chosen = gumbel_max(scores, keys)
    assert torch.equal(chosen, plain(scores, keys))
    assert chosen[:4].tolist() == [0, 0, 300, 500]


def test_few_tokens_get_noise(monkeypatch):
    made: list[int] = []
    right = noise.of_products

    def counting(products: Tensor) -> Tensor:
        made.append(products.numel())
        return right(products)

    monkeypatch.setattr(noise, "of_products", counting)
    for shape, most in (("peaked", 0.04), ("language", 0.25), ("flat", 0.04)):
        made.clear()
        gumbel_max(logits_of(shape, 16, torch.float32), keys_of(16))
        assert sum(made) < most * 16 * VOCAB


@pytest.mark.parametrize("vocab", [256, 61])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_do_not_depend_on_drafts_or_on_other_rows(vocab, dtype):
    settings = [Sampling(temperature=1.0, seed=place) for place in range(6)]
    settings[2] = GREEDY
    tree = family(6)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, vocab, generator=generator, dtype=dtype)
    rows, seen = (row_per_setting(settings, vocab, dtype) for _ in range(2))
    seen.level_noise(1)
    chosen = rows.choose(tree, logits, tree.ancestors())
    assert torch.equal(chosen, seen.choose(tree, logits, tree.ancestors()))
    assert torch.equal(chosen[2], logits[2].argmax(-1))
    alone = rows.keep([4]).choose(family(1), logits[4:5], family(1).ancestors())
    assert torch.equal(chosen[4:5], alone)


def test_draws_for_logits_of_half_precision_are_in_single():
    rows = row_per_setting([Sampling(temperature=1.0)] * 4, 256, torch.bfloat16)
    assert rows.dtype == torch.float32
    tree = family(4)
    logits = torch.randn(4, 4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    single = replace(rows, dtype=torch.float32)
    expected = single.choose(tree, logits.float(), tree.ancestors())
    assert torch.equal(rows.choose(tree, logits, tree.ancestors()), expected)
