import time
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.loop import (
    BASE_ORIGIN,
    NO_LEDGER,
    PARTS,
    DecodingStep,
    Origin,
    StepLedger,
    StepTimes,
    node_origins,
    step_origins,
)
from specheads.decoding.trees.policies import Static, chain
from specheads.heads.load import build_for_base, copy_for_drafting
from specheads.measure.generation import GenerationSettings
from specheads.measure.speed import measure_ledger
from tests import tiny


def speculate(depth: int = 3, new_tokens: int = tiny.NEW_TOKENS, **settings: Any) -> Decoding:
    return generate(
        tiny.base(), tiny.oracle(depth), tiny.prompts(), max_new_tokens=new_tokens, **settings
    )


def alone(prompts: list[list[int]], **settings: Any) -> Decoding:
    return generate(tiny.base(), None, prompts, **settings)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_drafter_that_knows_the_text_gets_depth_plus_one_tokens_a_forward(depth):
    out = speculate(depth)
    assert out.tokens == tiny.continuations()
    for steps in out.steps:
        # the last step may look beyond what the oracle knows
        assert {len(step.tokens) for step in steps[:-1]} == {depth + 1}
        assert {tuple(step.path) for step in steps[:-1]} == {tuple(range(depth + 1))}
    assert out.forwards == [len(steps) for steps in out.steps]
    assert out.forwards == [-(-(tiny.NEW_TOKENS - 1) // (depth + 1))] * 3


@pytest.mark.parametrize("new_tokens", [0, 1, 2])
def test_the_limit_is_kept_to_the_token(new_tokens):
    expected = [expected_tokens[:new_tokens] for expected_tokens in tiny.continuations()]
    assert alone(tiny.prompts(), max_new_tokens=new_tokens).tokens == expected
    out = speculate(new_tokens=new_tokens)
    assert out.tokens == expected
    # nothing asked for takes no forward, and the first token comes with the prompt
    assert out.forwards == [max(new_tokens - 1, 0)] * 3


@pytest.mark.parametrize("depth", [0, 3])
def test_a_row_ends_with_its_first_end_of_text_and_others_go_on(depth, monkeypatch):
    expected_tokens = tiny.continuations()
    eos = expected_tokens[0][9]
    monkeypatch.setattr(tiny.base().model.generation_config, "eos_token_id", [eos, 60])
    ends = [min([*row, eos, 60].index(token) for token in (eos, 60)) + 1 for row in expected_tokens]
    assert len({*ends}) == 3, "the rows should end at different places"
    expected = [row[:end] for row, end in zip(expected_tokens, ends, strict=True)]
    out = speculate(depth) if depth else alone(tiny.prompts(), max_new_tokens=tiny.NEW_TOKENS)
    assert out.tokens == expected
    if not depth:
        assert out.forwards == [len(row) - 1 for row in expected]


def test_the_end_of_text_can_be_ignored(monkeypatch):
    expected_tokens = tiny.continuations()
    monkeypatch.setattr(tiny.base().model.generation_config, "eos_token_id", expected_tokens[0][3])
    assert speculate(stop_at_eos=False).tokens == expected_tokens


def test_the_context_can_be_filled_to_its_last_position():
    # learned positions: a node beyond the last one would be an index error
    config = tiny.config("gpt2", max_position_embeddings=24)
    base = FrozenBase(AutoModelForCausalLM.from_config(config))
    prompt = tiny.prompts()[2]
    plain = generate(base, None, [prompt], max_new_tokens=24 - len(prompt))
    oracle = tiny.Oracle([prompt + plain.tokens[0]], 4, tiny.VOCAB)
    tree = Static([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (1, 0)])
    out = generate(base, oracle, [prompt], max_new_tokens=24 - len(prompt), tree=tree)
    assert out.tokens == plain.tokens
    assert len(prompt) + len(out.tokens[0]) == base.max_length


NEVER = StepTimes(0.0, 0.0)


def test_depths_are_edges_below_the_root_and_the_last_nodes_are_copied():
    #        0                nodes 1 to 3 are the head's; 4 and 5 were copied below node 1,
    #      1   2              and node 6 is padding
    #    3   4
    #        5
    origins = node_origins([-1, 0, 0, 1, 1, 4, -1], num_copied=3)
    assert origins[:6] == [
        BASE_ORIGIN,
        Origin("drafted", 1),
        Origin("drafted", 1),
        Origin("drafted", 2),
        Origin("copied", 2),
        Origin("copied", 3),
    ]
    step = DecodingStep(
        [11, 14, 15, 9], [0, 1, 4, 5], [0, *range(11, 17)], [-1, 0, 0, 1, 1, 4, -1], NEVER, 3
    )
    assert list(map(str, step_origins(step))) == [
        "drafted at depth 1", "copied at depth 2", "copied at depth 3", "the base's own",
    ]  # fmt: skip


def test_a_ledger_holds_the_time_of_every_part_of_a_real_heads_steps():
    base = tiny.base()
    head = copy_for_drafting(build_for_base({"kind": "eagle3", "depth": 2}, base), base)
    ledger, prompts = StepLedger(base.device), tiny.prompts()[:2]
    start = time.perf_counter()
    decoding = generate(base, head, prompts, max_new_tokens=12, ledger=ledger)
    seconds = time.perf_counter() - start
    assert decoding.tokens == generate(base, head, prompts, max_new_tokens=12).tokens
    assert ledger.num_steps == max(decoding.forwards)
    assert all(ledger.seconds[name] > 0 for name in PARTS)
    # the rest of the time is that of the prompts
    assert sum(ledger.seconds.values()) < seconds
    assert set(NO_LEDGER.seconds.values()) == {0.0}


def test_the_ledger_of_an_evaluation_is_the_mean_of_its_steps():
    base = tiny.base()
    head = copy_for_drafting(build_for_base({"kind": "medusa", "depth": 2}, base), base)
    generation = GenerationSettings(max_new_tokens=8, speed_prompts=2)
    summary = measure_ledger(base, head, tiny.prompts(), generation)
    forwards = generate(base, head, tiny.prompts()[:2], max_new_tokens=8, tree=chain(2)).forwards
    assert summary.num_steps == sum(forwards)
    assert 0 < summary.draft + summary.verify + summary.accept + summary.host < 1
