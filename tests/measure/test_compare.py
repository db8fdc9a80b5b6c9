"""Drafters beside each other, in one run."""

import json
from pathlib import Path
from typing import Any

import pytest

from specheads.baselines import PromptLookup
from specheads.baselines.hybrid import Hybrid, HybridTree, Lookup
from specheads.commands._call import call
from specheads.config import Compare, Data, Evaluation, Tree
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.measure import speed
from specheads.measure.compare import chosen, compare_drafters, table, write_comparison
from specheads.measure.how import How
from specheads.measure.results import CompareSettings, Comparison, DrafterRow
from specheads.measure.speed import Arm, time_arms
from tests import results as tests_results
from tests import tiny


def arms() -> dict[str, Arm]:
    head, lookup = tiny.oracle(2), PromptLookup(tiny.VOCAB, 6)
    return {
        "head": Arm(head, policies.chain(2)),
        "prompt_lookup": Arm(lookup, Lookup(4)),
        "hybrid": Arm(Hybrid(head, lookup), HybridTree(policies.chain(2), 4)),
    }


def rows() -> dict[str, DrafterRow]:
    base, how = tiny.base(), How(max_new_tokens=10, batch_size=3)
    said = generate(base, None, tiny.prompts(), max_new_tokens=10).tokens
    return compare_drafters(base, arms(), tiny.prompts(), said, how, speed_prompts=3, repetitions=1)


def comparison(drafters: dict[str, DrafterRow]) -> Comparison:
    """Return what compare.json holds of some drafters."""
    bare = tests_results.bare()
    how = CompareSettings(
        temperature=0.0, max_new_tokens=10, batch_size=3, draft_model="", draft_depth=4,
        copied_tokens=10, max_ngram=3, sinks=4, window=60, dtype="float64", device="cpu", seed=0,
    )  # fmt: skip
    return Comparison(
        head=bare.head,
        base=bare.base,
        prompts=bare.prompts,
        settings=how,
        drafters=drafters,
        provenance=bare.provenance,
    )


def test_every_drafter_gets_the_same_prompts_and_says_the_same(tmp_path: Path):
    measured = rows()
    assert [row.lossless.identical for row in measured.values()] == [3, 3, 3]
    forwards = {name: row.online.forwards for name, row in measured.items()}
    assert forwards["hybrid"] <= min(forwards["head"], forwards["prompt_lookup"])
    # all are held against the same timings of the base alone
    assert len({row.speed.base_tokens_per_second for row in measured.values()}) == 1
    path = write_comparison(tmp_path / "report", comparison(measured))
    assert json.loads(path.read_text())["drafters"]["hybrid"]["num_nodes"] == 7
    assert (path.parent / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert len(table(measured).rows) == 3


def test_each_repetition_begins_with_another_and_none_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
):
    begun: list[str] = []
    true_time = speed.time_generate

    def note(base, drafter, *rest, **settings):
        begun.append(type(drafter).__name__)
        return true_time(base, drafter, *rest, **settings)

    monkeypatch.setattr("specheads.measure.speed.time_generate", note)
    time_arms(tiny.base(), arms(), tiny.prompts()[:1], How(max_new_tokens=6), repetitions=2)
    order = ["NoneType", "Oracle", "PromptLookup", "Hybrid"]
    # once before the clock counts, and then by turns
    assert begun == order + order + order[1:] + order[:1]


def settings(**changes: Any) -> Compare:
    return Compare(
        data=Data(source="python_stdlib"), tree=Tree(), evaluation=Evaluation(), **changes
    )


def test_a_draft_model_is_compared_only_where_one_is_named():
    assert chosen(settings()) == ["head", "prompt_lookup", "hybrid", "streaming"]
    assert chosen(settings(draft_model="x"))[-1] == "draft_model"
    assert chosen(settings(drafters=["hybrid", "head"])) == ["hybrid", "head"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["run=nowhere"], "nowhere has none"),
        ([], "name what to compare: run=DIR"),
        (["run=x", "drafters=[head,oak]"], "each one of head, prompt_lookup"),
        (["run=x", "drafters=[draft_model]"], "draft_model=FOLDER_OR_HUB_ID"),
    ],
)
def test_a_mistake_gets_one_line(
    overrides: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        call("compare", overrides)
    printed = capsys.readouterr().err
    assert left.value.code == 2, printed
    assert told in printed
    assert len(printed.strip().splitlines()) == 1
