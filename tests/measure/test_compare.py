"""Comparisons of methods."""

import functools
import json

import pytest
from transformers import GenerationConfig

from specheads.config.commands import DRAFTERS
from specheads.core.files import dumps
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.measure.compare import (
    DraftMethod,
    TransformersMethod,
    compare_methods,
    comparison_tables,
    condition_table,
    make_condition,
    make_methods,
    ratios,
)
from specheads.measure.generation import BaseTexts, GenerationSettings
from specheads.measure.results import Comparison, MethodResults
from tests import results as tests_results
from tests import tiny
from tests.measure.test_measure import Habit


def base_texts(new_tokens: int, sampling: Sampling | None = None) -> BaseTexts:
    out = generate(tiny.base(), None, tiny.prompts(), max_new_tokens=new_tokens, sampling=sampling)
    return BaseTexts(tiny.prompts(), out.tokens)


def methods() -> dict[str, DraftMethod]:
    head = tiny.oracle(2)
    return {
        "head": DraftMethod(head, policies.chain(2)),
        "prompt_lookup": DraftMethod(None, lookup_tree(4)),
        "hybrid": DraftMethod(head, HybridTree(policies.chain(2), 4)),
    }


@functools.cache
def rows() -> dict[str, MethodResults]:
    generation = GenerationSettings(max_new_tokens=10, batch_size=3, repeats=1)
    return compare_methods(tiny.base(), methods(), base_texts(10), generation)


def comparison(drafters: dict[str, MethodResults]) -> Comparison:
    """Return a comparison with these methods."""
    bare = tests_results.bare()
    return Comparison(
        head=bare.head,
        heads={"head": bare.head, "hybrid": bare.head},
        base=bare.base,
        prompts=bare.prompts,
        settings={},
        conditions=[make_condition(drafters, 0.0, 3), make_condition(drafters, 1.0, 3)],
        provenance=bare.provenance,
    )


def test_methods_get_the_same_prompts_and_write_the_same_text():
    measured = rows()
    assert [row.lossless.identical for row in measured.values()] == [3, 3, 3]
    forwards = {name: row.online.forwards for name, row in measured.items()}
    assert forwards["hybrid"] <= min(forwards["head"], forwards["prompt_lookup"])
    # all are compared with the same timings of the base alone
    assert len({row.speed.base_tokens_per_second for row in measured.values()}) == 1
    stored = json.loads(dumps(comparison(measured)))
    assert stored["conditions"][0]["drafters"]["hybrid"]["num_nodes"] == 7
    table = condition_table(make_condition(measured, 0.0, 3))
    assert [row[0] for row in table.rows[:-1]] == sorted(
        measured, key=lambda name: -measured[name].speed.tokens_per_second
    )
    assert table.rows[-1][0] == "base alone"


def test_suffix_decoding_is_counted_and_timed_with_the_prompts_before_and_not_with_its_answers():
    base, texts = tiny.base(), base_texts(20)
    twice = [texts.prompts[0], texts.prompts[1], texts.prompts[0]]
    generation = GenerationSettings(max_new_tokens=20, repeats=1)
    method = make_methods(["suffix"], base, {}, {})["suffix"]
    counts = [text.counts.forwards for text in method.decode(base, twice, generation)]
    lookup = make_methods(["prompt_lookup"], base, {}, {})["prompt_lookup"]
    first_alone = lookup.decode(base, twice[:1], generation)[0].counts.forwards
    assert counts[2] < counts[0] == first_alone
    for _ in range(2):
        assert method.time(base, twice[:1], generation).forwards == counts[0]
        assert method.time(base, twice[1:2], generation).forwards == counts[1]


def test_ratios_between_methods_are_paired():
    measured = rows()
    for name, row in measured.items():
        assert {*row.over} == {*measured} - {name}
        for rival, gain in row.over.items():
            assert gain.interval[0] <= gain.ratio <= gain.interval[1]
            assert gain.ratio * measured[rival].over[name].ratio == pytest.approx(1.0)
            # all methods write the same tokens, so ratios of rates equal ratios of times
            ratio = row.speed.tokens_per_second / measured[rival].speed.tokens_per_second
            assert gain.ratio == pytest.approx(ratio)
            ratio = row.online.tokens_per_forward / measured[rival].online.tokens_per_forward
            accepted = row.accepted_over[rival]
            assert accepted.interval[0] <= accepted.ratio == pytest.approx(ratio)
    table = ratios(make_condition(measured, 0.0, 3), ["head", "hybrid"], "second")
    assert table.header == ("head", *(row[0] for row in table.rows))
    assert [row[index + 1] for index, row in enumerate(table.rows)] == ["", ""]
    # for two conditions: the drafters, and both ratios between heads
    assert len(list(comparison_tables(comparison(measured)))) == 6


TRANSFORMERS = {
    "transformers": TransformersMethod(),
    "transformers_lookup": TransformersMethod(copied_tokens=4),
    "transformers_assisted": TransformersMethod(assistant=tiny.base("gpt2").model),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_writes_the_same_text_and_is_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    method, base = TRANSFORMERS[name], tiny.base()
    generation = GenerationSettings(max_new_tokens=12, batch_size=2)
    decoded = method.decode(base, tiny.prompts(), generation)
    assert [text.tokens for text in decoded] == [text[:12] for text in tiny.continuations()]
    for counts in [text.counts for text in decoded]:
        # the first forward reads the prompt, and may give more than one token
        assert counts.new_tokens <= 11
        assert counts.forwards > 0
        assert all(a <= b for a, b in zip(counts.accepted, counts.offered, strict=True))
        assert name != "transformers" or counts.forwards == 11
    # the model's own generation_config has no effect
    config = GenerationConfig(no_repeat_ngram_size=1, suppress_tokens=[*range(9)])
    monkeypatch.setattr(base.model, "generation_config", config)
    timing = method.time(base, tiny.prompts(), generation)
    assert method.decode(base, tiny.prompts(), generation) == decoded
    assert base.model.generation_config is config
    assert timing.new_tokens == 36
    assert 0 < timing.step_seconds < timing.seconds


def test_every_method_of_the_command_writes_the_text_of_the_base():
    base, head = tiny.base(), Habit(0.5, 2)
    chain = {"head": policies.chain(2)}
    every = make_methods(DRAFTERS, base, {"head": head}, chain, tiny.base("llama", "eager"))
    generation = GenerationSettings(max_new_tokens=12)
    expected = [text[:12] for text in tiny.continuations()]
    for method in every.values():
        decoded = method.decode(base, tiny.prompts(), generation)
        assert [text.tokens for text in decoded] == expected
    # a copy of the base is always right
    counts = every["draft_model"].decode(base, tiny.prompts(), generation)[0].counts
    assert counts.tokens_per_forward > 3


def test_perfect_assistant_saves_forwards_and_does_not_batch():
    base = tiny.base()
    method = TransformersMethod(assistant=tiny.base("llama", "eager").model)
    both = {"transformers": TRANSFORMERS["transformers"], "transformers_assisted": method}
    generation = GenerationSettings(max_new_tokens=16, batch_size=3, repeats=1)
    measured = compare_methods(base, both, base_texts(16), generation)
    assisted = measured["transformers_assisted"]
    assert assisted.online.tokens_per_forward > 1.5
    assert measured["transformers"].online.tokens_per_forward == 1.0
    assert (assisted.batches, measured["transformers"].batches) == (False, True)
    assert [row.lossless.verdict for row in measured.values()] == ["identical"] * 2
    names = [row[0] for row in condition_table(make_condition(measured, 0.0, 3)).rows]
    assert "transformers_assisted (cannot batch: one by one)" in names
    # above temperature zero it samples other texts, which are not compared
    sampling = Sampling(temperature=1.0, seed=2)
    warm = GenerationSettings(max_new_tokens=8, sampling=sampling, speed_prompts=1)
    texts = base_texts(8, sampling)
    (sampled,) = compare_methods(base, {"transformers_assisted": method}, texts, warm).values()
    assert sampled.lossless.compared == 0
