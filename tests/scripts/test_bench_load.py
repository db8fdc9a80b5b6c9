"""The bench of loads: which ways to draft there are, and what each of them drafts."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from specheads.decoding.trees.tuned import Acceptance
from specheads.measure.replay import Copied
from tests.tuned import tree, tuned


def test_arms_are_chains_copied_text_and_both_and_goodput_of_either(script: ModuleType):
    plain = tuned(tree(copied=4))
    assert script.arms(plain) == [0, 1, 2, "goodput"]
    copying = replace(plain, acceptance=Acceptance(per_depth=[0.5], copied=[0.5] * 11))
    names = [0, 1, "lookup", "1+lookup", "goodput", "goodput+lookup"]
    assert script.arms(copying) == names
    assert [script._depth(one) for one in names] == [0, 1, 0, 1, None, None]
    # the parser's own reading of a name
    assert [script._arm(str(one)) for one in names] == names
    assert script._asked(SimpleNamespace(arms=[0, "lookup"]), copying) == [0, "lookup"]
    with pytest.raises(SystemExit, match="arms are 0, 1, 2, goodput, got 7"):
        script._asked(SimpleNamespace(arms=[0, 7]), plain)


def test_copied_text_is_recorded_as_the_simulator_replays_it(script: ModuleType):
    assert script._copied(Copied(right=[2, 0, 0], length=[3, 3, 0], size=3)) == [3, 1, 0, 0]
