"""Coupled drafts, uncoupled drafts and rejection, compared."""

from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.policies import Sampled
from specheads.measure.compare import compare_methods
from specheads.measure.generation import GenerationSettings, decode_prompts, write_alone
from specheads.measure.methods import measure_drafting, sampling_methods
from specheads.measure.results import Drafting
from tests import tiny
from tests.measure.test_measure import Habit

HOW = GenerationSettings(
    max_new_tokens=40, batch_size=3, sampling=Sampling(temperature=2.0, seed=2)
)


def measured(tree: policies.TreePolicy) -> dict[str, Drafting]:
    base, prompts = tiny.base(), tiny.prompts()
    alone = write_alone(base, prompts, HOW)
    how = GenerationSettings(max_new_tokens=40, batch_size=3, sampling=HOW.sampling, tree=tree)
    return measure_drafting(base, Habit(0.5, 3), prompts, alone, how)


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
    assert found["uncoupled"].tokens_per_forward == found_alone(policies.chain(3))


def found_alone(tree: policies.TreePolicy) -> float:
    """Return tokens per forward of uncoupled drafts, decoded separately."""
    how = GenerationSettings(max_new_tokens=40, sampling=HOW.sampling, tree=tree, coupled=False)
    decoded = decode_prompts(tiny.base(), Habit(0.5, 3), tiny.prompts(), how)
    forwards = sum(one.counts.forwards for one in decoded)
    return sum(one.counts.new_tokens for one in decoded) / forwards


def test_rejection_tests_a_sampled_tree_itself():
    drawn = Sampled((2, 1))
    arms = sampling_methods(Habit(), drawn)
    assert arms["rejection"].tree is drawn
    assert [arms[name].tree.name for name in ("coupled", "uncoupled")] == ["chain", "chain"]
    assert {arm.tree.depth for arm in arms.values()} == {2}


def test_empty_tree_has_no_drafting_section():
    assert measured(policies.NOTHING) == {}


def test_comparison_uses_each_methods_own_rule():
    base, prompts = tiny.base(), tiny.prompts()
    rows = compare_methods(
        base,
        sampling_methods(Habit(0.5, 3), policies.chain(3)),
        prompts,
        write_alone(base, prompts, HOW),
        HOW,
        speed_prompts=1,
        repetitions=1,
    )
    wanted = measured(policies.chain(3))
    for name, row in rows.items():
        assert row.online.tokens_per_forward == wanted[name].tokens_per_forward
        assert row.lossless.compared == wanted[name].compared
