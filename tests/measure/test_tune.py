"""Costs are recovered, and the chosen tree follows from costs and acceptance."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.config.compose import settings_of
from specheads.core.errors import InputError
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.generate import generate
from specheads.decoding.goodput import expected_tokens
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate
from specheads.decoding.trees.tuned import Machine, MatchRates, Tried, TunedTree
from specheads.heads.load import build_for, drafter_of
from specheads.measure import tune as tuning
from specheads.measure import tune_finals as finals
from specheads.measure.generation import GenerationSettings
from specheads.measure.offline import Copied, guess_ranks
from specheads.measure.tune import choose_tree
from specheads.measure.tune_cost import Point, fit, time_steps, trimmed_mean
from specheads.measure.tune_finals import Effort, Trace, best_stop, learn, trace
from specheads.measure.tune_texts import TuningTexts, write_texts
from specheads.measure.tune_trees import (
    best,
    candidate_trees,
    conditional,
    match_rates,
    path_rates,
    positional,
    predict,
)
from tests import tiny
from tests.measure.test_measure import Habit
from tests.tuned import tree as tuned_tree
from tests.tuned import tuned as planted

PLANTED = StepCost(
    verify=ForwardCost(fixed=1.2e-2, token=6e-5, context=2e-8),
    draft=ForwardCost(fixed=1.2e-3, token=6e-6, context=2e-9),
)


def points(cost: StepCost, noise: float = 0.0) -> list[Point]:
    """Return the points of a grid with these costs and noise."""
    generator = random.Random(0)
    out = []
    for batch in (1, 4, 16, 64):
        for context in (64, 512, 4096):
            for nodes, depth in ((1, 0), (2, 1), (3, 2), (4, 3), (8, 3), (16, 3), (64, 4)):
                verify = cost.seconds(batch, context, nodes, 0)
                draft = cost.seconds(batch, context, nodes, depth) - verify if depth else 0.0
                factor = [1 + noise * generator.gauss(0, 1) for _ in range(2)]
                where = {"batch": batch, "context": context, "nodes": nodes, "depth": depth}
                out.append(Point(**where, verify=verify * factor[0], draft=draft * factor[1]))
    return out


def coefficients(cost: StepCost) -> list[float]:
    return [
        getattr(one, name)
        for one in (cost.verify, cost.draft)
        for name in ("fixed", "token", "context")
    ]


@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["noise-free", "noisy"])
def test_planted_cost_model_is_recovered(noise: float):
    cost, error = fit(points(PLANTED, noise))
    assert coefficients(cost) == pytest.approx(coefficients(PLANTED), rel=0.02)
    assert (cost.verify.power, cost.verify.several) == (1.0, 0.0)
    assert error.largest < 0.05
    assert error.held_out < 0.05


def test_nonlinear_cost_is_refined():
    """One token has a faster kernel than two, and cost grows slower than the number of tokens."""
    bent = ForwardCost(fixed=4e-2, token=8e-3, context=1e-7, several=1.5e-2, power=0.7)
    cost, error = fit(points(replace(PLANTED, verify=bent)))
    assert error.largest < 1e-6
    assert (cost.verify.power, cost.verify.several) == pytest.approx((0.7, 1.5e-2))


def test_free_tokens_are_found():
    """A few tokens are free while weights are read; further tokens take time."""
    kneed = ForwardCost(fixed=4e-2, token=5e-3, context=1e-7, free=8)
    assert kneed.seconds(1, 0) == kneed.seconds(8, 0) == 4e-2
    assert kneed.seconds(10, 0) == pytest.approx(5e-2)
    planted = replace(PLANTED, verify=kneed)
    cost, error = fit(points(planted))
    assert error.largest < 1e-6
    assert cost.verify.free == 8
    assert coefficients(cost) == pytest.approx(coefficients(planted))


def test_costs_are_not_negative():
    flat = StepCost(
        verify=ForwardCost(fixed=1e-2, token=0.0, context=0.0),
        draft=ForwardCost(fixed=0.0, token=1e-4, context=0.0),
    )
    cost, _ = fit(points(flat, 0.02))
    assert min(coefficients(cost)) >= 0
    assert cost.verify.fixed == pytest.approx(1e-2, rel=0.02)


def test_trimmed_mean_drops_outliers():
    assert trimmed_mean([1.0, 1.1, 0.9, 1.0, 50.0]) == pytest.approx(1.0, abs=0.05)
    assert trimmed_mean([2.0]) == 2.0


def texts(rates: tuple[float, ...], places: int = 400) -> list[torch.Tensor]:
    """Return ranks of texts with these rates at any depth."""
    generator = random.Random(1)
    ranks, weights = [*range(len(rates)), 8], [*rates, 1 - sum(rates)]
    return [
        torch.tensor([generator.choices(ranks, weights, k=3) for _ in range(places)])
        for _ in range(4)
    ]


FREE = StepCost(
    verify=ForwardCost(fixed=1e-2, token=0.0, context=0.0),
    draft=ForwardCost(fixed=0.0, token=0.0, context=0.0),
)


def pick(ranks: list[torch.Tensor], cost: StepCost, batch: int = 1, context: int = 64):
    trees = candidate_trees(ranks[::2], 3, 64)
    return best(predict(trees, ranks[1::2], cost, batch, context))


def test_wrong_drafts_choose_the_base_alone():
    chosen = pick(texts((0.0,)), PLANTED)
    assert chosen.tree.depth == 0
    assert chosen.speedup == 1.0


def test_free_verification_chooses_the_largest_tree():
    assert pick(texts((0.4, 0.2, 0.1, 0.05, 0.05)), FREE).tree.num_nodes == 64


def test_costly_nodes_choose_smaller_trees_and_costly_steps_larger_ones():
    ranks = texts((0.4, 0.2, 0.1, 0.05, 0.05))

    def nodes(fixed: float, token: float) -> int:
        verify = ForwardCost(fixed=fixed, token=token, context=0.0)
        return pick(ranks, replace(PLANTED, verify=verify)).tree.num_nodes

    by_token = [nodes(1e-2, token) for token in (0.0, 1e-4, 1e-3, 1e-2, 1.0)]
    assert all(later <= earlier for earlier, later in pairwise(by_token))
    assert by_token[0] > by_token[-1] == 1
    by_step = [nodes(fixed, 1e-3) for fixed in (1e-3, 1e-2, 1e-1, 1.0)]
    assert all(later >= earlier for earlier, later in pairwise(by_step))
    assert by_step[-1] > by_step[0]


def test_longer_context_chooses_a_larger_tree():
    """Keys and values of the context are read once for all nodes."""
    dear = ForwardCost(fixed=1e-3, token=1e-3, context=1e-5)
    ranks = texts((0.4, 0.2, 0.1, 0.05))
    nodes = [
        pick(ranks, replace(PLANTED, verify=dear), context=one).tree.num_nodes
        for one in (10, 1_000, 10_000)
    ]
    assert nodes == sorted(nodes)
    assert nodes[-1] > nodes[0]


def test_acceptance_by_path_and_depth():
    ranks = [torch.tensor([[0, 1], [0, 0], [8, 0], [0, -1], [1, -1]])]
    rates = path_rates(ranks, 32)
    assert (rates.context, rates.places) == (32, 5)
    assert rates.paths == {"0": 0.6, "1": 0.2, "0.0": 0.2, "0.1": 0.2}
    assert conditional(ranks) == [0.6, 0.5]
    assert positional(ranks) == pytest.approx([4 / 7, 2 / 7])


def test_match_rates_count_steps_up_to_the_end_of_text():
    #  place    0  1  2  3  4    the steps are at 0 (two tokens right, the third wrong), at 3
    #  length   3  3  3  0  3    (nothing to copy) and at 4 (one token remains, so tokens after it
    #  right    2  1  0  0  1    are unknown)
    #  matched  2  3  3  0  1
    found = Copied([2, 1, 0, 0, 1], [3, 3, 3, 0, 3], [2, 3, 3, 0, 1], size=3)
    one, two, three = match_rates([found])
    assert one == MatchRates(share=1 / 3, rates=[1.0, 0.0, 0.0])
    assert two == MatchRates(share=1 / 3, rates=[1.0, 1.0, 0.0])
    assert three == MatchRates(share=0.0, rates=[0.0] * 3)
    assert match_rates([Copied([], [], [], 1)]) == [MatchRates(share=0.0, rates=[0.0])] * 3


def made_up(length: int = 300) -> Trace:
    """Return a trace whose tokens are right if their probability is high."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(length, 4, generator=generator, dtype=torch.float64).clamp(1e-3)
    right = torch.rand(length, 4, generator=generator) < probs**2
    known = torch.ones(length, 4, dtype=torch.bool)
    return Trace(probs.log(), torch.full_like(probs, 0.3), right, known)


def test_early_stop_is_learned_and_pays_if_levels_cost_time():
    dear = replace(PLANTED, draft=ForwardCost(fixed=8e-3, token=0.0, context=0.0))
    estimate = learn([made_up()])
    assert estimate.log_prob > 0.5
    for one in (None, estimate):
        stop = best_stop([made_up()], one, dear, 64)
        assert stop is not None
        assert stop.confidence > 0
        assert stop.estimate is one
        assert best_stop([made_up()], one, FREE, 64) is None


def test_trace_equals_the_drafts_of_a_chain():
    base = tiny.base()
    head = drafter_of(build_for({"kind": "mlp_speculator", "depth": 2}, base), base)
    prompt, said = tiny.prompts()[0], tiny.continuations()[0]
    found = trace(base, head, prompt, said)
    assert found.known.sum(0).tolist() == [len(said) - 1, len(said) - 2]
    ranks = guess_ranks(base, head, prompt, said)
    assert ((ranks == 0) == (found.right & found.known)).all()
    assert isinstance(learn([found]), Estimate)


@pytest.fixture(scope="module")
def tuned() -> tuple[Any, Any]:
    base = tiny.base()
    head = drafter_of(build_for({"kind": "eagle3", "depth": 2}, base), base)
    return base, head


def test_methods_take_turns_with_rows_of_their_own(tuned):
    base, head = tuned
    methods = [(None, policies.NOTHING), (head, policies.chain(2))]
    rows = [[[1, 2, 3], [4, 5, 6]], [[1, 2, 3]]]
    alone, drafted = time_steps(
        base, methods, rows, generation=GenerationSettings(max_new_tokens=8), rounds=12
    )
    assert (alone.batch, alone.nodes, alone.depth, alone.draft) == (2, 1, 0, 0.0)
    assert (drafted.batch, drafted.nodes, drafted.depth) == (1, 3, 2)
    assert min(alone.verify, drafted.verify, drafted.draft) > 0
    with pytest.raises(InputError, match="lower contexts"):
        time_steps(
            base,
            methods,
            [[list(range(60)) * 2]] * 2,
            generation=GenerationSettings(max_new_tokens=8),
        )


# --- the choice, on a machine that is made up ---------------------------------------------------

EFFORTS = {"tune": Effort(max_nodes=16), "evaluation": tuning.QUICK}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the cost of a node relative to a base step."""

    def cost(node: float) -> None:
        def times(base, ways, prompts, *, generation, rounds):
            assert base.max_length > generation.max_new_tokens > rounds > 0
            assert all(len({*map(len, rows)}) == 1 for rows in prompts)
            return [
                Point(
                    batch=len(rows),
                    context=len(rows[0]),
                    nodes=tree.num_nodes,
                    depth=tree.depth,
                    verify=1e-2 * (1 + node * (tree.num_nodes - 1)),
                    draft=1e-9 * tree.depth,
                )
                for (_, tree), rows in zip(ways, prompts, strict=True)
            ]

        for module in (tuning, finals):
            monkeypatch.setattr(module, "time_steps", times)

    return cost


def tuned_here(
    noise: float, effort: Effort = EFFORTS["evaluation"], how: GenerationSettings | None = None
):
    """Return the choice for a head with this noise: more noise, fewer right drafts."""
    base, head = tiny.base(), Habit(noise)
    how = how or GenerationSettings(max_new_tokens=tiny.NEW_TOKENS)
    texts = write_texts(base, head, tiny.prompts() * 2, 30, how)
    return tuning.choose(base, head, [texts], [1], how, effort)


def test_intervals_are_over_sources_and_trees_respect_max_nodes(machine):
    machine(0.05)
    effort, how = Effort(max_nodes=4), GenerationSettings(max_new_tokens=12)
    alike = replace(how, sources=(*["a", "b"] * 3,))
    each = tuned_here(1.0, effort, how)
    together = tuned_here(1.0, replace(effort, decodes=False), alike)
    assert any(row.interval[0] < row.interval[1] for row in each.tried[1:])
    # a single source judges
    assert all(row.interval[0] == row.interval[1] for row in together.tried[1:])
    assert {row.tree for row in each.tried} >= {"best_first", "best_first+lookup"}
    sizes = {(row.tree.endswith("+lookup"), row.num_nodes) for row in each.tried}
    assert max(size for copied, size in sizes if not copied) == 4
    assert max(size for copied, size in sizes if copied) == 4 + max(finals.COPIED)


def own_of(chosen: Tried, tree: TunedTree) -> tuple[str, int]:
    return chosen.tree.removesuffix("+lookup"), tree.num_nodes


@pytest.mark.parametrize("effort", EFFORTS)
def test_fastest_method_is_chosen_and_the_base_alone_is_timed(machine, effort: str):
    machine(0.05)
    found = tuned_here(1.0, EFFORTS[effort])
    first, *_ = found.tried
    assert (first.num_nodes, first.tokens_per_forward, first.speedup) == (1, 1.0, 1.0)
    assert found.new_tokens == tiny.NEW_TOKENS
    (chosen,) = [row for row in found.tried if row.chosen]
    (tree,) = found.trees
    assert chosen.tokens_per_forward == tree.tokens_per_forward
    assert chosen.num_nodes == tree.num_nodes + tree.copied
    assert chosen.speedup == max(row.speedup for row in found.tried)
    assert chosen.speedup > 1
    low, high = chosen.interval
    assert 1 < low <= chosen.speedup <= high
    assert (tree.interval, first.interval) == (chosen.interval, [])
    # its rates are those of the head's own tree, without prompt lookup
    (own,) = [one for one in found.tried if (one.tree, one.num_nodes) == own_of(chosen, tree)]
    assert expected_tokens(tree.rates)[-1] == pytest.approx(own.tokens_per_forward)
    assert {row.context for row in found.tried} == {30}
    names = {row.tree for row in found.tried}
    assert {"none", "chain", "tree"} <= names
    # a best-first tree must be decoded to be judged, with and without prompt lookup
    for name in ("best_first", "best_first+lookup"):
        assert (name in names) == (effort == "tune")


@pytest.mark.parametrize("effort", EFFORTS)
def test_base_alone_is_chosen_if_nothing_pays(machine, effort: str):
    machine(5.0)
    found = tuned_here(1.0, EFFORTS[effort])
    assert [tree.kind for tree in found.trees] == ["none"]
    assert [row.tree for row in found.tried if row.chosen] == ["none"]
    assert found.trees[0].policy() is policies.NOTHING


def test_repetitive_text_chooses_prompt_lookup(machine):
    """The head then drafts with them."""
    machine(0.0)
    base, head = tiny.base(), Habit(5.0)
    twice = [
        (prompt + text[:9]) * 2
        for prompt, text in zip(tiny.prompts(), tiny.continuations(), strict=True)
    ]
    how = GenerationSettings(max_new_tokens=20)
    texts = write_texts(base, head, twice * 2, 30, how)
    head.tuned = tuning.choose(base, head, [texts], [1], how, EFFORTS["evaluation"])
    (chosen,) = [row for row in head.tuned.tried if row.chosen]
    others = [row for row in head.tuned.tried if "lookup" not in row.tree]
    assert chosen.tree.endswith("+lookup")
    assert chosen.speedup > max(row.speedup for row in others)
    (tree,) = head.tuned.trees
    assert tree.copied in finals.COPIED
    out = generate(base, head, twice, max_new_tokens=20)
    assert out.tokens == generate(base, None, twice, max_new_tokens=20).tokens
    assert any(step.num_copied for row in out.steps for step in row)


def test_better_head_gets_a_deeper_tree(machine):
    machine(0.05)
    good, poor = tuned_here(0.0), tuned_here(20.0)
    assert good.trees[0].depth > poor.trees[0].depth


def test_choice_depends_on_temperature_and_coupling(machine):
    machine(0.05)
    how = GenerationSettings(max_new_tokens=40, sampling=Sampling(temperature=2.0, seed=2))
    seen, unseen = (tuned_here(0.5, how=replace(how, coupled=one)) for one in (True, False))
    assert seen.acceptance.per_depth[0] > unseen.acceptance.per_depth[0]
    assert seen.trees[0].tokens_per_forward > unseen.trees[0].tokens_per_forward


def test_single_text_builds_and_judges_trees():
    found = write_texts(
        tiny.base(), Habit(), tiny.prompts()[:1], 12, GenerationSettings(max_new_tokens=8)
    )
    assert (found.grown, found.judged) == (found, found)
    assert [len(row) for row in found.rows(3)] == [12] * 3
    with pytest.raises(InputError, match="chosen on prompts, got none"):
        write_texts(tiny.base(), Habit(), [], 12, GenerationSettings(max_new_tokens=8))


def test_prompts_are_whole_and_near_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = [f"# {number} and then" + " more" * (number % 90) for number in range(900)]
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "1"}] for text in asked
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": one}) for one in talks), encoding="utf-8")
    words = ["contexts=[40]", "num_prompts=4", "new_tokens=4", "data=chat", f"data.path={file}"]
    settings = settings_of("tune", words)
    base = FrozenBase.load(**asdict(settings.base))
    head = drafter_of(build_for({"kind": "mlp_speculator", "depth": 2}, base), base)
    given: list[list[int]] = []

    def choose(*told: Any) -> Any:
        given.extend(told[2][0].prompts)
        return planted()

    monkeypatch.setattr(tuning, "choose", choose)
    tokenizer: Any = base.tokenizer
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    tuning.tune_head(base, head, settings)
    assert {*map(tokenizer.decode, given)} <= {*asked}
    assert len(given) == 4
    assert max(abs(len(one) - 40) for one in given) < 20
    # a context that does not fit raises; a default context that does not fit is left out
    monkeypatch.setattr(tuning, "CONTEXTS", (40, 10**5))
    tuning.tune_head(base, head, replace(settings, contexts=[]))
    with pytest.raises(InputError, match=r"contexts can be at most \d+, got 100000"):
        tuning.tune_head(base, head, replace(settings, contexts=[40, 10**5]))


def test_rows_end_in_the_middle_of_texts_that_do_not_repeat():
    prompts, written = [[0], [1, 2, 3], [0], [6, 7]], [[0], [4, 5, -1, -1], [0], [8, -1, -1]]
    rows = TuningTexts(7, prompts, written, [], [""] * 4).rows
    assert rows(2) == [[7, 8, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7, 8]]
    assert rows(1, 1) == rows(1, 3) == [[2, 3, 4, 5, 6, 7, 8]]
    assert TuningTexts(3, prompts, written, [], [""] * 4).rows(1) == [[3, 4, 5]]


def test_texts_of_one_source_either_build_or_judge_trees():
    #  source     a b a c b d    a and c build trees, b and d judge them
    prompts = [[place] for place in range(6)]
    found = TuningTexts(7, prompts, prompts, [], [*"abacbd"])
    assert (found.grown.sources, found.judged.sources) == ([*"aac"], [*"bbd"])
    assert found.judged.prompts == found.judged.continuations == [[1], [4], [5]]
    # a single source: every other text
    single = TuningTexts(7, prompts, prompts, [], ["a"] * 6)
    assert (single.grown.prompts, single.judged.prompts) == (prompts[::2], prompts[1::2])


def test_methods_are_timed_on_as_many_texts_as_rounds(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[float], None]
):
    machine(0.05)
    seen: list[tuple[int, list[list[int]]]] = []
    times = finals.time_steps

    def timed(*told: Any, rounds: int, **how: Any) -> Any:
        seen.append((rounds, told[2][0]))
        return times(*told, rounds=rounds, **how)

    monkeypatch.setattr(finals, "time_steps", timed)
    base, head, how = tiny.base(), Habit(1.0), GenerationSettings(max_new_tokens=8)
    texts = write_texts(base, head, tiny.prompts() * 4, 30, how)
    for batch, turns in ((1, 6), (2, 3), (16, 1)):
        seen.clear()
        tuning.choose(base, head, [texts], [batch], how, tuning.QUICK)
        assert [rounds for rounds, _ in seen] == [6 // turns] * turns
        rows = [row for _, prompts in seen for row in prompts]
        assert rows == texts.rows(turns * batch)


# --- what an evaluation asks for ----------------------------------------------------------------


def evaluation(folder: Path, *words: str) -> Any:
    """Return the settings of an evaluation of the tiny_code base with prompts of 8 tokens."""
    texts = [json.dumps({"text": f"value_{number} = left + right\n" * 9}) for number in range(9)]
    (folder / "text.jsonl").write_text("\n".join(texts), encoding="utf-8")
    own = ["data=jsonl", f"data.path={folder}", "evaluation.prompt_tokens=8"]
    return settings_of("evaluate", [*own, "evaluation.tune_prompts=3", *words])


def test_evaluation_chooses_a_tree_for_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[tuple[Any, ...]] = []

    def choose(base, head, texts, batches, how, effort):
        asked.append(([one.context for one in texts], batches, how.sampling, how.coupled))
        assert [len(one) for one in texts[0].prompts] == [8] * len(texts[0].prompts)
        assert (base.dtype, head.depth, effort.decodes) == (torch.float32, 2, False)
        return planted(tuned_tree(kind="none"))

    monkeypatch.setattr(tuning, "choose", choose)
    words = ["temperature=0.7", "evaluation.top_p=0.9", "evaluation.batch_size=2"]
    settings = evaluation(tmp_path, *words, "coupled=false", "seed=3")
    base = FrozenBase.load(**asdict(settings.base))
    head = drafter_of(build_for({"kind": "mlp_speculator", "depth": 2}, base), base)
    drawn = Sampling(temperature=0.7, top_p=0.9, seed=3)
    how = GenerationSettings(max_new_tokens=8, sampling=drawn, coupled=False, batch_size=2)
    lengths = {"prompt_tokens": 8, "num_prompts": settings.evaluation.tune_prompts}
    tree, timed = choose_tree(base, head, settings.data, how, 72, **lengths)
    assert (tree, timed) == (policies.NOTHING, planted(tuned_tree(kind="none")))
    assert asked == [([72], [2], drawn, False)]
    # the tuned tree is used for greedy decoding, and no text exceeds the context
    head.tuned = planted(machine=Machine.of(base.device, base.dtype))
    long = choose_tree(base, head, settings.data, how, 10**6, **lengths)
    assert long[0] is policies.NOTHING
    how = replace(how, sampling=Sampling())
    assert choose_tree(base, head, settings.data, how, 72, **lengths)[0].num_nodes == 3
    assert [contexts for contexts, *_ in asked[1:]] == [[base.max_length - 18]]
