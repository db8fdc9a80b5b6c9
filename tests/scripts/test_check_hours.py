"""A run is made as long as is asked for, and planned for as long."""

from types import ModuleType
from typing import Any

import pytest

from specheads.commands import _compose
from specheads.training.plan.whole import PhasePlan, Plan


def test_steps_and_texts_of_every_phase_grow_to_the_minutes(script: ModuleType):
    settings = _compose.settings_of("train", ["recipe=tiny_code"])
    phases = [
        PhasePlan("corpus", 840, 2, 0, hours=0.5 / 60),
        PhasePlan("distilled", 560, 4, 0, hours=0.5 / 60, writing_hours=1 / 60),
    ]
    found = Plan("cpu", 1, 1, None, [], phases, {})
    assert script.lengthen(settings, found, 10.0) == pytest.approx(10.0)
    corpus, distilled = settings.schedule.phases.values()
    assert (corpus.steps, distilled.steps) == (4200, 2800)
    assert distilled.distill is not None
    assert distilled.distill.num_samples == 7680


def test_a_batch_of_texts_is_written_whole_however_few_minutes_there_are(script: ModuleType):
    settings = _compose.settings_of("train", ["recipe=tiny_code"])
    phases = [PhasePlan("distilled", 560, 4, 0, hours=1.0, writing_hours=24.0)]
    planned = script.lengthen(settings, Plan("cpu", 1, 1, None, [], phases, {}), 1.0)
    assert planned == pytest.approx(60 + 1 / 25, rel=0.05)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--help"], 0, ""),
        (["recipe=oak"], 2, "no recipe 'oak'"),
        *((["minutes=" + one], 2, f"got {one}; try") for one in ("ten", "0", "nan", "inf")),
    ],
)
def test_help_and_mistakes_leave_no_traceback(
    words: list[str], code: int, told: str, script: ModuleType, monkeypatch: Any, capsys: Any
):
    monkeypatch.setattr("sys.argv", ["check_hours.py", *words])
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == code
    assert told in capsys.readouterr().err
