"""Recorded drafts and verifications give the steps of eager ones, for every head and tree."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import track
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from specheads.base.compile import (
    WARMUP_CALLS,
    Recorder,
    Recording,
    map_tensors,
    tensors_in,
)
from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.decoding.draft_model import DraftModel
from specheads.decoding.engine import Engine
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.recorded import pad_batch, padded_rows
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.heads.layers import attention
from specheads.heads.load import kinds
from tests import tiny
from tests.gpu import trained
from tests.heads.test_heads import make
from tests.slow import SOME_KINDS, each_kind, slow_except

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 24
TREES: dict[str, policies.TreePolicy] = {
    "chain": policies.chain(3),
    "static": policies.Static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
    "best_first": policies.BestFirst(6, 3),
    "beam": policies.Beam(3, 3),
    "product": policies.Product((2, 2), 6),
    "sampled": policies.Sampled((2, 2)),
    "hybrid": HybridTree(policies.chain(2), 3),
}
LAWS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_k=9, seed=3),
    "penalised": Sampling(temperature=1.1, top_p=0.9, repetition_penalty=1.2, seed=5),
    "processed": Sampling(temperature=0.9, bad_words=[[3]], seed=6),
}
RULES = ("match", "rejection", "typical")
MORE_KINDS = ("dflash", "medusa")
"""Heads of slow tests; tests/decoding/test_synchronisation.py runs the code of every head too."""


class Counting(Recorder):
    """Counts recordings and calls by the name of the function."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.called = list[str](), list[str]()
        self.shapes = list[tuple[Any, ...]]()
        """Name and shapes of the inputs of each recorded function."""

    def __call__(self, graphs: Any, key: Any, *args: Any) -> Any:
        self.called.append(key[0])
        return super().__call__(graphs, key, *args)

    def _record(self, graphs: Any, name: str, function: Any, inputs: Any) -> Recording | None:
        self.recorded.append(name)
        self.shapes.append((name, *(tensor.shape for tensor in tensors_in(inputs))))
        return super()._record(graphs, name, function, inputs)


@dataclass
class Capture:
    """The operations of a function, which stand for a CUDA graph: its Python code does not run."""

    operations: Callable[..., list[Tensor]]
    recording: Recording
    graphs: dict[Hashable, Any]

    def replay(self) -> None:
        """Compute the outputs, and overwrite those of all recordings in the same pool before."""
        for entry in self.graphs.values():
            if isinstance(entry, Recording) and entry.name == self.recording.name:
                for tensor in tensors_in(entry.outputs):
                    # no token or index is as large
                    tensor.fill_(torch.nan if tensor.is_floating_point() else 2**40)
        outputs = self.operations(*tensors_in(self.recording.inputs))
        for target, source in zip(tensors_in(self.recording.outputs), outputs, strict=True):
            target.copy_(source)


class Capturing(Counting):
    """Records as CUDA does: operations at fixed addresses, with the numbers of Python as they were.

    They are traced with FakeTensorMode, so a function that reads a value of a tensor raises.
    """

    def _record(self, graphs: Any, name: str, function: Any, inputs: Any) -> Recording | None:
        recording = super()._record(graphs, name, function, inputs)
        assert recording is not None
        results = []

        def launch(*tensors: Tensor) -> list[Tensor]:
            iterator = iter(tensors)
            results.append(function(*map_tensors(lambda _: next(iterator), recording.inputs)))
            return tensors_in(results[0])

        # weights and caches are not fake, and stay at their addresses
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [fake.from_tensor(tensor) for tensor in tensors_in(recording.inputs)]
        operations = make_fx(launch, tracing_mode="fake")(*tensors)
        recording.outputs = map_tensors(
            lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), results[0]
        )
        recording.graph = Capture(operations, recording, graphs)
        return recording


def recording_base(recorder: Recorder) -> FrozenBase:
    """Return a base that decodes on a CPU as on CUDA: fixed shapes, and recorded functions."""
    base = tiny.own_base()
    base.forwards.record()
    assert base.forwards.compiled_layers is not None
    base.forwards.graphs = recorder
    return base


def head(kind: str) -> Drafter:
    return trained.head(kind, tiny.CPU, torch.float64)


def decode(base: FrozenBase, drafter: Drafter | None, **settings: Any) -> Decoding:
    settings = {"max_new_tokens": NEW_TOKENS, **settings}
    return generate(base, drafter, tiny.prompts(), **settings)


def check_equal(
    drafter: Drafter | None, recorder_class: type[Counting] = Counting, **settings: Any
) -> Counting:
    """Decode with and without recordings; return what was recorded."""
    recorder = recorder_class()
    base = recording_base(recorder)
    expected = decode(tiny.base(), drafter, **settings)
    # the second time reuses memory and recordings of the first
    for _ in range(2):
        decoding = decode(base, drafter, **settings)
        assert decoding.tokens == expected.tokens
        # steps are equal in their drafts too
        assert decoding.steps == expected.steps
    return recorder


@pytest.mark.parametrize(
    ("kind", "tree"),
    slow_except([(kind, "static") for kind in SOME_KINDS], product(kinds(), ("chain", "static"))),
)
def test_recorded_drafts_of_every_head_are_the_eager_ones(kind: str, tree: str) -> None:
    recorder = check_equal(head(kind), tree=TREES[tree])
    assert recorder.called.count("drafting") > 4 * recorder.recorded.count("drafting") > 0


@pytest.mark.parametrize(
    ("tree", "law"),
    # every tree, and every law with two
    slow_except([*zip(TREES, [*LAWS] * 2, strict=False)], product(TREES, LAWS)),
)
def test_recorded_drafts_of_every_tree_and_law_are_the_eager_ones(tree: str, law: str) -> None:
    recorder = check_equal(head("eagle3"), tree=TREES[tree], sampling=LAWS[law])
    # processors of a row run on the host
    assert ("drafting" in recorder.recorded) == (law != "processed")


def test_recorded_steps_of_the_base_alone_are_the_eager_ones() -> None:
    recorder = check_equal(None)
    assert "acceptance" in recorder.recorded


FUNCTIONS = {"drafting", "verification", "acceptance"}


@pytest.mark.parametrize("kind", each_kind("dspark", "mlp_speculator"))
def test_steps_of_every_head_replay_without_python_code(kind: str) -> None:
    recorder = check_equal(head(kind), Capturing, tree=TREES["static"])
    assert {*recorder.recorded} == FUNCTIONS


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("tree", TREES)
def test_steps_of_every_tree_and_law_replay_without_python_code(tree: str, law: str) -> None:
    check_equal(head("mlp_speculator"), Capturing, tree=TREES[tree], sampling=LAWS[law])


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", RULES)
def test_every_rule_replays_without_python_code(acceptance: str) -> None:
    settings = {"sampling": [LAWS["greedy"], LAWS["sampled"], LAWS["penalised"]]}
    check_equal(
        head("redrafter"), Capturing, tree=TREES["sampled"], acceptance=acceptance, **settings
    )


def test_a_function_that_reads_a_value_cannot_be_captured() -> None:
    recorder, graphs, inputs = Capturing(), {}, (torch.ones(2),)
    arguments = graphs, ("read",), lambda x: x * x.sum().item(), inputs
    for _ in range(WARMUP_CALLS):
        recorder(*arguments)
    with pytest.raises(DataDependentOutputException):
        recorder(*arguments)


class Alternating(policies.TreePolicy):
    """Drafts in every third step."""

    name, num_nodes, depth = "alternating", 4, 3

    def __init__(self) -> None:
        self.num_steps = 0

    def choose_policy(self, load: Any) -> policies.TreePolicy:
        self.num_steps += 1
        return policies.NOTHING if self.num_steps % 3 else TREES["chain"]


def impatient_head() -> Drafter:
    """Return a head that reads what was committed without a draft in every second step."""
    drafter = head("eagle3")
    drafter.max_unread_positions = 2
    return drafter


UNRECORDED: dict[str, Callable[[], tuple[Drafter | None, policies.TreePolicy]]] = {
    "draft model": lambda: (DraftModel(tiny.base("gpt2"), 3, tiny.base()), TREES["chain"]),
    "recorded draft model": lambda: (
        DraftModel(recording_base(Recorder()), 3, tiny.base()),
        TREES["static"],
    ),
    "early stop": lambda: (head("eagle3"), policies.chain(3, confidence=0.5)),
    "lookup": lambda: (None, lookup_tree(4)),
    "steps without a draft": lambda: (head("eagle3"), Alternating()),
    "positions stored without a draft": lambda: (impatient_head(), Alternating()),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_steps_whose_drafts_are_not_recorded_are_the_eager_ones(name: str) -> None:
    drafter, tree = UNRECORDED[name]()
    expected = decode(tiny.base(), drafter, tree=tree)
    base = recording_base(Recorder())
    for _ in range(2):
        drafter, tree = UNRECORDED[name]()
        assert decode(base, drafter, tree=tree).steps == expected.steps


@pytest.mark.parametrize("acceptance", RULES)
def test_every_rule_accepts_the_same_of_recorded_drafts(acceptance: str) -> None:
    mixed = [LAWS["greedy"], LAWS["sampled"], LAWS["penalised"]]
    settings = {"sampling": mixed, "acceptance": acceptance}
    check_equal(head("mlp_speculator"), tree=TREES["sampled"], **settings)


@pytest.mark.parametrize("settings", [{"sliding_window": 5}, {"parallel": True}])
def test_recorded_drafts_with_a_window_or_in_parallel_are_the_eager_ones(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # shorter than the prompts, so that positions are dropped
    monkeypatch.setattr(attention, "SPARE_SLOTS", 8)
    check_equal(make({"kind": "eagle3", **settings}, tiny.base()), tree=TREES["static"])


@pytest.mark.parametrize(
    ("kind", "paged", "recorder_class"),
    slow_except(
        [("eagle3", False, Counting), ("eagle3", True, Capturing)],
        product(["eagle3", *MORE_KINDS], (False, True), (Counting, Capturing)),
    ),
)
def test_rows_that_join_and_leave_record_nothing_again(
    kind: str, paged: bool, recorder_class: type[Counting]
) -> None:
    recorder, drafter = recorder_class(), head(kind)
    base = recording_base(recorder)
    pool = base.pool(64, block_size=4) if paged else None
    prompts = [tiny.prompts()[1][:length] for length in (5, 9, 4, 3, 8, 11)]
    limits = (9, 24, 15, 30, 6, 12)
    requests = [
        Request(prompt=prompt, max_new_tokens=limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    for _ in range(3):
        settings = {"tree": TREES["static"], "max_batch": 4, "max_length": 64, "pool": pool}
        engine = Engine(base, drafter, **settings)
        streams = [engine.submit(request) for request in requests[:3]]
        for _ in range(3):
            engine.step()
        streams += [engine.submit(request) for request in requests[3:]]
        engine.run()
        for stream, prompt, limit in zip(streams, prompts, limits, strict=True):
            alone = generate(tiny.base(), None, [prompt], max_new_tokens=limit)
            assert stream.tokens == alone.tokens[0]
    # one, two, and three or four rows, each recorded once
    padded = [shapes for shapes in recorder.shapes if paged or shapes[0] == "drafting"]
    assert 3 <= len({*padded}) == len(padded) <= (14 if paged else 6)


@pytest.mark.parametrize("kind", slow_except(["eagle3"], ["eagle3", "mlp_speculator"]))
def test_a_recorded_paged_engine_gives_the_steps_of_an_eager_one(kind: str) -> None:
    recorder, drafter = Counting(), head(kind)
    base = recording_base(recorder)
    settings = {"tree": TREES["static"], "sampling": LAWS["sampled"], "max_batch": 2}
    expected = decode(tiny.base(), drafter, pool=tiny.base().pool(64, block_size=4), **settings)
    pool = base.pool(64, block_size=4)
    for _ in range(2):
        assert decode(base, drafter, pool=pool, **settings).steps == expected.steps
        assert pool.num_free == pool.num_blocks
    assert {*recorder.recorded} == FUNCTIONS


@pytest.mark.parametrize("kind", slow_except(["mlp_speculator"], ["mlp_speculator", "eagle3"]))
@pytest.mark.parametrize("paged", [False, True])
def test_an_engine_records_all_batch_sizes_before_its_first_request(kind: str, paged: bool) -> None:
    recorder, settings = Counting(), {"tree": TREES["static"], "max_batch": 3, "max_length": 64}
    base = recording_base(recorder)
    pool = base.pool(64, block_size=4) if paged else None
    engine = Engine(base, head(kind), pool=pool, **settings)
    assert engine.record_steps(progress=track) == [3, 2, 1]
    num_recorded = len(recorder.recorded)
    limits = (6, 12, 24)
    streams = [
        engine.submit(Request(prompt=tiny.prompts()[0], max_new_tokens=limit)) for limit in limits
    ]
    engine.run()
    alone = generate(tiny.base(), None, tiny.prompts()[:1], max_new_tokens=24).tokens[0]
    assert [stream.tokens for stream in streams] == [alone[:limit] for limit in limits]
    assert len(recorder.recorded) == num_recorded > 6


def test_two_engines_with_one_head_do_not_share_a_memory() -> None:
    recorder, drafter = Counting(), head("eagle3")
    base = recording_base(recorder)
    engines = [Engine(base, drafter, tree=TREES["chain"], max_length=64) for _ in range(2)]
    streams = [
        engine.submit(Request(prompt=prompt, max_new_tokens=NEW_TOKENS))
        for engine, prompt in zip(engines, tiny.prompts()[:2], strict=True)
    ]
    while any([engine.step() for engine in engines]):
        pass
    for stream, prompt in zip(streams, tiny.prompts()[:2], strict=True):
        settings = {"max_new_tokens": NEW_TOKENS, "tree": TREES["chain"]}
        alone = generate(tiny.base(), drafter, [prompt], **settings)
        assert stream.steps == alone.steps[0]


def test_batches_are_padded_with_their_last_row() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 5, 128, 129)] == [1, 2, 4, 8, 128, 256]
    rows, other = torch.arange(6).view(3, 2), torch.ones(2)
    padded, unpadded = pad_batch((rows, other), 3)
    assert padded.tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert unpadded is other


def test_a_moved_buffer_is_another_recording() -> None:
    recorder, graphs, inputs = Counting(), {}, (torch.ones(2),)
    first, second = torch.zeros(2), torch.ones(2)
    for _ in range(4):
        for buffer in (first, second):
            recorder(graphs, ("sum",), lambda x, b=buffer: x + b, inputs, [buffer])
    assert recorder.recorded == ["sum", "sum"]


def compile_drafts(kind: str, tree: str, law: str) -> None:
    """Decode with draft and acceptance traced as one graph each: reading a value back breaks it."""

    class Tracing(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.traced = Counter[str]()

        def __call__(
            self, graphs: Any, key: Any, function: Any, inputs: Any, buffers: Any = ()
        ) -> Any:
            with torch.inference_mode(mode=False), torch.no_grad():
                # the layers of the base are not traced: see tests/base/test_compile.py
                if key[0] == "verification" or self.traced[key[0]] == 2:
                    return function(*inputs)
                torch._dynamo.reset()
                self.traced[key[0]] += 1
                # tensors of inference mode cannot be traced
                inputs = map_tensors(torch.clone, inputs)
                return torch.compile(function, fullgraph=True, backend="eager")(*inputs)

    recorder = Tracing()
    # an untrained one, which is made in no time
    drafter, base = make({"kind": kind}, tiny.base()), recording_base(recorder)
    settings = {"tree": TREES[tree], "sampling": LAWS[law], "max_new_tokens": 8}
    expected = decode(tiny.base(), drafter, **settings)
    assert decode(base, drafter, **settings).steps == expected.steps
    assert recorder.traced == {"drafting": 2, "acceptance": 2}


def run_traced(cases: list[tuple[str, str, str]]) -> None:
    # in a process without the type checks of the tests, which break graphs
    code = "from tests.decoding.test_recorded import compile_drafts as run\n"
    code += f"for case in {cases!r}:\n    print(case, flush=True)\n    run(*case)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]


@pytest.mark.slow
def test_draft_and_acceptance_of_every_head_tree_and_law_are_one_graph_each() -> None:
    laws = [law for law in LAWS if law != "processed"]
    run_traced([(kind, "static", "greedy") for kind in kinds()])
    run_traced([("mlp_speculator", tree, law) for tree in TREES for law in laws])
