"""tuned.json: read completely or refused in one line, and the default tree it gives."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specheads.core.errors import InputError
from specheads.core.files import to_json
from specheads.decoding.calibration import AcceptanceEstimate, Curve, fit_curve
from specheads.decoding.cost import StepCost
from specheads.decoding.engine import Engine
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.goodput import Goodput
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling, expand_sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.tuned import SwitchingPolicy, Tuned
from specheads.heads.load import build_for_base, copy_for_drafting, load_head, resume_head
from tests import tiny
from tests.slow import slow_except
from tests.tuned import FORWARD, NEGATIVE, tree, tuned

EQUAL = Curve(probs=[0.5], accepted=[0.4])
LEVEL = to_json(EQUAL)
FALLING = LEVEL | {"probs": [0.1, 0.2], "accepted": [0.3, 0.2]}


def folder(path: Path, kind: str = "eagle3", **content: Any) -> Path:
    base = tiny.base()
    head = build_for_base({"kind": kind, "depth": 2}, base)
    head.save_pretrained(path)
    (path / "tuned.json").write_text(json.dumps(to_json(tuned()) | content))
    return path


def test_a_tuned_head_loads_with_its_trees(tmp_path):
    head = load_head(folder(tmp_path), tiny.base())
    assert head.tuned == tuned()


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    generator = np.random.default_rng(0)
    probs = generator.random(400)
    drafts = probs, generator.random(400) < probs
    curves = [fit_curve(*drafts, *drafts), EQUAL]
    acceptance = replace(tuned().acceptance, curves=curves)
    head = load_head(folder(tmp_path, acceptance=to_json(acceptance)), tiny.base())
    assert head.tuned == replace(tuned(), acceptance=acceptance)


def test_nonlinear_costs_of_early_files_are_ignored_and_trees_stay(tmp_path):
    early = {"several": 0.01, "free": 4, "power": 0.7}
    cost = {name: to_json(FORWARD) | early for name in ("verify", "draft")}
    head = load_head(folder(tmp_path, cost=cost), tiny.base())
    assert head.tuned == tuned()


def test_tuned_file_of_the_published_head():
    published = Path("recipes/smollm2_long/head/tuned.json")
    value = json.loads(published.read_text(encoding="utf-8"))
    measured = Tuned.read(value, str(published))
    assert [tree.paths for tree in measured.trees] == [tree["paths"] for tree in value["trees"]]
    assert Goodput.of(measured).lookup_length > 0


def test_further_training_drops_the_head_s_tuned_trees(tmp_path):
    assert resume_head(folder(tmp_path), tiny.base(), "eagle3").tuned is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema": 2}, "must be of schema 1, got 2"),
        ({"trees": []}, "trees .*at least 1 item"),
        ({"trees": [to_json(tree(kind="bush"))]}, "kind .*one of none, static, best_first"),
        ({"trees": [to_json(tree(paths=[[0], [0, 0], [0, 0, 0]]))]}, "3 levels and its head draf"),
        ({"trees": [to_json(tree(paths=[[0, 0]]))]}, "distinct, non-empty rank paths"),
        ({"trees": [to_json(tree(batch=0))]}, "batch .*greater than or equal to 1"),
        ({"trees": [to_json(tree(copied=10**6))]}, "copied_tokens"),
        ({"cost": to_json(StepCost(verify=NEGATIVE, draft=FORWARD))}, "value of cost.verify.token"),
        (
            {"acceptance": {"per_depth": [0.5], "curves": [FALLING]}},
            "increasing probs, and as many values of accepted",
        ),
        ({"acceptance": {"per_depth": [0.5, 0.4], "curves": [LEVEL]}}, "as many curves as depths"),
        ({"acceptance": {"per_depth": [float("nan")]}}, "value of acceptance.per_depth.0"),
    ],
)  # fmt: skip
def test_a_damaged_file_or_one_of_another_head_is_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(InputError, match=message) as caught:
        load_head(folder(tmp_path, **content), tiny.base())
    assert "delete" in str(caught.value)


def test_decoding_takes_the_tuned_tree_and_any_that_is_named(tmp_path):
    base = tiny.base()
    head = load_head(folder(tmp_path), base)
    assert Engine(base, head).tree.name == "tuned"
    out = generate(base, head, [[1, 2, 3]], max_new_tokens=6)
    assert all(len(step.drafted) == 3 for step in out.steps[0])
    assert Engine(base, head, tree=policies.chain(2)).tree.name == "chain"


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"name": "abacus"}, "static", "tuned"),
        ({"dtype": "float16"}, "static", "tuned"),
        ({"device": "cuda"}, "static", "chain"),
        # drafting that does not pay there may pay here
        ({"name": "abacus"}, "none", "chain"),
    ],
)
def test_trees_tuned_on_another_machine_are_used_on_the_same_device_type(
    tmp_path, changes: dict[str, str], kind: str, expected: str
):
    base = tiny.base()
    head = load_head(folder(tmp_path), base)
    head.tuned = tuned(tree(kind=kind), machine=replace(tuned().machine, **changes))
    assert Engine(base, head).tree.name == expected


def test_trees_follow_batch_and_context_while_decoding():
    """And a head with a memory drafts after steps without a draft as if it always had."""
    base = tiny.base()
    head = copy_for_drafting(build_for_base({"kind": "eagle3", "depth": 2}, base), base)
    wide = [[0], [1], [2], [0, 0]]
    head.tuned = tuned(tree(context=4, kind="none"), tree(context=64, paths=wide, num_nodes=5))
    assert isinstance(Engine(base, head).tree, SwitchingPolicy)
    out = generate(base, head, [[1, 2, 3]], max_new_tokens=40)
    nodes = [len(step.drafted) for step in out.steps[0]]
    assert (nodes[0], nodes[-1]) == (1, 5)
    assert out.tokens == generate(base, None, [[1, 2, 3]], max_new_tokens=40).tokens
    always = generate(base, head, [[1, 2, 3]], max_new_tokens=40, tree=policies.Static(wide))
    switched, continuous = drafts(out), drafts(always)
    assert switched.keys() & continuous.keys()
    # the same position of the text always gets the same draft
    assert all(
        continuous[position] == switched[position]
        for position in switched.keys() & continuous.keys()
    )


TWICE = [[7, 3, 11, 5, 2, 9, 7, 3, 11], [4, 8, 4, 8, 4]]
"""Prompts that repeat themselves, so that something is copied."""


@pytest.mark.parametrize(
    ("kind", "temperature"),
    slow_except([("eagle3", 0.0), ("medusa", 1.0)], product(["eagle3", "medusa"], [0.0, 1.0])),
)
def test_a_tuned_tree_with_copied_text_is_drafted_and_changes_no_text(kind, temperature):
    base, sampling = tiny.base(), Sampling(temperature=temperature, seed=3)
    head = copy_for_drafting(build_for_base({"kind": kind, "depth": 2}, base), base)
    head.tuned = tuned(tree(copied=5))
    settings: Any = {"max_new_tokens": 40, "sampling": sampling}
    alone, out = (generate(base, drafter, TWICE, **settings) for drafter in (None, head))
    assert out.tokens == alone.tokens
    steps = [step for row in out.steps for step in row]
    assert {step.num_copied for step in steps} > {0}
    # greedily some copied token is accepted: copied ones are the last nodes
    assert temperature or any(
        step.path[-1] >= len(step.drafted) - step.num_copied > 0 for step in steps
    )
    # one by one, joining while others run
    engine = Engine(base, head, max_batch=2)
    assert isinstance(engine.tree, HybridTree)
    streams = [
        engine.submit(Request(prompt=prompt, max_new_tokens=40, sampling=settings))
        for prompt, settings in zip(TWICE, expand_sampling(sampling, len(TWICE)), strict=True)
    ]
    engine.run()
    assert [stream.tokens for stream in streams] == alone.tokens


def drafts(out: Decoding) -> dict[int, list[int]]:
    """Return the drafts by their position in the text."""
    position, drafted = 0, {}
    for step in out.steps[0]:
        if len(step.drafted) > 1:
            drafted[position] = step.drafted
        position += len(step.tokens)
    return drafted


def test_places_of_one_tree_have_one_policy_whatever_was_measured_of_it():
    measured = tuned(tree(), tree(4, 512, interval=[1.0, 1.3]))
    assert isinstance(measured.policy(), policies.Static)
    assert isinstance(tuned(tree(), tree(4, paths=[[0]], num_nodes=2)).policy(), SwitchingPolicy)


def test_the_nearest_batch_counts_first_and_then_the_nearest_context():
    measured = tuned(tree(1, 32), tree(1, 512), tree(8, 32))
    assert measured.best(1, 20) == tree(1, 32)
    assert measured.best(2, 400) == tree(1, 512)
    assert measured.best(20, 4000) == tree(8, 32)


def test_an_estimate_takes_the_place_of_the_drafters_own_probability():
    logs, entropies = torch.tensor([-0.1, -3.0]), torch.tensor([0.2, 2.0])
    learned = AcceptanceEstimate(bias=0.0, log_prob=1.0, entropy=-1.0, level=-0.5)
    chances = learned(logs, entropies, 2)
    torch.testing.assert_close(chances, torch.sigmoid(logs - entropies - 1.0))
    # drafting stops below the first level whose estimate is too low: sigmoid(15 - 10 * 2)
    falling = AcceptanceEstimate(bias=15.0, log_prob=0.0, entropy=0.0, level=-10.0)
    policy = policies.Static([(0,) * length for length in range(1, 6)], "", 0.5, falling)
    out = generate(tiny.base(), tiny.oracle(5), tiny.prompts(), max_new_tokens=9, tree=policy)
    assert {len(step.drafted) for steps in out.steps for step in steps} == {1 + 3}
