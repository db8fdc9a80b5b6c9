"""The bench of loads: which ways to draft there are, and what each of them drafts."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.goodput import Draft, Goodput
from specheads.decoding.request import Request
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import AcceptanceRates
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import Copied, guess_ranks, replay
from specheads.measure.simulate_requests import Arrival, Copy
from tests import tiny
from tests.measure.test_measure import Habit
from tests.tuned import FORWARD, MATCH, tree, tuned


def test_arms_are_chains_copied_text_and_both_and_goodput_of_either(script: ModuleType):
    plain = tuned(tree(copied=4))
    assert script.arms(plain) == [0, 1, 2, "tuned", "goodput"]
    copying = replace(plain, acceptance=AcceptanceRates(per_depth=[0.5], matches=[MATCH] * 3))
    assert script.copied_tokens(copying) == 4
    assert script.copied_tokens(tuned()) == 4
    names = [0, 1, "lookup", "1+lookup", "tuned", "goodput", "goodput+lookup"]
    assert script.arms(copying) == names
    assert [script._depth(one) for one in names] == [0, 1, 0, 1, None, None, None]
    # the parser's own reading of a name
    assert [script._arm(str(one)) for one in names] == names
    assert script._asked(SimpleNamespace(arms=[0, "lookup"]), copying) == [0, "lookup"]
    with pytest.raises(SystemExit, match="arms are 0, 1, 2, tuned, goodput, got 7"):
        script._asked(SimpleNamespace(arms=[0, 7]), plain)


def test_copied_text_is_recorded_as_the_simulator_replays_it(script: ModuleType):
    found = Copied(right=[2, 0, 0], length=[3, 3, 0], matched=[1, 3, 0], size=3)
    assert script._copied(found) == [Copy(1, 2), Copy(3, 0), Copy(), Copy()]


def walked(lengths: Sequence[int]) -> DepthCounts:
    """Return what a loop counts that accepts so much at each place of a text."""
    counts, place, last = DepthCounts.zeros(2), 0, len(lengths) - 1
    while place < last:
        kept = min(lengths[place], last - place - 1)
        counts.add(kept, drafted_beyond=False)
        place += kept + 1
    return counts


def test_of_a_tuned_tree_as_much_is_right_as_on_the_very_texts(script: ModuleType):
    base, head, prompts = tiny.base(), Habit(2.0), tiny.prompts()
    said = generate(base, None, prompts, max_new_tokens=12, stop_at_eos=False).tokens
    ranks = [guess_ranks(base, head, *text) for text in zip(prompts, said, strict=True)]
    static = policies.Static([(0,), (1,), (0, 0)])
    asked = tree(paths=[[0], [1], [0, 0]], num_nodes=4, depth=2)
    right = script._in_tree(base, head, prompts, asked, ranks)
    found = [walked(right(number, 12)) for number in range(len(ranks))]
    replayed = [replay(one, static) for one in ranks]
    assert [(one.forwards, one.accepted) for one in found] == [
        (one.forwards, one.accepted) for one in replayed
    ]
    assert 0 < sum(one.accepted[1] for one in found) < sum(one.accepted[0] for one in found)
    # a tree whose shape is another in each step is drawn
    shape = tree(kind="best_first", num_nodes=4, depth=2, beam=2, branch=2)
    drawn = script._in_tree(base, head, prompts, shape, ranks)(0, 200)
    assert {0, 1} < {*drawn} <= {0, 1, 2}


COST = StepCost(verify=FORWARD, draft=ForwardCost(fixed=FORWARD.fixed / 20, token=0.0, context=0.0))


class Punctual(Engine):
    """An engine whose steps take twice what the costs say, on a clock that nothing else moves."""

    now = 0.0
    steps: ClassVar[list[Any]] = []

    def __init__(self, base: Any, drafter: Any = None, **how: Any) -> None:
        super().__init__(base, drafter, **how)
        self.policy, self.served = how["tree"], list[Any]()

    def submit(self, request: Request) -> Any:
        self.served.append(super().submit(request))
        return self.served[-1]

    def step(self) -> bool:
        before = [len(stream.steps) for stream in self.served]
        stepped = super().step()
        rows = [
            stream
            for stream, steps in zip(self.served, before, strict=True)
            if len(stream.steps) > steps
        ]
        if rows:
            draft = self._drafted(rows)
            lengths = [_length_before(stream) for stream in rows]
            Punctual.now += 2 * draft.seconds(COST, len(rows), COST.context(lengths))
            Punctual.steps += [stream.steps[-1] for stream in rows]
        return stepped

    def _drafted(self, rows: list[Any]) -> Draft:
        if isinstance(self.policy, Goodput):
            return self.policy._observed[rows[0]].known.last
        return Draft(self.policy.depth, self.policy.num_nodes)


def _length_before(stream: Any) -> int:
    """Return the tokens of a text before its last step."""
    said = sum(len(step.tokens) for step in stream.steps[:-1])
    return len(stream.request.prompt) + 1 + said


def test_the_simulator_serves_what_an_engine_does_whose_steps_take_what_costs_say(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(script, "Engine", Punctual)
    monkeypatch.setattr(script.time, "perf_counter", lambda: Punctual.now)
    base, head = tiny.base(), Habit(2.0, depth=2)
    prompts = [[*one[:6], *one[:6]] for one in tiny.prompts()]
    wide = tree(paths=[[0], [1], [0, 0]], num_nodes=4, depth=2, rates=[0.6, 0.5])
    acceptance = AcceptanceRates(per_depth=[0.5, 0.4], matches=[MATCH] * 3)
    measured = replace(tuned(wide), acceptance=acceptance, cost=COST)
    options = SimpleNamespace(
        new_tokens=14,
        rounds=2,
        batches=[1, 3],
        requests=4,
        share=0.5,
        load=[1.0],
        arms=None,
        copied=0,
    )
    bench = script._of_texts(options, base, head, measured, prompts)
    rows = script.simulator(bench)
    assert [(row["batch"], row["draft"]) for row in rows] == [
        (size, arm) for size in (1, 3) for arm in (0, 2, "goodput")
    ]
    for row in rows:
        assert row["simulated_over_engine"] == pytest.approx(1.0)
        assert row["interval"] == pytest.approx([1.0, 1.0])
        assert row["pace"] == pytest.approx(2.0)
    # and so where text is copied, before and after it was learned what that brings
    arrivals = [Arrival(0.0, len(bench.request(one).prompt), 14) for one in range(6)]
    Punctual.steps.clear()
    real, simulated, _ = script._turn(bench, "goodput+lookup", 3, arrivals)
    assert simulated == pytest.approx(real)
    # copied text alone, a chain and a tree
    ways = {(len(one.drafted) - one.num_copied, one.num_copied > 0) for one in Punctual.steps}
    assert ways >= {(1, True), (2, False), (4, False)}, ways


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


def test_requests_that_come_now_and_then_have_prompts_as_long_as_those_that_are_read(
    script: ModuleType,
):
    prompts = [[1] * size for size in (3, 9, 5)]
    bench = SimpleNamespace(
        prompts=prompts,
        requests=4,
        new_tokens=7,
        load=[1.0],
        request=lambda place: Request(prompt=prompts[place % 3], max_new_tokens=7, eos_ids=()),
    )
    first, again = (script._load(bench, 2.0, turn) for turn in (0, 1))
    assert [one.prompt_tokens for one in first] == [3, 9, 5, 3]
    assert {one.new_tokens for one in first} == {7}
    assert [one.seconds for one in first] != [one.seconds for one in again]
