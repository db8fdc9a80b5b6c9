"""Costs are recovered, and the chosen tree follows from costs and acceptance."""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.config.data import DataSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt, PromptSet
from specheads.decoding.calibration import AcceptanceEstimate
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import Machine, MatchRates
from specheads.heads.load import build_for_base, copy_for_drafting
from specheads.measure import tune as tuning
from specheads.measure import tune_trees
from specheads.measure.generation import GenerationSettings
from specheads.measure.offline import LookupDraft, guess_ranks
from specheads.measure.step_times import (
    MAX_COST_ERROR,
    StepTime,
    fit_cost,
    fit_ragged,
    fit_server_cost,
    measure_until_it_fits,
)
from specheads.measure.tune_trees import (
    Trace,
    best_stop,
    candidate_trees,
    fit_estimate,
    match_rates,
    predict,
    trace_text,
    write_texts,
)
from tests import tiny
from tests.measure.test_measure import Habit
from tests.tuned import tree as tuned_tree
from tests.tuned import tuned as planted

PLANTED = StepCost(
    verify=ForwardCost(fixed=1.2e-2, token=6e-5, context=2e-8),
    draft=ForwardCost(fixed=1.2e-3, token=6e-6, context=2e-9),
)


@functools.cache
def tiny_code() -> tuple[FrozenBase, Head]:
    """Return the packaged base and a head without training."""
    base = FrozenBase.load(**asdict(compose.settings_of("evaluate", ["base=tiny_code"]).base))
    head = build_for_base({"kind": "mlp_speculator", "depth": 2}, base)
    return base, copy_for_drafting(head, base)


def step_times(cost: StepCost, noise: float = 0.0) -> list[StepTime]:
    """Return the step times of a grid with these costs and noise."""
    generator = random.Random(0)
    times = []
    for batch in (1, 4, 16, 64):
        for context in (64, 512, 4096):
            for nodes, depth in ((1, 0), (2, 1), (3, 2), (4, 3), (8, 3), (16, 3), (64, 4)):
                verify = cost.seconds(batch, context, nodes, 0)
                draft = cost.seconds(batch, context, nodes, depth) - verify if depth else 0.0
                factor = [1 + noise * generator.gauss(0, 1) for _ in range(2)]
                shape = {"batch": batch, "context": context, "nodes": nodes, "depth": depth}
                verify, draft = verify * factor[0], draft * factor[1]
                times.append(StepTime(**shape, verify=verify, draft=draft))
    return times


def coefficients(cost: StepCost) -> list[float]:
    return [
        getattr(forward, name)
        for forward in (cost.verify, cost.draft)
        for name in ("fixed", "token", "context")
    ]


@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["noise-free", "noisy"])
def test_planted_cost_model_is_recovered(noise: float):
    cost, error = fit_cost(step_times(PLANTED, noise))
    assert coefficients(cost) == pytest.approx(coefficients(PLANTED), rel=0.02)
    assert error["largest"] < 0.05


def test_noisy_step_times_are_measured_again_and_then_refused():
    quiet, noisy = fit_cost(step_times(PLANTED)), fit_cost(step_times(PLANTED, noise=1.2))
    assert quiet[1]["median"] < 0.01 < MAX_COST_ERROR < noisy[1]["median"]
    message = rf"median error of 25%, got {noisy[1]['median']:.0%} over 84 points"
    for is_required in (True, False):
        assert measure_until_it_fits(lambda: quiet, is_required=is_required) == quiet
    assert measure_until_it_fits(iter([noisy, quiet]).__next__) == quiet
    with pytest.raises(InputError, match=f"{message}, twice; close other work, then run"):
        measure_until_it_fits(lambda: noisy)
    # a quick choice keeps the better of two
    noisier = noisy[0], noisy[1] | {"median": 9.0}
    for pair in ([noisy, noisier], [noisier, noisy]):
        assert measure_until_it_fits(iter(pair).__next__, is_required=False) == noisy


def test_cost_of_a_server_is_recovered_from_its_steps():
    """Steps of one length of drafts and nearly one context are one point, without its extremes."""
    steps = []
    for batch, context, depth in product((1, 4, 16), (128, 1024), (0, 1, 3)):
        for step in range(10):
            load = batch, context + step
            verify = PLANTED.seconds(*load, 1 + depth, 0)
            draft = PLANTED.seconds(*load, 1 + depth, depth) - verify
            stall = 1.0 if step == 5 else 0.0
            steps.append((*load, depth, verify + stall, draft))
    cost, error = fit_server_cost(steps)
    assert error["points"] == 18
    assert coefficients(cost) == pytest.approx(coefficients(PLANTED), rel=0.02)


def test_further_seconds_of_unequal_drafts_are_recovered():
    steps, ragged = [], []
    for batch, step in product((2, 4, 16), range(9)):
        load = batch, 128 + step
        for depth in (0, 1, 2):
            steps.append((*load, depth, PLANTED.seconds(*load, 1 + depth, 0), 0.0))
        # one step stalled
        seconds = PLANTED.seconds(*load, 2, 0) + 0.0001 * batch + (step == 4)
        ragged.append((*load, 2 * batch, seconds))
    assert fit_ragged(steps, ragged, PLANTED) == pytest.approx(0.0001, rel=0.05)
    # without such steps, and if they are quicker
    assert fit_ragged(steps, [], PLANTED) == 0.0
    assert fit_ragged(steps, [(2, 128, 4, 0.0)], PLANTED) == 0.0


def text_ranks(rates: tuple[float, ...], positions: int = 400) -> list[torch.Tensor]:
    """Return ranks of texts with these rates at any depth."""
    generator = random.Random(1)
    ranks, weights = [*range(len(rates)), 8], [*rates, 1 - sum(rates)]
    return [
        torch.tensor([generator.choices(ranks, weights, k=3) for _ in range(positions)])
        for _ in range(4)
    ]


FREE = StepCost(
    verify=ForwardCost(fixed=1e-2, token=0.0, context=0.0),
    draft=ForwardCost(fixed=0.0, token=0.0, context=0.0),
)


def best_tree(
    ranks: list[torch.Tensor], cost: StepCost, context: int = 64
) -> tuple[policies.Static, float]:
    """Return the tree with the highest predicted speed-up, and that speed-up."""
    trees = candidate_trees(ranks[::2], 3, 64)
    speedups = {tree: predict(tree, ranks[1::2], cost, 1, context) for tree in trees}
    return max(speedups.items(), key=lambda pair: pair[1])


def test_costly_nodes_choose_smaller_trees_and_costly_steps_larger_ones():
    ranks = text_ranks((0.4, 0.2, 0.1, 0.05, 0.05))

    def nodes(fixed: float, token: float, context: float = 0.0, length: int = 64) -> int:
        verify = ForwardCost(fixed=fixed, token=token, context=context)
        return best_tree(ranks, replace(PLANTED, verify=verify), length)[0].num_nodes

    by_token = [nodes(1e-2, token) for token in (1e-4, 1e-3, 1e-2, 1.0)]
    assert all(later <= earlier for earlier, later in pairwise(by_token))
    assert by_token[0] > by_token[-1] == 2
    # keys and values of the context are read once for all nodes
    by_context = [nodes(1e-3, 1e-3, 1e-5, length) for length in (10, 1_000, 10_000)]
    for sizes in ([nodes(fixed, 1e-3) for fixed in (1e-3, 1e-2, 1e-1, 1.0)], by_context):
        assert all(later >= earlier for earlier, later in pairwise(sizes))
        assert sizes[-1] > sizes[0]


def test_match_rates_count_steps_up_to_the_end_of_text():
    #  position 0  1  2  3  4    the steps are at 0 (two tokens right, the third wrong), at 3
    #  length   3  3  3  0  3    (nothing to copy) and at 4 (one token remains, so tokens after it
    #  right    2  1  0  0  1    are unknown)
    #  matched  2  3  3  0  1
    drafts = list(map(LookupDraft, [2, 1, 0, 0, 1], [3, 3, 3, 0, 3], [2, 3, 3, 0, 1]))
    assert match_rates([drafts], 3) == [
        MatchRates(share=1 / 3, rates=[1.0, 0.0, 0.0]),
        MatchRates(share=1 / 3, rates=[1.0, 1.0, 0.0]),
        MatchRates(share=0.0, rates=[0.0] * 3),
    ]
    assert match_rates([[]], 1) == [MatchRates(share=0.0, rates=[0.0])] * 3


def planted_trace(length: int = 300) -> Trace:
    """Return a trace whose tokens are right if their probability is high."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(length, 4, generator=generator, dtype=torch.float64).clamp(1e-3)
    right = torch.rand(length, 4, generator=generator) < probs**2
    return Trace(probs.log(), torch.full_like(probs, 0.3), probs, right)


def test_early_stop_is_learned_and_pays_if_levels_cost_time():
    slow = replace(PLANTED, draft=ForwardCost(fixed=8e-3, token=0.0, context=0.0))
    estimate = fit_estimate([planted_trace()])
    assert estimate.log_prob > 0.5
    stop = best_stop([planted_trace()], slow, 64)
    assert stop is not None
    assert stop.confidence > 0
    assert stop.estimate == estimate
    assert best_stop([planted_trace()], FREE, 64) is None


def test_trace_equals_the_drafts_of_a_chain():
    base = tiny.base()
    head = copy_for_drafting(build_for_base({"kind": "mlp_speculator", "depth": 2}, base), base)
    prompt, continuation = tiny.prompts()[0], tiny.continuations()[0]
    trace = trace_text(base, head, prompt, continuation)
    ranks = guess_ranks(base, head, prompt, continuation)
    assert torch.equal(trace.is_right, ranks[: len(continuation) - head.depth] == 0)
    assert isinstance(fit_estimate([trace]), AcceptanceEstimate)


def test_the_drafts_of_each_depth_are_those_below_right_ones(monkeypatch):
    *_, probs, right = trace = planted_trace()
    monkeypatch.setattr(tune_trees, "trace_text", lambda *_: trace)
    head = copy_for_drafting(
        build_for_base({"kind": "medusa", "depth": 4}, tiny.base()), tiny.base()
    )
    drafts = tune_trees.draft_chances(tune_trees.trace_texts(tiny.base(), head, [([1], [2] * 9)]))
    for depth, (chances, accepted) in enumerate(drafts):
        reached = right[:, :depth].all(1)
        assert chances.tolist() == probs[reached, depth].tolist()
        assert accepted.tolist() == right[reached, depth].tolist()


# --- the choice, on a machine that is made up ---------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[Any]]:
    """Return a function that sets the cost of a node relative to a base step.

    It returns the rounds and rows of the finals that are timed from then on.
    """

    def cost(node: float) -> list[Any]:
        timed: list[Any] = []

        def times(base, methods, prompts, *, generation, rounds):
            assert base.max_length > generation.max_new_tokens > rounds > 0
            assert all(len({*map(len, rows)}) == 1 for rows in prompts)
            timed.append((rounds, prompts[0]))
            return [
                StepTime(
                    batch=len(rows),
                    context=len(rows[0]),
                    nodes=tree.num_nodes,
                    depth=tree.depth,
                    verify=1e-2 * (1 + node * (tree.num_nodes - 1)),
                    draft=1e-9 * tree.depth,
                )
                for (_, tree), rows in zip(methods, prompts, strict=True)
            ]

        monkeypatch.setattr(tuning, "time_steps", times)
        return timed

    return cost


SHORT = GenerationSettings(max_new_tokens=tiny.NEW_TOKENS)


def prompts(rows: list[list[int]] | None = None, sources: str = "") -> list[Prompt]:
    """Return prompts, each from a source of its own if none is given."""
    rows = rows or tiny.prompts() * 2
    names = sources or [""] * len(rows)
    return [Prompt(row, "", "", name) for row, name in zip(rows, names, strict=True)]


def tune_habit(
    noise: float,
    *,
    quick: bool = True,
    max_nodes: int = 16,
    sources: str = "",
):
    """Return the choice for a head with this noise: more noise, fewer right drafts."""
    base, head = tiny.base(), Habit(noise)
    texts = write_texts(base, head, prompts(sources=sources), 30, SHORT)
    return tuning.Tuner(base, head, SHORT, max_nodes, quick).tune([texts], [1])


def test_intervals_are_over_sources_and_trees_respect_max_nodes(machine):
    machine(0.05)
    separate = tune_habit(1.0, quick=False, max_nodes=4)
    together = tune_habit(1.0, max_nodes=4, sources="ababab")
    assert any(row.interval[0] < row.interval[1] for row in separate.tried[1:])
    # a single source judges
    assert all(row.interval[0] == row.interval[1] for row in together.tried[1:])
    assert {row.tree for row in separate.tried} >= {"best_first", "best_first+lookup"}
    sizes = {(row.tree.endswith("+lookup"), row.num_nodes) for row in separate.tried}
    assert max(size for copied, size in sizes if not copied) == 4
    assert max(size for copied, size in sizes if copied) == 4 + max(tuning.COPIED)


@pytest.mark.parametrize("quick", [False, True], ids=["tune", "evaluation"])
def test_fastest_method_is_chosen_and_the_base_alone_is_timed(machine, quick: bool):
    machine(0.05)
    measured = tune_habit(1.0, quick=quick)
    first, *_ = measured.tried
    assert (first.num_nodes, first.tokens_per_forward, first.speedup) == (1, 1.0, 1.0)
    assert measured.new_tokens == tiny.NEW_TOKENS
    (chosen,) = [row for row in measured.tried if row.chosen]
    (tree,) = measured.trees
    assert chosen.tokens_per_forward == tree.tokens_per_forward
    assert chosen.num_nodes == tree.num_nodes + tree.copied
    assert chosen.speedup == max(row.speedup for row in measured.tried)
    low, high = chosen.interval
    assert 1 < low <= chosen.speedup <= high
    assert (tree.interval, first.interval) == (chosen.interval, [1.0, 1.0])
    assert {row.context for row in measured.tried} == {30}
    names = {row.tree for row in measured.tried}
    assert {"none", "chain", "tree"} <= names
    # a best-first tree must be decoded to be judged, with and without prompt lookup
    for name in ("best_first", "best_first+lookup"):
        assert (name in names) == (not quick)


def test_repetitive_text_chooses_prompt_lookup(machine):
    """The head then drafts with them."""
    machine(0.0)
    base, head = tiny.base(), Habit(5.0)
    twice = [
        (prompt + text[:9]) * 2
        for prompt, text in zip(tiny.prompts(), tiny.continuations(), strict=True)
    ]
    generation = GenerationSettings(max_new_tokens=20)
    texts = write_texts(base, head, prompts(twice * 2), 30, generation)
    head.tuned = tuning.Tuner(base, head, generation, 16, quick=True).tune([texts], [1])
    (chosen,) = [row for row in head.tuned.tried if row.chosen]
    assert chosen.tree.endswith("+lookup")
    speedups = [row.speedup for row in head.tuned.tried if "lookup" not in row.tree]
    assert chosen.speedup > max(speedups)
    (tree,) = head.tuned.trees
    assert tree.copied in tuning.COPIED
    out = generate(base, head, twice, max_new_tokens=20)
    assert out.tokens == generate(base, None, twice, max_new_tokens=20).tokens
    assert any(step.num_copied for row in out.steps for step in row)


def test_prompts_are_whole_and_near_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    questions = [f"# {number} and then" + " more" * (number % 90) for number in range(900)]
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "1"}]
        for text in questions
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), encoding="utf-8")
    base, head = tiny_code()
    tokenizer: Any = base.tokenizer
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    corpus = DataSettings(source="chat", path=str(file))
    chosen = [
        prompt.tokens
        for prompt in tune_trees.validation_prompts(corpus, base, 40, 4, longest=200, seed=0)
    ]
    assert {*map(tokenizer.decode, chosen)} <= {*questions}
    assert len(chosen) == 4
    assert max(abs(len(prompt) - 40) for prompt in chosen) < 20
    with pytest.raises(InputError, match=r"contexts can be at most \d+, .*got 100000"):
        tuning.tune_head(base, head, corpus, contexts=(40, 10**5))


def test_texts_of_one_source_either_build_or_judge_trees():
    #  source     a b a c b d    a and c build trees, b and d judge them
    rows = [[token] for token in range(6)]
    generation = GenerationSettings(max_new_tokens=2)
    texts = write_texts(tiny.base(), Habit(), prompts(rows, "abacbd"), 7, generation)
    assert [text.prompt for text in texts.fit_texts] == [[0], [2], [3]]
    assert [text.source for text in texts.test_texts] == [*"bbd"]
    # a single source: every other text
    single = write_texts(tiny.base(), Habit(), prompts(rows, "aaaaaa"), 7, generation)
    assert [text.prompt for text in single.test_texts] == rows[1::2]


# --- what an evaluation asks for ----------------------------------------------------------------


def test_evaluation_chooses_a_tree_for_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    calls: list[tuple[Any, ...]] = []

    def tune_texts(tuner, texts, batches):
        generation = tuner.generation
        contexts = [group.context for group in texts]
        calls.append((contexts, batches, generation.sampling, generation.coupled))
        assert {len(text.prompt) for text in texts[0].test_texts} == {8}
        assert (tuner.base.dtype, tuner.head.depth) == (torch.float32, 2)
        assert (tuner.quick, tuner.max_nodes) == (True, 16)
        return planted(tuned_tree(kind="none"))

    monkeypatch.setattr(tuning.Tuner, "tune", tune_texts)
    rows = [json.dumps({"text": f"value_{number} = left + right\n" * 9}) for number in range(9)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows), encoding="utf-8")
    base, head = tiny_code()
    warm = Sampling(temperature=0.7, top_p=0.9, seed=3)
    generation = GenerationSettings(max_new_tokens=9, sampling=warm, coupled=False, batch_size=2)

    def tree(length: int, generation: GenerationSettings) -> Any:
        corpus = DataSettings(source="jsonl", path=str(tmp_path))
        questions = PromptSet("", "", [Prompt([0] * length, "", "")])
        lengths = {"prompt_tokens": 8, "num_prompts": 3}
        return tuning.choose_tree(base, head, corpus, generation, questions, **lengths)

    assert tree(68, generation) == (policies.NOTHING, planted(tuned_tree(kind="none")))
    # half of the nine new tokens
    assert calls == [([72], [2], warm, False)]
    # the tuned tree is used for greedy decoding, and no text exceeds the context
    monkeypatch.setattr(head, "tuned", planted(machine=Machine.of(base.device, base.dtype)))
    assert tree(10**6, generation)[0] is policies.NOTHING
    assert tree(68, replace(generation, sampling=Sampling()))[0].num_nodes == 3
    assert [contexts for contexts, *_ in calls[1:]] == [[base.max_length - 18]]


def test_base_alone_is_chosen_if_nothing_pays(machine):
    machine(5.0)
    measured = tune_habit(1.0)
    assert [tree.kind for tree in measured.trees] == ["none"]
    assert [row.tree for row in measured.tried if row.chosen] == ["none"]
    assert measured.trees[0].policy() is policies.NOTHING
