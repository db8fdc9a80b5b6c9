"""Types, ranges and contradictions of settings."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from specheads.config import Compare, Evaluate, Export, Push, Train, check, parts
from specheads.config.parts import Evaluation, Tree
from specheads.core import ranges
from specheads.core.errors import InputError
from specheads.core.ranges import hints, words
from specheads.data.settings import Data, WeightedSource
from specheads.decoding.accept import RULES
from specheads.training import losses, settings
from specheads.training.settings import LOSSES, Distill, Joint, Phase, Schedule

COMMANDS = (Train, Evaluate, Compare, Export, Push)
PARTS = [
    kind
    for module in (parts, settings)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if kind.__module__ == module.__name__
]


def phase(**changes: Any) -> Phase:
    usual = {"text": "corpus", "steps": 3, "batch_size": 2, "sequence_length": 16}
    return Phase(**(usual | changes))


def joint(**changes: Any) -> Joint:
    return Joint(**changes)


@pytest.mark.parametrize("kind", [*COMMANDS, *PARTS], ids=lambda kind: kind.__name__)
def test_every_number_and_text_declares_its_range(kind: type):
    for item in fields(kind):
        bare = hints(kind)[item.name] in (int, float, str, list[str], list[int], list[float])
        assert not bare, f"{kind.__name__}.{item.name}: declare its range, see ranges.py"


def test_choices_are_those_of_the_code():
    assert tuple(losses.LOSSES) == LOSSES
    known = hints(Phase)["weighting"].__metadata__[0]
    assert all(known.func(name) for name in ("geometric", "dpace"))
    known = hints(Evaluation)["acceptance"].__metadata__[0]
    assert all(known.func(name) for name in RULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"batch_size": -4}, "batch_size must be a whole number, at least 1, or auto, got -4"),
        ({"sequence_length": 1}, "sequence_length must be a whole number, 0 or at least 2, got 1"),
        ({"sequence_length": 0}, "reads a corpus and needs sequence_length"),
        ({"learning_rate": -1e-3}, "learning_rate must be a number, at least 0, at most 1"),
        ({"learning_rate": float("nan")}, "got nan; its default is 0.001"),
        ({"scored_share": 0.0}, "scored_share must be a number, above 0, at most 1"),
        ({"loss": "hinge"}, "loss must be one of .*, got 'hinge'"),
        ({"text": "books"}, "text must be one of corpus, distilled, got 'books'"),
        ({"text": "distilled"}, "with distill settings"),
        ({"weighting": "flat"}, "weighting must be one of geometric, dpace"),
        ({"weighting": "dpace", "decay": 0.8}, "in one way, got decay=0.8"),
        ({"depth_weights": [1.0, 0.5], "decay": 0.8}, "in one way, got decay=0.8"),
        ({"weighting": "dpace", "depth_weights": [1.0, 0.5]}, "in one way, got weighting=dpace"),
        ({"depth_weights": [1.0, -0.5]}, r"got -0.5 at schedule.phases.a.depth_weights\[1\]"),
        ({"depth_weights": [0.0, 0.0]}, "not all 0"),
        ({"distill": Distill(num_samples=0), "text": "distilled"}, "num_samples must be"),
        ({"distill": Distill(num_samples=9, top_k=-1), "text": "distilled"}, "top_k must be"),
        (
            {"distill": Distill(num_samples=9, prompt_tokens=16), "text": "distilled"},
            "sequence_length above distill.prompt_tokens=16, got 16",
        ),
        ({"joint": joint(ramp="linear")}, "joint.ramp must be one of constant, sine"),
        ({"joint": joint(target="labels")}, "joint.target must be one of text, base"),
        ({"joint": joint(dropout=1.0)}, "joint.dropout must be a number, at least 0, below 1"),
        ({"joint": joint(rank=0)}, "joint.rank must be a whole number, at least 1"),
        ({"joint": joint(head_weight=-0.1)}, "joint.head_weight must be a number, at least 0"),
    ],
)
def test_invalid_phase_is_refused_by_full_name(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message) as refused:
        check(Schedule(phases={"a": phase(**changes)}), "schedule")
    assert "schedule.phases.a" in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(phases={}), "phases must be a group of settings, not empty, got {}"),
        (Schedule(phases={"a/b": phase()}), "a name that a folder can have, without /, got 'a/b'"),
        (
            Schedule(phases={"a": phase(), "b": phase(text=""), "c": phase(text="")}),
            "add ~schedule.phases.b ~schedule.phases.c",
        ),
        (
            Schedule(phases={"a": phase(joint=joint()), "b": phase(joint=joint(rank=3))}),
            "need the same joint.rank, got [32, 3]",
        ),
    ],
    ids=str,
)
def test_invalid_schedule_is_refused(schedule: Schedule, message: str):
    with pytest.raises(InputError) as refused:
        check(schedule, "schedule")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Data(source="jsonl"), "data.source=jsonl needs data.path, got none"),
        (Data(source="files", path="a\0b"), "data.path must be a path or an id"),
        (Data(source="files", path="x" * 300), "its parts of at most 255 bytes"),
        (Data(source="files", path="ä" * 200), "its parts of at most 255 bytes"),
        (
            Data(source="files", path="x", patterns=["/etc/*"]),
            "relative, and without .., got '/etc",
        ),
        (Data(source="files", path="x", patterns=["../*"]), "relative, and without .., got '../*'"),
        (Data(source="files", path="x", column="\ud800"), "data.column must be text, printable"),
        (Data(source="python_stdlib", max_documents=-1), "data.max_documents must be a whole"),
    ],
    ids=str,
)
def test_invalid_data_is_refused(settings: Data, message: str):
    with pytest.raises(InputError) as refused:
        check(settings, "data")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "said",
    [
        {"path": "a.jsonl"},
        {"column": "body"},
        {"patterns": ["*.py"]},
        {"max_documents": 60},
        {"ignore": ["x"]},
        {"bad_rows": "drop"},
        {"revision": "v1"},
        {"config": "full"},
    ],
)
def test_settings_that_a_mixture_ignores_are_refused(said: dict[str, Any]):
    sources = {"a": WeightedSource(source="python_stdlib")}
    check(Data(source="mixture", sources=sources), "data")
    name = next(iter(said))
    with pytest.raises(InputError, match=rf"got data\.{name}=.* for the whole; leave it out"):
        check(Data(source="mixture", sources=sources, **said), "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 2}, "speed needs 3 new tokens at least, got .*max_new_tokens=2"),
        ({"max_new_tokens": 1, "mode": "online"}, "acceptance needs 2 new tokens at least"),
        (
            {"mode": "offline", "temperature": 1.0, "acceptance": "rejection"},
            "acceptance must be match for .*mode=offline .*; set mode=online",
        ),
    ],
)
def test_evaluation_that_would_fail_later_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        check(Evaluation(**changes), "evaluation")
    check(Evaluation(max_new_tokens=3), "evaluation")


def test_a_static_tree_needs_paths():
    with pytest.raises(InputError, match=r"needs tree\.paths, got none"):
        check(Tree(kind="static"), "tree")


def test_message_truncates_a_long_value():
    with pytest.raises(InputError) as refused:
        check(Data(source="x" * 1000), "data")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        (ranges.PositiveInt, "a whole number, at least 1"),
        (ranges.Probability, "a number, at least 0, at most 1"),
        (ranges.Temperature, "a number, 0 or at least 0.001, at most 100"),
        (list[ranges.TokenRank], "a list, each a whole number, at least 0, at most 4,095"),
        (bool | None, "true or false or none"),
    ],
)
def test_range_is_described_in_words(hint: Any, told: str):
    assert words(hint) == told
