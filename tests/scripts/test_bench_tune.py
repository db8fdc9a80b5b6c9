"""The trees that a tuned one is held against."""

from types import ModuleType

import pytest

from specheads.heads.load import build_for
from tests import tiny


def test_hand_written_trees_are_those_a_head_can_draft_or_those_named(script: ModuleType):
    head = build_for({"kind": "medusa", "depth": 3}, tiny.base())
    found = script.hand_written(head)
    assert {"chain", "static", "product", "best_first"} <= {*found}
    # it is deeper than this head
    assert "medusa_vicuna_7b_stage2" not in found
    assert [*script.hand_written(head, ["static", "chain"])] == ["static", "chain"]
    with pytest.raises(SystemExit, match=r"must be among .* got oak"):
        script.hand_written(head, ["chain", "oak"])
