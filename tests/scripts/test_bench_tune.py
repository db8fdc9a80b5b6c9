"""The bench of tuned trees: what they are held against, and how seconds are compared."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from specheads.measure.speed import Timing
from tests.tuned import tuned

ROOT = Path(__file__).parents[2]


def timing(step: float, steps: int, new_tokens: int, forwards: int) -> Timing:
    return Timing(
        seconds=9.0,
        step_seconds=step * steps,
        num_steps=steps,
        new_tokens=new_tokens,
        forwards=forwards,
    )


@pytest.mark.parametrize("depth", [2, 3])
def test_every_hand_written_tree_that_the_head_can_draft_is_held_against(
    script: ModuleType, depth: int
):
    found = script.hand_written(SimpleNamespace(depth=depth))
    written = {file.stem for file in (ROOT / "configs" / "tree").glob("*.yaml")}
    assert {"best_first", "chain", "product", "sampled", "static"} <= {*found} <= written
    assert all(0 < policy.depth <= depth for policy in found.values())
    for name in written - {*found} - {"tuned"}:
        raw = yaml.safe_load((ROOT / "configs" / "tree" / f"{name}.yaml").read_text())
        levels = [raw.get("depth", 0), *map(len, raw.get("paths", []))]
        assert max(levels) > depth, name


def test_decode_seconds_are_those_of_the_same_tokens(script: ModuleType):
    # the second prompt was answered in one step, which tells no step's time
    alone = [[timing(1.0, 10, 12, 11)] * 3, [timing(1.0, 0, 2, 1)]]
    drafted = [[timing(1.5, 5, 12, 6)] * 3, [timing(1.5, 3, 9, 4)]]
    assert script._seconds(alone, drafted) == [[11.0], [9.0]]
    longer = [[timing(1.5, 11, 23, 12)], [timing(1.5, 3, 9, 4)]]
    assert script._seconds(alone, longer) == [[11.0], [9.0]]
    assert script._tokens(drafted) == pytest.approx((11 + 8) / (6 + 4))


def test_texts_that_all_end_at_once_are_told(script: ModuleType):
    with pytest.raises(SystemExit, match="two decode steps is needed, got none"):
        script._seconds([[timing(1.0, 0, 2, 1)]])


def test_trees_may_be_named_and_one_that_is_not_there_is_told(script: ModuleType):
    head = SimpleNamespace(depth=3)
    assert [*script.hand_written(head, ["static", "chain"])] == ["static", "chain"]
    with pytest.raises(SystemExit, match=r"must be among .* got oak"):
        script.hand_written(head, ["chain", "oak"])


def test_a_prediction_is_held_against_texts_as_long_as_its_own(script: ModuleType):
    for known in (0, 64):
        script.refuse_other_texts(Path("run"), replace(tuned(), new_tokens=known), 64)
    with pytest.raises(SystemExit, match=r"must be what run was tuned on, 48, got 64; name that"):
        script.refuse_other_texts(Path("run"), replace(tuned(), new_tokens=48), 64)
