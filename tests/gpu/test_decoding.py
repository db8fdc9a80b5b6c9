"""Decoding on a device gives the tokens of the plain transformers model, with every head."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.decoding import loop
from specheads.decoding.accept import acceptance_rule
from specheads.decoding.engine import Engine
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.policies import Product, Sampled
from specheads.heads.load import build_for_base, kinds
from tests import tiny
from tests.gpu import trained

pytestmark = pytest.mark.gpu

FLOAT32, FLOAT64 = torch.float32, torch.float64
STATIC = policies.Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
TREES: dict[str, policies.TreePolicy] = {"chain": policies.chain(3), "static": STATIC}
POLICIES: dict[str, policies.TreePolicy] = {
    "chain": policies.chain(3),
    "static": STATIC,
    "best_first": policies.BestFirst(6, 3),
    "beam": policies.Beam(3, 3),
    "product": Product((2, 2), 6),
    "sampled": Sampled((2, 2)),
}
ARCHITECTURES = ("llama", "gpt2", "gemma3", "granite", "qwen3", "mistral")
SETTINGS = [
    Sampling(temperature=0.9),
    Sampling(temperature=0.7, top_k=20),
    Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.3),
]
NEW_TOKENS = tiny.NEW_TOKENS


def base_on(
    device: torch.device, dtype: torch.dtype = FLOAT64, architecture: str = "llama"
) -> FrozenBase:
    return tiny.base(architecture, dtype=dtype, device=device)


def greedy(base: FrozenBase, head: Drafter | None, **settings: Any) -> Decoding:
    return generate(base, head, tiny.prompts(), max_new_tokens=NEW_TOKENS, **settings)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", kinds())
def test_every_head_gives_the_greedy_text_in_float32(kind, tree, device):
    head = trained.head(kind, device)
    out = greedy(base_on(device, FLOAT32), head, tree=TREES[tree])
    assert out.tokens == tiny.continuations("llama", FLOAT32, device)
    # without accepted drafts the comparison would be empty
    assert sum(out.forwards) < 0.9 * 3 * (NEW_TOKENS - 1)


@pytest.mark.parametrize("tree", ["chain", "best_first"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_greedy_text_in_float32(architecture, tree, device):
    oracle = tiny.oracle(3, architecture, rate=0.7, device=device)
    out = greedy(base_on(device, FLOAT32, architecture), oracle, tree=POLICIES[tree])
    assert out.tokens == tiny.continuations(architecture, FLOAT32, device)
    assert sum(out.forwards) < 0.8 * 3 * (NEW_TOKENS - 1)


def sampled(
    device: torch.device, head: Drafter | None, seed: int = 1, **settings: Any
) -> list[list[int]]:
    """Sample in float64: in float32 two ways to the same logits may draw different tokens."""
    samplings = [
        replace(sampling, seed=seed).of_prompt(row) for row, sampling in enumerate(SETTINGS)
    ]
    return generate(
        base_on(device), head, tiny.prompts(), max_new_tokens=24, sampling=samplings, **settings
    ).tokens


@pytest.mark.parametrize("kind", kinds())
def test_coupled_noise_gives_the_text_of_the_base_alone(kind: str, device: torch.device) -> None:
    head = trained.head(kind, device, FLOAT64)
    assert sampled(device, head, tree=STATIC) == sampled(device, None)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("tree", ["chain", "best_first", "sampled"])
def test_every_tree_samples_the_text_of_the_base_alone(tree, coupled, device):
    head = trained.head("mlp_speculator", device, FLOAT64)
    settings = {"tree": POLICIES[tree], "coupled": coupled}
    assert sampled(device, head, **settings) == sampled(device, None)
    assert sampled(device, head, seed=2, **settings) != sampled(device, None)


def test_sampled_tokens_are_those_of_the_cpu(device: torch.device) -> None:
    # noise is a function of seed and position, and so the same on every device
    assert sampled(device, None) == sampled(tiny.CPU, None)


@pytest.mark.parametrize("kind", ["eagle3", "mlp_speculator", "dflash"])
def test_rows_that_wait_join_and_leave_give_the_text_of_each_alone(kind, device):
    base, head = base_on(device, FLOAT32), trained.head(kind, device)
    prompts = [*tiny.prompts(), *(prompt[:4] for prompt in tiny.prompts())]
    limits = (9, 24, 15, 30, 6, 12)
    engine = Engine(base, head, tree=STATIC, max_batch=2, max_length=64)
    requests = [
        Request(prompt=prompt, max_new_tokens=limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    streams = [engine.submit(request) for request in requests[:3]]
    for _ in range(4):
        engine.step()
    # these join rows that are in the middle of their text
    streams += [engine.submit(request) for request in requests[3:]]
    engine.run()
    for stream, prompt, limit in zip(streams, prompts, limits, strict=True):
        assert stream.tokens == generate(base, None, [prompt], max_new_tokens=limit).tokens[0]


@pytest.mark.parametrize("tree", POLICIES)
def test_a_step_does_not_wait_for_the_device(tree: str, device: torch.device) -> None:
    base = base_on(device, FLOAT32)
    head = build_for_base({"kind": "mlp_speculator", "depth": 3}, base).eval()
    sampling = [Sampling(temperature=0.8, top_k=5), Sampling(temperature=1.0, top_p=0.9)]
    state, _ = loop.start(base, head, [[1, 2, 3], [4, 5, 6, 7]], 64, sampling)
    match = acceptance_rule("match")
    # the first step copies what a tree policy prepares once
    loop.step(base, head, POLICIES[tree], match, state)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            drafted = POLICIES[tree].grow(head, state.committed, state.memory, state.sampling)
            verified = base.verify(drafted, state.cache)
            verdict = match(drafted, verified.logits, verified.ancestors, state.sampling)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert verdict.path.device == device
    assert verdict.count.min() >= 1
