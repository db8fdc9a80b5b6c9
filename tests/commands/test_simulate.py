"""`specheads simulate`: loads with measured times, and computed for other machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specheads
from specheads.commands._call import call
from specheads.core.files import dumps
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees.tuned import AcceptanceRates
from specheads.measure.results import read
from specheads.measure.simulate import LoadResults
from tests.tuned import tuned

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
    alone, _, goodput = load.rows[:3]
    assert goodput.latency["mean"] < alone.latency["mean"]


def test_python_returns_the_content_of_load_json(head: Path, tmp_path: Path):
    asked = [f"head={head}", *SMALL]
    load = specheads.simulate(overrides=asked, out=tmp_path / "out")
    assert read(LoadResults, tmp_path / "out" / "load.json") == load
    # from a quarter of what the base alone can serve to more than that
    alone = [row for row in load.rows if row.draft == "none"]
    assert len(alone) == 5
    waits = [row.first_token["mean"] for row in alone]
    assert waits == sorted(waits)
    # the highest load exceeds the capacity
    assert alone[-1].tokens_per_second < 12 * float(alone[-1].load)
    assert specheads.simulate(overrides=asked, out=tmp_path / "again") == load


def test_recorded_loads_are_replayed(head: Path, tmp_path: Path):
    arrivals = tmp_path / "load.jsonl"
    arrivals.write_text('{"seconds": 0, "prompt_tokens": 4, "new_tokens": 7}')
    load = specheads.simulate(overrides=[f"head={head}", f"arrivals={arrivals}", "acceptance=[1]"])
    by_draft = {row.draft: row for row in load.rows}
    assert by_draft["none"].load == "load.jsonl"
    assert by_draft["depth 1"].latency["mean"] < by_draft["none"].latency["mean"]


def test_computed_times_are_marked_as_computed(tmp_path: Path, capsys: Any):
    call("simulate", ["hardware=h100", f"out={tmp_path}", *LLAMA, *SMALL])
    shown = " ".join(capsys.readouterr().out.split())
    assert "times computed for H100" in shown
    assert "not measured" in shown
    load = read(LoadResults, tmp_path / "load.json")
    assert load is not None
    assert load.times == "computed for H100"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "name whose requests to simulate"),
        (["head=nowhere"], "run specheads tune first"),
        (["head={head}", "depths=[3]"], "depths can be at most 2"),
        (["head={head}", "arrivals=nowhere.jsonl"], "nowhere.jsonl"),
        (["head={head}", "hardware=h100"], "computed times need hardware.parameters"),
        (["head={head}", "acceptance=[1.5]"], "at most 1"),
        (["head={head}", "arrivals=a.jsonl", "rates=[2]"], "replaces rates, .* leave one"),
    ],
)
def test_a_mistake_is_one_line(asked: list[str], message: str, head: Path):
    named = [one.format(head=head) for one in asked]
    with pytest.raises(ValueError, match=message) as told:
        specheads.simulate(overrides=named)
    assert "\n" not in str(told.value)
