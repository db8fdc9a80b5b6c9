"""Text that differs from the base's own is a tie in rounding, or wrong."""

from dataclasses import replace

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.measure.generation import BaseTexts, GenerationSettings, continue_prompts
from specheads.measure.online import compare_texts, count_identical_exactly, measure_online
from specheads.measure.summary import divergence_note
from tests import tiny
from tests.core.test_exact_attention import exact_base
from tests.oracle import Oracle

WARM = Sampling(temperature=1.0, seed=3)


def compare(base: FrozenBase, texts: list[list[int]], sampling: Sampling = Sampling()):  # noqa: B008
    """Return the base's texts, and these compared with them; no texts compare its own."""
    generation = GenerationSettings(max_new_tokens=12, sampling=sampling)
    base_texts = continue_prompts(base, tiny.prompts(), generation)
    rows = zip(tiny.prompts(), texts or base_texts, base_texts, strict=True)
    return base_texts, compare_texts(base, list(rows), sampling)


def change_token(texts: list[list[int]]) -> list[list[int]]:
    """Return the texts with another token in the second one."""
    changed = [list(text) for text in texts]
    changed[1][6] = (changed[1][6] + 1) % tiny.VOCAB
    return changed


def logits_after(base: FrozenBase, text: list[int]) -> torch.Tensor:
    return base.logits_of(base.read(torch.tensor([text])).hidden)[0, -1]


def test_same_text_is_identical_and_no_text_has_no_verdict():
    _, section = compare(tiny.base(), [])
    assert (section.verdict, section.compared, section.identical) == ("identical", 3, 3)
    assert (section.tied, section.wrong, section.first_divergence_ulps) == (0, 0, None)
    assert section.dtype == "float64"
    assert compare_texts(tiny.base(), []).verdict == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
def test_another_token_is_wrong_in_every_dtype(dtype, sampling):
    base = tiny.base(dtype=dtype)
    base_texts, _ = compare(base, [], sampling)
    _, section = compare(base, change_token(base_texts), sampling)
    assert (section.verdict, section.wrong, section.tied) == ("wrong", 1, 0)
    assert (section.compared, section.identical) == (3, 2)
    assert (section.first_divergence_ulps or 0) > 4 * (section.rounding_ulps or 0)


def test_gap_is_the_difference_of_the_two_logits():
    base, (base_texts, _) = tiny.base(), compare(tiny.base(), [])
    texts = change_token(base_texts)
    _, section = compare(base, texts)
    logits = logits_after(base, tiny.prompts()[1] + base_texts[1][:6])
    gap = (logits[base_texts[1][6]] - logits[texts[1][6]]).item()
    assert section.first_divergence_logit_gap == pytest.approx(gap)
    # a unit is the distance to the next float64
    largest = logits[[base_texts[1][6], texts[1][6]]].abs().max()
    unit = (torch.nextafter(largest, largest + 1) - largest).item()
    assert section.first_divergence_ulps == pytest.approx(gap / unit)


def test_tokens_within_rounding_are_a_tie():
    base = tiny.base(dtype=torch.float32)
    base_texts, _ = compare(base, [])
    best, second = (
        logits_after(base, tiny.prompts()[0] + base_texts[0][:4]).topk(2).indices.tolist()
    )
    assert best == base_texts[0][4]
    texts = [list(text) for text in base_texts]
    texts[0][4] = second
    assert compare(base, texts)[1].verdict == "wrong"
    # the same two tokens, with nearly equal rows of the projection
    weight = base.projection.weight
    row = weight[second].clone()
    try:
        weight[second] = weight[best] * (1 - 1e-7)
        section = compare_texts(base, [(tiny.prompts()[0], texts[0], base_texts[0])])
    finally:
        weight[second] = row
    assert (section.verdict, section.tied, section.wrong) == ("parted at a tie", 1, 0)
    assert abs(section.first_divergence_ulps or 0) <= 4 * (section.rounding_ulps or 0)


def test_truncated_text_is_wrong():
    base_texts, _ = compare(tiny.base(), [])
    _, section = compare(tiny.base(), [text[:5] for text in base_texts])
    assert (section.verdict, section.wrong) == ("wrong", 3)


def test_bfloat16_text_differs_only_at_ties():
    base = tiny.base(dtype=torch.bfloat16)
    generation = GenerationSettings(max_new_tokens=40, tree=policies.chain(3))
    texts = BaseTexts(tiny.prompts(), continue_prompts(base, tiny.prompts(), generation))
    _, section, _ = measure_online(base, tiny.oracle(3), texts, generation)
    assert section.wrong == 0
    assert section.identical + section.tied == section.compared == 3


def test_texts_parted_by_rounding_are_decoded_again_with_exact_sums():
    base, prompts = exact_base(exact=False), tiny.prompts()
    generation = GenerationSettings(
        max_new_tokens=30, tree=policies.Static(((0,), (1,), (0, 0)), "tree")
    )
    alone = continue_prompts(base, prompts, generation)
    texts = [prompt + text for prompt, text in zip(prompts, alone, strict=True)]
    oracle = Oracle(texts, 2, tiny.VOCAB)
    assert count_identical_exactly(base, oracle, prompts, generation) == len(prompts)
    assert not base.exact
    # a text that was parted by rounding, as an evaluation finds it
    tie = replace(
        compare_texts(base, []), compared=3, identical=1, tied=2, verdict="parted at a tie"
    )
    assert divergence_note(replace(tie, exact=2)) == ", parted at a tie; with exact sums 3 of 3"
    assert count_identical_exactly(tiny.base(), oracle, prompts, generation) is None
