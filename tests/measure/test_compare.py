"""Comparisons of methods."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from specheads.commands._call import call
from specheads.config import Base, Compare, Data, Evaluation, Tree
from specheads.decoding.generate import generate
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup
from specheads.heads.load import build_for
from specheads.measure import speed
from specheads.measure.compare import (
    compare_methods,
    condition,
    ratios,
    table,
    tables,
    write_comparison,
)
from specheads.measure.generation import GenerationSettings
from specheads.measure.methods import MethodFactory, TransformersMethod, chosen
from specheads.measure.results import CompareSettings, Comparison, MethodResults
from specheads.measure.speed import DraftMethod, time_methods
from tests import results as tests_results
from tests import tiny


def arms() -> dict[str, DraftMethod]:
    head, lookup = tiny.oracle(2), PromptLookup(tiny.VOCAB, 6)
    return {
        "head": DraftMethod(head, policies.chain(2)),
        "prompt_lookup": DraftMethod(lookup, Lookup(4)),
        "hybrid": DraftMethod(Hybrid(head, lookup), HybridTree(policies.chain(2), 4)),
    }


def rows() -> dict[str, MethodResults]:
    base, how = tiny.base(), GenerationSettings(max_new_tokens=10, batch_size=3)
    said = generate(base, None, tiny.prompts(), max_new_tokens=10).tokens
    return compare_methods(base, arms(), tiny.prompts(), said, how, speed_prompts=3, repetitions=1)


def comparison(drafters: dict[str, MethodResults]) -> Comparison:
    """Return a comparison with these methods."""
    bare = tests_results.bare()
    how = CompareSettings(
        max_new_tokens=10, draft_model="", draft_depth=4,
        copied_tokens=10, max_ngram=3, sinks=4, window=60, dtype="float64", device="cpu", seed=0,
    )  # fmt: skip
    return Comparison(
        head=bare.head,
        heads={"head": bare.head, "hybrid": bare.head},
        base=bare.base,
        prompts=bare.prompts,
        settings=how,
        conditions=[condition(drafters, 0.0, 3), condition(drafters, 1.0, 3)],
        provenance=bare.provenance,
    )


def test_methods_get_the_same_prompts_and_write_the_same_text(tmp_path: Path):
    measured = rows()
    assert [row.lossless.identical for row in measured.values()] == [3, 3, 3]
    forwards = {name: row.online.forwards for name, row in measured.items()}
    assert forwards["hybrid"] <= min(forwards["head"], forwards["prompt_lookup"])
    # all are compared with the same timings of the base alone
    assert len({row.speed.base_tokens_per_second for row in measured.values()}) == 1
    path = write_comparison(tmp_path / "report", comparison(measured))
    assert json.loads(path.read_text())["conditions"][0]["drafters"]["hybrid"]["num_nodes"] == 7
    assert (path.parent / "compare.png").read_bytes()[:4] == b"\x89PNG"
    shown = table(condition(measured, 0.0, 3))
    assert [row[0] for row in shown.rows[:-1]] == sorted(
        measured, key=lambda name: -measured[name].speed.tokens_per_second
    )
    assert shown.rows[-1][0] == "base alone"


def test_each_repetition_starts_with_another_method(
    monkeypatch: pytest.MonkeyPatch,
):
    begun: list[str] = []
    true_time = speed.time_generate

    def note(base, drafter, *rest, **settings):
        begun.append(type(drafter).__name__)
        return true_time(base, drafter, *rest, **settings)

    monkeypatch.setattr("specheads.measure.speed.time_generate", note)
    time_methods(
        tiny.base(), arms(), tiny.prompts()[:1], GenerationSettings(max_new_tokens=6), repetitions=2
    )
    order = ["NoneType", "Oracle", "PromptLookup", "Hybrid"]
    # once as a warm-up, then in turns
    assert begun == order + order + order[1:] + order[:1]


def settings(**changes: Any) -> Compare:
    return Compare(
        base=Base(model="x"),
        data=Data(source="python_stdlib"),
        tree=Tree(),
        evaluation=Evaluation(),
        **changes,
    )


def test_draft_model_methods_need_a_draft_model():
    assert chosen(settings()) == [
        "head", "prompt_lookup", "hybrid", "streaming", "transformers", "transformers_lookup",
    ]  # fmt: skip
    more = {*chosen(settings(draft_model="x"))} - {*chosen(settings())}
    assert more == {"draft_model", "transformers_assisted"}
    assert chosen(settings(drafters=["hybrid", "head"])) == ["hybrid", "head"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["run=nowhere"], "needs a config.yaml, got nowhere"),
        ([], "name what to compare: run=DIR"),
        (["run=x", "drafters=[head,oak]"], "each one of head, prompt_lookup"),
        (["run=x", "drafters=[draft_model]"], "draft_model=FOLDER_OR_HUB_ID"),
        (["run=x", "drafters=[transformers_assisted]"], "draft_model=FOLDER_OR_HUB_ID"),
        (["heads=[no/head,no/other]"], "need out=FOLDER"),
        (["heads=[no/head,no/other]", "out=there"], "no/head"),
    ],
)
def test_mistakes_get_one_line(
    overrides: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        call("compare", overrides)
    printed = capsys.readouterr().err
    assert left.value.code == 2, printed
    assert told in printed
    assert len(printed.strip().splitlines()) == 1


def test_ratios_between_methods_are_paired():
    measured = rows()
    for name, row in measured.items():
        assert {*row.over} == {*measured} - {name}
        for other, gain in row.over.items():
            assert gain.interval[0] <= gain.ratio <= gain.interval[1]
            assert gain.ratio * measured[other].over[name].ratio == pytest.approx(1.0)
            # all methods write the same tokens, so ratios of rates equal ratios of times
            ratio = row.speed.tokens_per_second / measured[other].speed.tokens_per_second
            assert gain.ratio == pytest.approx(ratio)
            accepted, rates = row.accepted_over[other], (row.online, measured[other].online)
            ours, theirs = (one.tokens_per_forward for one in rates)
            assert accepted.interval[0] <= accepted.ratio == pytest.approx(ours / theirs)
    shown = ratios(condition(measured, 0.0, 3), ["head", "hybrid"], "second")
    assert shown.header == ("head", *(row[0] for row in shown.rows))
    assert [row[place + 1] for place, row in enumerate(shown.rows)] == ["", ""]
    told = [table.title for table in tables(comparison(measured))]
    assert told[0] == "drafters at temperature 0, batch 3"
    assert told[1::3] == ["tokens per second, row over column"] * 2
    assert told[2::3] == ["tokens per forward, row over column"] * 2


def test_other_ways_are_added_only_above_temperature_zero():
    base, tree = tiny.base(), policies.chain(2)
    head, found = build_for({"kind": "medusa", "depth": 2}, base), {}
    for temperature, others in ((0.0, True), (1.0, True), (1.0, False)):
        asked = settings(drafters=["head"], other_ways=others)
        asked.evaluation.temperature = temperature
        bench = MethodFactory(base, {"head": head}, {"head": tree}, asked, asked, None)
        found[temperature, others] = [*bench.draft_methods()]
    assert found == {
        (0.0, True): ["head"],
        (1.0, True): ["head", "head_uncoupled", "head_rejection"],
        (1.0, False): ["head"],
    }


def test_draft_time_is_measured():
    for row in rows().values():
        assert (row.speed.draft_milliseconds or 0) > 0
        assert row.speed.repetitions == 1


TRANSFORMERS = {
    "transformers": TransformersMethod(),
    "transformers_lookup": TransformersMethod(prompt_lookup_num_tokens=4),
    "transformers_assisted": TransformersMethod(assistant_model=tiny.base("gpt2").model),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_writes_the_same_text_and_is_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    method, base, how = (
        TRANSFORMERS[name],
        tiny.base(),
        GenerationSettings(max_new_tokens=12, batch_size=2),
    )
    decoded = method.decode(base, tiny.prompts(), how)
    assert [one.tokens for one in decoded] == [text[:12] for text in tiny.continuations()]
    for one in decoded:
        # the first forward reads the prompt, and may give more than one token
        assert one.counts.new_tokens <= 11
        assert one.counts.forwards > 0
        assert all(a <= b for a, b in zip(one.counts.accepted, one.counts.offered, strict=True))
    if name == "transformers":
        assert [one.counts.forwards for one in decoded] == [11] * 3
    # the model's own generation_config has no effect
    own = GenerationConfig(no_repeat_ngram_size=1, suppress_tokens=[*range(9)])
    monkeypatch.setattr(base.model, "generation_config", own)
    timed = method.time(base, tiny.prompts(), how)
    assert method.decode(base, tiny.prompts(), how) == decoded
    assert base.model.generation_config is own
    assert timed.new_tokens == 36
    assert 0 < timed.step_seconds < timed.seconds


def test_perfect_assistant_saves_forwards_and_does_not_batch():
    base = tiny.base()
    method = TransformersMethod(assistant_model=tiny.base("llama", "eager").model)
    measured = compare_methods(
        base,
        {"transformers": TRANSFORMERS["transformers"], "transformers_assisted": method},
        tiny.prompts(),
        generate(base, None, tiny.prompts(), max_new_tokens=16).tokens,
        GenerationSettings(max_new_tokens=16, batch_size=3),
        speed_prompts=3,
        repetitions=1,
    )
    assisted = measured["transformers_assisted"]
    assert assisted.online.tokens_per_forward > 1.5
    assert measured["transformers"].online.tokens_per_forward == 1.0
    assert (assisted.batches, measured["transformers"].batches) == (False, True)
    assert [row.lossless.verdict for row in measured.values()] == ["identical"] * 2
    names = [row[0] for row in table(condition(measured, 0.0, 3)).rows]
    assert "transformers_assisted (cannot batch: one by one)" in names
    # above temperature zero it samples other texts, which are not compared
    warm = GenerationSettings(max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=2))
    alone = generate(base, None, tiny.prompts(), max_new_tokens=8, sampling=warm.sampling).tokens
    (drawn,) = compare_methods(
        base, {"transformers_assisted": method}, tiny.prompts(), alone, warm, speed_prompts=1
    ).values()
    assert drawn.lossless.compared == 0
