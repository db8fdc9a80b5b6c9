"""Types, ranges and contradictions of settings."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from specheads.config import shared, training
from specheads.config.commands import Compare, Evaluate, Export, Push, Train
from specheads.config.data import DataSettings, MixtureSource
from specheads.config.shared import EvaluationSettings, TreeSettings
from specheads.config.training import LOSSES, DistillSettings, JointSettings, Phase, Schedule
from specheads.config.validation import check
from specheads.core.errors import InputError
from specheads.core.ranges import setting_hints
from specheads.decoding.accept import RULES
from specheads.training import losses

COMMANDS = (Train, Evaluate, Compare, Export, Push)
PARTS = [
    kind
    for module in (shared, training)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if kind.__module__ == module.__name__
]


def phase(**changes: Any) -> Phase:
    usual = {"text": "corpus", "steps": 3, "batch_size": 2, "sequence_length": 16}
    return Phase(**(usual | changes))


def distilled(prompt_tokens: int) -> dict[str, Any]:
    return {
        "distill": DistillSettings(num_samples=9, prompt_tokens=prompt_tokens),
        "text": "distilled",
    }


def schedule(**phases: Phase) -> Schedule:
    return Schedule(phases=phases)


def mixture(**changes: Any) -> DataSettings:
    sources = {"a": MixtureSource(source="python_stdlib")}
    return DataSettings(source="mixture", sources=sources, **changes)


@pytest.mark.parametrize("kind", [*COMMANDS, *PARTS], ids=lambda kind: kind.__name__)
def test_every_number_and_text_declares_its_range(kind: type):
    for item in fields(kind):
        bare = setting_hints(kind)[item.name] in (
            int,
            float,
            str,
            list[str],
            list[int],
            list[float],
        )
        assert not bare, f"{kind.__name__}.{item.name}: declare its range, see ranges.py"


def test_choices_are_those_of_the_code():
    assert tuple(losses.LOSSES) == LOSSES
    range_fact = setting_hints(EvaluationSettings)["acceptance"].__metadata__[0]
    assert all(range_fact.func(name) for name in RULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"batch_size": -4}, "batch_size must be a whole number, at least 1, or auto, got -4"),
        ({"sequence_length": 1}, "sequence_length must be a whole number, 0 or at least 2, got 1"),
        ({"sequence_length": 0}, "reads a corpus and needs sequence_length"),
        ({"learning_rate": float("nan")}, "got nan; its default is 0.001"),
        ({"loss": "hinge"}, "loss must be one of .*, got 'hinge'"),
        ({"text": "distilled"}, "with distill settings"),
        (distilled(prompt_tokens=16), "sequence_length above distill.prompt_tokens=16, got 16"),
        ({"joint": JointSettings(rank=0)}, "joint.rank must be a whole number, at least 1"),
    ],
)
def test_invalid_phase_is_refused_by_full_name(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message) as refused:
        check(schedule(a=phase(**changes)), "schedule")
    assert "schedule.phases.a" in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (schedule(), "phases must be a group of settings, not empty, got {}"),
        (schedule(**{"a/b": phase()}), "a folder name (without /), got 'a/b'"),
        (
            schedule(a=phase(), b=phase(text=""), c=phase(text="")),
            "add ~schedule.phases.b ~schedule.phases.c",
        ),
        (
            schedule(a=phase(joint=JointSettings()), b=phase(joint=JointSettings(rank=3))),
            "need the same joint.rank, got [32, 3]",
        ),
        (DataSettings(source="jsonl"), ".source=jsonl needs .path, got none"),
        (DataSettings(source="files", path="a\0b"), "path must be a path or an id"),
        (DataSettings(source="files", path="ä" * 200), "parts of at most 255 bytes"),
        (
            DataSettings(source="files", path="x", patterns=["../*"]),
            "without ..), got '../*'",
        ),
        (DataSettings(source="files", path="x", column="\ud800"), "column must be text (printable"),
        # a mixture reads each source with its own settings
        *(
            (mixture(**{name: value}), f"got .{name}={value!r} for the whole; leave it out")
            for name, value in (("path", "a.jsonl"), ("max_documents", 60), ("ignore", ["x"]))
        ),
        (
            EvaluationSettings(max_new_tokens=2),
            "needs 3 new tokens at least, got evaluation.max_new",
        ),
        (
            EvaluationSettings(mode="offline", temperature=1.0, acceptance="rejection"),
            "acceptance must be match for evaluation.mode=offline",
        ),
        (TreeSettings(kind="static"), "needs .paths, got none"),
    ],
    ids=str,
)
def test_contradictions_are_refused(settings: Any, message: str):
    with pytest.raises(InputError) as refused:
        check(settings)
    assert message in str(refused.value)


def test_usable_settings_are_accepted():
    for settings in (mixture(), EvaluationSettings(max_new_tokens=3)):
        check(settings)
