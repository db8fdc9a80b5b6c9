"""`specheads simulate`: loads with measured times, and computed for other machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specheads
from specheads.commands._call import call
from specheads.config import compose
from specheads.core.files import dumps
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees.tuned import AcceptanceRates
from specheads.heads.load import build_for_base
from specheads.measure.results import read_results
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run, as far as a simulation with measured times reads it."""
    (tmp_path / "run" / "head").mkdir(parents=True)
    (tmp_path / "run" / "head" / "tuned.json").write_text(dumps(TUNED))
    return tmp_path / "run"


def test_loads_are_simulated_printed_and_written(run: Path, capsys: Any):
    call("simulate", [f"run={run}", "rates=[1,20.25,20.26,1]", "depths=[0,2,0]", *SMALL])
    output = capsys.readouterr().out
    assert "goodput" in output
    assert "measured" in output
    assert "computed" not in output
    load = read_results(LoadResults, run / "report" / "load.json")
    assert load is not None
    assert [(row.load, row.draft) for row in load.rows] == [
        (rate, draft)
        for rate in ("1", "20.25", "20.26")
        for draft in ("none", "depth 2", "goodput")
    ]
    alone, _, goodput = load.rows[:3]
    assert goodput.latency["mean"] < alone.latency["mean"]


def test_recorded_loads_are_replayed(run: Path, tmp_path: Path):
    arrivals = tmp_path / "load.jsonl"
    arrivals.write_text('{"seconds": 0, "prompt_tokens": 4, "new_tokens": 7}')
    load = specheads.simulate(overrides=[f"run={run}", f"arrivals={arrivals}", "acceptance=[1]"])
    by_draft = {row.draft: row for row in load.rows}
    assert by_draft["none"].load == "load.jsonl"
    assert by_draft["depth 1"].latency["mean"] < by_draft["none"].latency["mean"]


def test_computed_times_are_marked_as_computed(tmp_path: Path, capsys: Any):
    settings = compose.settings_of("train", ["recipe=smoke"])
    (tmp_path / "config.yaml").write_text(compose.as_yaml(settings))
    base = specheads.FrozenBase.load(settings.base.model, device="cpu")
    build_for_base(settings.head, base).save_pretrained(tmp_path / "head")
    call("simulate", [f"run={tmp_path}", "hardware=h100", "acceptance=[0.8,0.7]", *SMALL])
    output = " ".join(capsys.readouterr().out.split())
    assert "times computed for H100" in output
    assert "not measured" in output
    load = read_results(LoadResults, tmp_path / "report" / "load.json")
    assert load is not None
    assert load.times == "computed for H100"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name whose requests to simulate"),
        (["run=nowhere"], "run specheads tune first"),
        (["run={run}", "depths=[3]"], "depths can be at most 2"),
        (["run={run}", "arrivals=nowhere.jsonl"], "nowhere.jsonl"),
        (["run={run}", "hardware=h100"], "needs a config.yaml"),
        (["run={run}", "hardware.name=mine"], "computed times need hardware.bandwidth"),
        (["run={run}", "acceptance=[1.5]"], "at most 1"),
        (["run={run}", "arrivals=a.jsonl", "rates=[2]"], "replaces rates, .* leave one"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, run: Path):
    overrides = [word.format(run=run) for word in words]
    with pytest.raises(ValueError, match=message):
        specheads.simulate(overrides=overrides)
