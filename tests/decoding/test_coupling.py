"""Drafts that see the base's noise are accepted more often, and the text stays the same."""

import pytest
import torch
from torch import Tensor

from specheads.core.tree import TokenTree
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState
from specheads.decoding.trees import policies
from tests import tiny
from tests.decoding.markov import Levels, Markov, grow

DRAWN = Sampling(temperature=1.0)


class Bigrams(Markov):
    """Guesses the next token as the base would after a single token, with noise."""

    def __init__(self, architecture: str, depth: int, blur: float) -> None:
        generator = torch.Generator().manual_seed(5)
        model = tiny.base(architecture).model
        with torch.inference_mode():
            table = model(torch.arange(tiny.VOCAB)[:, None], use_cache=False).logits[:, 0]
        error = torch.randn(table.shape, generator=generator, dtype=table.dtype)
        super().__init__(table + blur * error, depth)


def sampling_rows(
    count: int, vocab: int, chosen: Sampling = DRAWN, *, coupled: bool = True
) -> SamplingState:
    """Return rows of one text and a seed each."""
    samplings = [chosen.of_prompt(row) for row in range(count)]
    positions = torch.full((count,), 4)
    text = torch.zeros(count, 8, dtype=torch.long)
    return SamplingState(samplings, positions, text, vocab, dtype=torch.float64, coupled=coupled)


def chosen(rows: SamplingState, tree: TokenTree, logits: Tensor) -> Tensor:
    """Return the base's token after each node; logits are the same everywhere."""
    return rows.choose(tree, logits.expand(*tree.tokens.shape, -1), tree.ancestors())


# --- how often a guess is right ------------------------------------------------------------------


def planted(seed: int, spread: float, vocab: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of a base and of a drafter that errs by this much."""
    generator = torch.Generator().manual_seed(seed)
    base, error = torch.randn(2, vocab, generator=generator, dtype=torch.float64)
    return (2 * base).log_softmax(-1), (2 * base + spread * error).log_softmax(-1)


def agreement(base: Tensor, draft: Tensor) -> float:
    """Return how probable it is that both have their largest noisy log-probability together.

    Token x is largest in both if its exponential clock is before that of every other token y by
    the larger of the two ratios: one clock of the rate sum over y of max(p_y/p_x, q_y/q_x).
    """
    ratios = torch.maximum(base - base[:, None], draft - draft[:, None])
    return float((1 / ratios.exp().sum(-1)).sum())


PAIRS = [
    (seed, spread, vocab) for seed, spread in ((1, 0.5), (2, 1.5), (3, 4.0)) for vocab in (5, 61)
]


@pytest.mark.parametrize(("seed", "spread", "vocab"), PAIRS)
def test_a_coupled_guess_is_right_at_the_computed_rate(seed, spread, vocab):
    base, draft = planted(seed, spread, vocab)
    count = 8_000
    rows = sampling_rows(count, vocab)
    tree = grow(policies.chain(1), Levels(draft[None, None]), [0] * len(rows.sampling), rows)
    share = (chosen(rows, tree, base)[:, 0] == tree.tokens[:, 1]).double().mean()
    expected = agreement(base, draft)
    error = (expected * (1 - expected) / count) ** 0.5
    assert abs(share - expected) < 4.5 * error
    distance = float((base.exp() - draft.exp()).abs().sum() / 2)
    lower_bound, upper_bound = (1 - distance) / (1 + distance), 1 - distance
    assert lower_bound - 1e-12 <= expected <= upper_bound + 1e-12
    # the best guess of a perfect drafter is still one token
    assert agreement(base, base) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "law",
    [
        Sampling(temperature=0.6),
        Sampling(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
        Sampling(temperature=0.8, repetition_penalty=1.7),
    ],
)
@pytest.mark.parametrize("first", [0, 3])
def test_a_drafter_that_is_the_base_is_always_right_whatever_is_asked_for(law, first):
    base = planted(5, 0.0, 30)[0]
    base[:first] = -torch.inf
    rows = sampling_rows(200, 30, law)
    tree = grow(
        policies.chain(4),
        Levels(base[first:].expand(1, 4, -1), first),
        [0] * len(rows.sampling),
        rows,
    )
    assert torch.equal(chosen(rows, tree, base)[:, :4], tree.tokens[:, 1:])


# --- who sees the noise --------------------------------------------------------------------------


def test_greedy_rows_next_to_sampling_rows_keep_their_drafts():
    drafter = Levels(planted(1, 1.0, 9)[1].expand(1, 2, -1))
    mixed = SamplingState(
        [GREEDY, DRAWN, Sampling(repetition_penalty=2.0)],
        torch.full((3,), 4),
        torch.zeros(3, 8, dtype=torch.long),
        9,
    )
    for policy in (policies.chain(2), policies.BestFirst(6, 2), policies.Beam(2, 2)):
        tree = grow(policy, drafter, [0] * len(mixed.sampling), mixed)
        alone = grow(policy, drafter, [0] * 3, sampling_rows(3, 9, GREEDY))
        assert torch.equal(tree.tokens[[0, 2]], alone.tokens[[0, 2]])


# --- the text ------------------------------------------------------------------------------------


def decoded(monkeypatch: pytest.MonkeyPatch | None = None, *, coupled: bool = True) -> Decoding:
    """Return many texts, perhaps with drafts that see the noise of a wrong position."""
    if monkeypatch is not None:
        right = SamplingState.level_noise
        monkeypatch.setattr(
            SamplingState, "level_noise", lambda rows, level: right(rows, level + 1)
        )
    samplings = [Sampling(temperature=1.0, seed=3).of_prompt(row) for row in range(60)]
    return generate(
        tiny.base(),
        Bigrams("llama", 2, 0.5),
        [[1 + row % 60, 7] for row in range(60)],
        max_new_tokens=24,
        sampling=samplings,
        tree=policies.chain(2),
        coupled=coupled,
    )


def test_noise_of_a_wrong_position_changes_no_text_and_does_not_help(monkeypatch):
    decodings = decoded(), decoded(coupled=False), decoded(monkeypatch)
    assert decodings[0].tokens == decodings[1].tokens == decodings[2].tokens
    with_noise, without, wrong = (sum(decoding.forwards) for decoding in decodings)
    assert with_noise < 0.95 * without
    assert wrong > 1.05 * with_noise
