"""The bench of loads: which ways to draft there are, and what each of them drafts."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import Acceptance
from specheads.measure.counts import DepthCounts
from specheads.measure.load.arrivals import Arrival
from specheads.measure.offline import guess_ranks
from specheads.measure.replay import Copied, replay
from tests import tiny
from tests.measure.test_measure import Habit
from tests.tuned import tree, tuned


def test_arms_are_chains_copied_text_and_both_and_goodput_of_either(script: ModuleType):
    plain = tuned(tree(copied=4))
    assert script.arms(plain) == [0, 1, 2, "tuned", "goodput"]
    copying = replace(plain, acceptance=Acceptance(per_depth=[0.5], copied=[0.5] * 11))
    names = [0, 1, "lookup", "1+lookup", "tuned", "goodput", "goodput+lookup"]
    assert script.arms(copying) == names
    assert [script._depth(one) for one in names] == [0, 1, 0, 1, None, None, None]
    # the parser's own reading of a name
    assert [script._arm(str(one)) for one in names] == names
    assert script._asked(SimpleNamespace(arms=[0, "lookup"]), copying) == [0, "lookup"]
    with pytest.raises(SystemExit, match="arms are 0, 1, 2, tuned, goodput, got 7"):
        script._asked(SimpleNamespace(arms=[0, 7]), plain)


def test_copied_text_is_recorded_as_the_simulator_replays_it(script: ModuleType):
    assert script._copied(Copied(right=[2, 0, 0], length=[3, 3, 0], size=3)) == [3, 1, 0, 0]


def test_a_tuned_tree_is_as_often_right_as_it_is_on_the_very_texts(script: ModuleType):
    base, head, prompts = tiny.base(), Habit(2.0), tiny.prompts()
    asked = tree(paths=[[0], [1], [0, 0]], num_nodes=4, depth=2)
    said = generate(base, None, prompts, max_new_tokens=12, stop_at_eos=False).tokens
    ranks = [guess_ranks(base, head, *text) for text in zip(prompts, said, strict=True)]
    static = policies.Static([(0,), (1,), (0, 0)])
    replayed = DepthCounts.total([replay(one, static) for one in ranks], 2).levels()
    assert 0 < min(replayed) < max(replayed) < 1
    assert script._levels(base, head, prompts, asked, 12) == replayed


def test_of_all_engines_the_one_whose_clock_is_behind_steps_next(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    base, now = tiny.base(), [0.0]
    seconds, taken = {"fast": 1.0, "slow": 3.0}, list[str]()
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])

    class Timed(Engine):
        name = ""

        def step(self) -> bool:
            taken.append(self.name)
            now[0] += seconds[self.name]
            return super().step()

    def engine(arm: str, size: int) -> Engine:
        made = Timed(base, max_batch=size, max_length=16)
        made.name = arm
        return made

    # two come at once, and one when both engines have long been idle
    arrivals = [Arrival(one, 1, 3) for one in (0.0, 0.0, 100.0)]
    waited = SimpleNamespace(served=[SimpleNamespace(arrival=arrivals[2], finished=104.0)])
    bench = SimpleNamespace(
        arms=["fast", "slow"],
        batches=[2],
        engine=engine,
        request=lambda place: Request(prompt=[1 + place], max_new_tokens=3, eos_ids=()),
        simulated=lambda *_: waited,
    )
    found = script._served(bench, 2, arrivals)
    # a first step reads the prompt too, and so gives two of the three tokens
    assert taken == ["fast", "slow"] * 4
    assert found["fast"].latencies == [2.0, 2.0, 2.0]
    assert found["slow"].latencies == [6.0, 6.0, 6.0]
    assert found["slow"].tokens_per_second == 9 / 106

    fast, slow = (script._row(bench, arm, [found, found], None) for arm in bench.arms)
    assert (fast["mean_latency"], fast["simulated_mean_latency"]) == (2.0, 4.0)
    # no arm is goodput's, so all are held against the last
    assert fast["latency_over"] == {"slow": pytest.approx([1 / 3] * 3)}
    assert fast["same_text"]
    assert slow["latency_over"] == {"slow": [1.0] * 3}
    bench.arms = [0, "goodput", "goodput+lookup", "tuned"]
    assert script._references(bench) == ["goodput", "goodput+lookup"]
