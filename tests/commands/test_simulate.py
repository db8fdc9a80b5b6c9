"""`specheads simulate`: loads with measured times, and computed for other machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specheads
from specheads.commands._call import call
from specheads.core.files import dumps
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees.tuned import AcceptanceRates, MatchRates
from specheads.measure.results import read
from specheads.measure.simulate import LoadResults
from tests.tuned import tree, tuned

TUNED = replace(
    tuned(),
    cost=StepCost(
        verify=ForwardCost(fixed=0.01, token=0.001, context=1e-7),
        draft=ForwardCost(fixed=0.001, token=0.0001, context=0.0),
    ),
    acceptance=AcceptanceRates(per_depth=[0.8, 0.7]),
)
SMALL = ["num_requests=60", "new_tokens=12"]
LLAMA = ["hardware.parameters=8e9", "hardware.draft_parameters=1e9", "acceptance=[0.8,0.7]"]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Return a head's folder, as far as a simulation reads it."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "tuned.json").write_text(dumps(TUNED))
    return folder


def test_loads_are_simulated_printed_and_written(head: Path, capsys: Any):
    call("simulate", [f"head={head}", "rates=[1,20.25,20.26,1]", "depths=[0,2,0]", *SMALL])
    shown = capsys.readouterr().out
    assert "goodput" in shown
    assert "measured" in shown
    assert "computed" not in shown
    load = read(LoadResults, head / "load.json")
    assert load is not None
    assert [(row.load, row.draft) for row in load.rows] == [
        (rate, draft)
        for rate in ("1", "20.25", "20.26")
        for draft in ("none", "depth 2", "goodput")
    ]
    assert (head / "load.png").read_bytes().startswith(b"\x89PNG")
    alone, _, goodput = load.rows[:3]
    assert goodput.latency.mean < alone.latency.mean


def test_goodput_uses_prompt_lookup_if_tuned(head: Path):
    matches = [MatchRates(share=0.4, rates=[0.9, 0.9])] * 2
    copied = AcceptanceRates(per_depth=[0.8, 0.7], matches=matches)
    found = replace(TUNED, acceptance=copied, trees=[tree(copied=2)])
    (head / "tuned.json").write_text(dumps(found))
    load = specheads.simulate(overrides=[f"head={head}", "rates=[1]", *SMALL])
    by_draft = {row.draft: row.latency.mean for row in load.rows}
    assert [*by_draft] == ["none", "depth 2", "goodput", "goodput+lookup"]
    assert by_draft["goodput+lookup"] < by_draft["goodput"]


def test_python_returns_the_content_of_load_json(head: Path, tmp_path: Path):
    asked = [f"head={head}", *SMALL]
    load = specheads.simulate(overrides=asked, out=tmp_path / "out")
    assert read(LoadResults, tmp_path / "out" / "load.json") == load
    # from a quarter of what the base alone can serve to more than that
    busy = [row.busy for row in load.rows if row.draft == "none"]
    assert len(busy) == 5
    assert busy == sorted(busy)
    assert busy[0] < 0.7
    assert busy[-1] > 0.9
    assert specheads.simulate(overrides=asked, out=tmp_path / "again") == load


def test_recorded_loads_and_acceptance_are_replayed(head: Path, tmp_path: Path):
    arrivals, accepted = tmp_path / "load.jsonl", tmp_path / "accepted.jsonl"
    arrivals.write_text('{"seconds": 0, "prompt_tokens": 4, "new_tokens": 7}')
    accepted.write_text('{"accepted": [2]}')
    named = [f"head={head}", f"arrivals={arrivals}", f"accepted={accepted}"]
    load = specheads.simulate(overrides=named)
    assert load.acceptance == "recorded"
    assert load.rates == [1.0, 1.0]
    by_draft = {row.draft: row for row in load.rows}
    assert by_draft["none"].load == "load.jsonl"
    assert by_draft["depth 2"].requests == 1
    assert by_draft["depth 2"].latency.mean < by_draft["none"].latency.mean


def test_computed_times_are_marked_as_computed(tmp_path: Path, capsys: Any):
    call("simulate", ["hardware=h100", f"out={tmp_path}", *LLAMA, *SMALL])
    shown = " ".join(capsys.readouterr().out.split())
    assert "times computed for H100" in shown
    assert "not measured" in shown
    load = read(LoadResults, tmp_path / "load.json")
    assert load is not None
    assert load.computed
    assert load.times == "computed for H100"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "name whose requests to simulate"),
        (["head=nowhere"], "run specheads tune first"),
        (["head={head}", "depths=[3]"], "depths can be at most 2"),
        (["head={head}", "arrivals=nowhere.jsonl"], "nowhere.jsonl"),
        (["head={head}", "hardware=h100"], "computed times need a base and what drafts"),
        (["head={head}", "acceptance=[1.5]"], "at most 1"),
        (["head={head}", "parts=[0]"], "one of them above 0"),
        (["head={head}", "parts=[]"], "one of them above 0"),
        (["head={head}", "arrivals=a.jsonl", "rates=[2]"], "replaces rates, .* leave one"),
        (["head={head}", "accepted=a.jsonl", "acceptance=[0.5]"], "replaces acceptance"),
    ],
)
def test_a_mistake_is_one_line(asked: list[str], message: str, head: Path):
    named = [one.format(head=head) for one in asked]
    with pytest.raises(ValueError, match=message) as told:
        specheads.simulate(overrides=named)
    assert "\n" not in str(told.value)
