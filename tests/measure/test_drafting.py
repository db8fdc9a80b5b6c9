"""Coupled drafts, uncoupled drafts and rejection, compared."""

from dataclasses import replace

from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.policies import Sampled
from specheads.measure.generation import (
    Continuations,
    GenerationSettings,
    decode_prompts,
    write_alone,
)
from specheads.measure.online import measure_drafting
from specheads.measure.results import Drafting
from tests import tiny
from tests.measure.test_measure import Habit

HOW = GenerationSettings(
    max_new_tokens=40, batch_size=3, sampling=Sampling(temperature=2.0, seed=2)
)


def measured(tree: policies.TreePolicy) -> dict[str, Drafting]:
    texts = Continuations(tiny.prompts(), write_alone(tiny.base(), tiny.prompts(), HOW))
    return measure_drafting(tiny.base(), Habit(0.5, 3), texts, replace(HOW, tree=tree))


def test_three_ways_to_draft_and_two_match_the_base():
    found = measured(policies.chain(3))
    assert list(found) == ["coupled", "uncoupled", "rejection"]
    assert [(row.compared, row.identical) for row in found.values()] == [(3, 3), (3, 3), (0, 0)]
    assert [row.tree for row in found.values()] == ["chain", "chain", "sampled"]
    assert {row.num_nodes for row in found.values()} == {4}
    assert found["coupled"].gain_of_coupled is None
    for name in ("uncoupled", "rejection"):
        gain, row = found[name].gain_of_coupled, found[name]
        assert gain is not None
        ratio = found["coupled"].tokens_per_forward / row.tokens_per_forward
        assert abs(gain.ratio - ratio) < 1e-12
        assert gain.interval[0] <= gain.ratio <= gain.interval[1]
    assert found["coupled"].tokens_per_forward > found["uncoupled"].tokens_per_forward
    # the same, decoded separately
    how = replace(HOW, tree=policies.chain(3), coupled=False, batch_size=1)
    decoded = decode_prompts(tiny.base(), Habit(0.5, 3), tiny.prompts(), how)
    forwards = sum(one.counts.forwards for one in decoded)
    new_tokens = sum(one.counts.new_tokens for one in decoded)
    assert found["uncoupled"].tokens_per_forward == new_tokens / forwards


def test_rejection_tests_a_sampled_tree_itself():
    found = measured(Sampled((2, 1)))
    assert [row.tree for row in found.values()] == ["chain", "chain", "sampled"]
    assert [row.num_nodes for row in found.values()] == [3, 3, 5]


def test_empty_tree_has_no_drafting_section():
    assert measured(policies.NOTHING) == {}
