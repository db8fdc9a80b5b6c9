"""Compiled verification gives the tokens of eager verification, with few compilations."""

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch._inductor import config as inductor

from specheads.base.compile import Recorder, compile_forward, find_layers
from specheads.base.model import FrozenBase
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.load import Head, build_for_base
from tests import tiny
from tests.oracle import Oracle
from tests.slow import slow_except

# a warning of torch about its own compiler
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
TREE = policies.Static([(0,), (1,), (0, 0), (0, 1)])
MORE_GRAPHS = ("gpt2", "gemma3")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    # the compiler cannot trace the type checks of the tests
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


def copied(architecture: str, device: str = "cpu", **settings: Any) -> FrozenBase:
    """Return a base that shares no graphs with others."""
    model = copy.deepcopy(tiny.base(architecture).model)
    torch.nn.Module.to(model, device)
    return FrozenBase(model, **settings)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def oracle(base: FrozenBase, prompts: list[list[int]], length: int) -> Oracle:
    continuations = generate(base, None, prompts, max_new_tokens=length).tokens
    texts = [prompt + text for prompt, text in zip(prompts, continuations, strict=True)]
    return Oracle(texts, 2, base.vocab_size, rate=0.6, device=base.device)


class Counting(Recorder):
    """Counts recordings and replays, which on a CPU call the function on the same buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.called = 0

    def __call__(self, *args: Any, **settings: Any) -> Any:
        self.called += 1
        return super().__call__(*args, **settings)

    def _record(self, graphs: Any, name: Any, function: Any, inputs: Any) -> Any:
        self.recorded += 1
        return super()._record(graphs, name, function, inputs)


@pytest.mark.parametrize("architecture", slow_except(["llama"], ["llama", *MORE_GRAPHS]))
def test_recorded_forwards_give_the_tokens_of_eager_ones(architecture: str) -> None:
    # the code that runs on CUDA, except the recording and the compiler's kernels
    plain, base = tiny.base(architecture), copied(architecture)
    record = base.forwards.graphs = Counting()
    base.forwards.compiled_layers = find_layers(base.model, backend="eager")
    assert base.forwards.compiled_layers
    assert base.forwards.count_attention_calls() == base.num_layers
    prompts, head, before = tiny.prompts(), eagle(architecture), graphs()
    for length in (24, 31):
        drafters = [(None, None), (head, policies.chain(2))]
        for rows in (prompts, prompts[:1]):
            for drafter, tree in drafters:
                settings = {"max_new_tokens": length, "tree": tree}
                assert generate(base, drafter, rows, **settings) == generate(
                    plain, drafter, rows, **settings
                )
    # one row and several, one node and several, and in gemma3 with and without windows
    assert graphs() - before <= 8
    assert 0 < record.recorded < record.called / 4


def test_a_missing_compiler_is_an_input_error() -> None:
    double = compile_forward(lambda values: (values.sin() + values).cos() * 3.25)
    # torch's own patch, because torch 2.11 ignores values restored by monkeypatch
    none = inductor.patch({"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True})
    with none, pytest.raises(ValueError, match="needs a working compiler"):
        double(torch.ones(41))


@functools.cache
def eagle(architecture: str) -> Head:
    torch.manual_seed(0)
    base = tiny.base(architecture)
    return build_for_base({"kind": "eagle3", "depth": 2}, base).eval().double()


def rounds(architecture: str) -> None:
    """Decode with all settings twice; return the number of graphs after each time."""
    plain, base = tiny.base(architecture), copied(architecture, compile=True)
    prompts, head = tiny.prompts(), eagle(architecture)
    drafters: list[tuple[Callable[[], Any], policies.TreePolicy | None]] = [
        (lambda: None, None),
        (lambda: head, policies.chain(2)),
        (lambda: oracle(plain, prompts, 31), TREE),
    ]
    for length in (24, 31):
        for drafter, tree in drafters:
            for pool in (None, base.pool(200)):
                settings = {"max_new_tokens": length, "tree": tree}
                output = generate(base, drafter(), prompts, pool=pool, **settings)
                assert output == generate(plain, drafter(), prompts, **settings)
        sys.stdout.write(f"{graphs()}\n")


@pytest.mark.slow
def test_compiled_on_a_cpu_gives_the_tokens_of_eager() -> None:
    # in a process without the type checks of the tests, which break graphs
    run = "from tests.base.test_compile import rounds; rounds('llama')"
    process = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    first, second = map(int, process.stdout.split())
    # rows, nodes and slots are symbolic; size one, full blocks and aux_layers are special cases
    assert 0 < first <= second <= 20
