"""The vLLM plug-in with a fake model runner; test_vllm.py uses real vLLM."""

import importlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from specheads.core.drafter import Head
from specheads.core.features import Committed
from specheads.core.files import dumps
from specheads.decoding.calibration import Curve
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import FILE, Machine
from specheads.export import vllm, vllm_adapter
from specheads.export.layouts.vllm import FORCE_VARIABLE, HEAD_VARIABLE, PROPOSER
from specheads.heads import load
from specheads.heads.layers.attention import HeadCache
from tests import tiny, tuned

DEPTH = 3
BLOCK = 4
NUM_BLOCKS = 40


class Embedding(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # vLLM pads the vocabulary
        self.weight = nn.Parameter(torch.cat([weight, torch.zeros(3, weight.shape[1])]))
        self.org_vocab_size = len(weight)


class LMHead(Embedding):
    pass


class FullAttentionSpec(SimpleNamespace):
    pass


class Runner:
    """Fake model runner whose block table is shuffled."""

    def __init__(self, drafter: vllm.Proposer, max_num_reqs: int = 4) -> None:
        self.drafter = drafter
        table = torch.zeros(max_num_reqs, 16, dtype=torch.int32)
        order = torch.randperm(NUM_BLOCKS - 1)[: table.numel()] + 1
        table[:2] = order[:32].view(2, 16)
        block_table = SimpleNamespace(
            block_size=BLOCK, get_device_tensor=lambda num_reqs: table[:num_reqs]
        )
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b"],
            num_computed_tokens_cpu=[0, 0],
            token_ids_cpu=np.zeros((max_num_reqs, 64), dtype=np.int32),
            num_tokens_no_spec=np.zeros(max_num_reqs, dtype=np.int32),
            block_table=[block_table],
        )

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
    ) -> list[list[int]]:
        del scheduler_output, hidden_states, aux_hidden_states, spec_decode_metadata
        batch = self.input_batch
        return self.drafter.propose(
            sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=None
        )

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        pass

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:
        del kv_cache_config, is_profiling


@pytest.fixture
def prepared(monkeypatch) -> Iterator[type[Runner]]:
    """Install the fake runner in place of vLLM and return its class."""

    class GPUModelRunner(Runner):
        """A new class for each test, because the plug-in changes it."""

    modules = {
        vllm.RUNNER: {"GPUModelRunner": GPUModelRunner},
        vllm_adapter.CACHE: {"FullAttentionSpec": FullAttentionSpec},
        vllm_adapter.EMBEDDING: {"VocabParallelEmbedding": Embedding, "ParallelLMHead": LMHead},
        vllm_adapter.PARALLEL: {"tensor_model_parallel_all_gather": lambda values, _: values},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    vllm.prepare_runner.cache_clear()
    yield GPUModelRunner
    vllm.prepare_runner.cache_clear()


def build(kind: str, **settings: Any) -> Head:
    base = tiny.base()
    head = load.build_head(
        {"kind": kind, "depth": DEPTH} | settings, width=32, vocab_size=tiny.VOCAB
    )
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.4)
    head.double().bind(base.embedding, base.projection.scaled_weight)
    return head.eval()


KINDS = {
    "medusa": {"projection": "low_rank", "rank": 4},
    "hydra_heads": {"attention_heads": 4},
    "mlp_speculator": {"aux_layers": [1]},
    "mtp": {"attention_heads": 4, "key_value_heads": 2, "aux_layers": [0, 2]},
    "redrafter": {},
    "eagle3": {"attention_heads": 4, "key_value_heads": 2, "aux_layers": [0, 1, 2]},
    "eagle_gru": {"attention_heads": 4, "aux_layers": [0, 1, 2]},
}


def config(**changes: Any) -> Any:
    settings = {
        "speculative_config": SimpleNamespace(num_speculative_tokens=DEPTH),
        "model_config": SimpleNamespace(
            dtype=torch.float64, hf_text_config=SimpleNamespace(logits_scaling=None)
        ),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**settings | changes)


class Target(nn.ModuleList):
    """Fake model of vLLM that can return the residual streams after some layers."""

    aux_layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_layers = layers


def target() -> Target:
    base = tiny.base()
    return Target([Embedding(base.embedding), LMHead(base.projection.weight)])


def cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=groups)


def serve(prepared: type[Runner], head: Head, folder: Any, monkeypatch: Any) -> Runner:
    head.save_pretrained(folder)
    monkeypatch.setenv(HEAD_VARIABLE, str(folder))
    vllm.register()
    runner = prepared(vllm.Proposer(config()))
    runner.drafter.load_model(model := target())
    runner._setup_eagle3_aux_hidden_state_outputs()
    assert runner.use_aux_hidden_state_outputs == bool(head.aux_layers)  # pyright: ignore
    assert model.aux_layers == head.aux_layers
    runner.initialize_kv_cache(cache(FullAttentionSpec(block_size=BLOCK)))
    return runner


def drafted(head: Head, text: list[int]) -> list[int]:
    """Return the chain that a head drafts after a text, without an engine."""
    features = tiny.base().read(torch.tensor([text[:-1]]), head.aux_layers)
    memory, count = head.memory(1, len(text) + DEPTH), torch.tensor([len(text) - 1])
    tree = policies.chain(DEPTH).grow(
        head, Committed(features, torch.tensor([text[1:]]), count), memory
    )
    return tree.tokens[0, 1:].tolist()


def forward(
    runner: Runner,
    texts: list[list[int]],
    plan: list[tuple[int, int, int, int]],
    finished: Collection[str] = (),
) -> Any:
    """Run one forward; `plan` has (start, positions, drafts, known tokens) for each text."""
    batch, sampled, hidden, aux = runner.input_batch, [], [], []
    layers = runner.drafter.head.aux_layers
    for row, (text, (start, length, drafts, num_tokens)) in enumerate(
        zip(texts, plan, strict=True)
    ):
        batch.num_computed_tokens_cpu[row] = start
        # vLLM knows a whole prompt, whose chunks it reads before it samples
        text_length = num_tokens if num_tokens > start + length - drafts else len(text)
        batch.token_ids_cpu[row, :text_length] = text[:text_length]
        # the forward also reads rejected drafts, which are other tokens
        rejected = start + length - (num_tokens - 1) if num_tokens > start + length - drafts else 0
        fed = text[: start + length - rejected] + [0] * rejected
        features = tiny.base().read(torch.tensor([fed]), layers)
        hidden.append(features.hidden[0, start:])
        if features.aux is not None:
            aux.append(features.aux[0, start:])
        sampled.append(text[start + length - drafts : num_tokens])
    counts = {name: length for name, (_, length, *_) in zip(batch.req_ids, plan, strict=True)}
    states = torch.cat(hidden), [*torch.cat(aux).chunk(len(layers), dim=-1)] if aux else None
    drafts = runner.propose_draft_token_ids(
        SimpleNamespace(num_scheduled_tokens=counts, finished_req_ids={*finished}),
        sampled,
        *states,
        SimpleNamespace(num_draft_tokens=[drafts for _, _, drafts, _ in plan]),
    )
    # the engine writes the next states to the same memory
    for layer_states in (states[0], *(states[1] or ())):
        layer_states.fill_(9.0)
    return drafts


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_depend_on_chunks_preemption_or_batching(
    kind, prepared, tmp_path, monkeypatch
):
    head = build(kind, **KINDS[kind])
    runner = serve(prepared, head, tmp_path, monkeypatch)
    texts = [
        [5, 9, 2, 44, 8, 17, 3, 30, 21, 6, 11, 60],
        [7, 1, 33, 12, 50, 4, 28, 19, 2, 9, 40, 13],
    ]
    # a prompt of 7 tokens in two chunks; a prompt of 3 at once
    assert forward(runner, texts, [(0, 4, 0, 4), (0, 3, 0, 4)]) == [[], drafted(head, texts[1][:4])]
    # the first prompt ends; the second accepts two of three drafts
    assert forward(runner, texts, [(4, 3, 0, 8), (3, 4, 3, 7)]) == [
        drafted(head, texts[0][:8]),
        drafted(head, texts[1][:7]),
    ]
    # the first is preempted and read again; the second accepts none of three drafts
    assert forward(runner, texts, [(0, 8, 0, 9), (6, 4, 3, 8)]) == [
        drafted(head, texts[0][:9]),
        drafted(head, texts[1][:8]),
    ]


def test_prefix_cache_is_shared_between_requests(prepared, tmp_path, monkeypatch):
    head = build("hydra_heads", attention_heads=4)
    runner = serve(prepared, head, tmp_path, monkeypatch)
    text = [5, 9, 2, 44, 8, 17, 3, 30, 21, 6]
    forward(runner, [text, text], [(0, 9, 0, 10), (0, 1, 0, 1)])
    table = runner.input_batch.block_table[0].get_device_tensor(2)
    table[1, :2] = table[0, :2]
    drafts = forward(runner, [text, text], [(9, 1, 0, 10), (2 * BLOCK, 1, 0, 10)])
    assert drafts[1] == drafted(head, text)


def test_padding_is_written_to_the_null_slot(prepared, tmp_path, monkeypatch):
    # b reads its third position in a batch that is four wide because of a, and b does not own
    # its second block yet
    head = build("hydra_heads", attention_heads=4)
    runner = serve(prepared, head, tmp_path, monkeypatch)
    texts = [[5, 9, 2, 44, 8, 17, 3, 30, 21, 6, 11, 60, 13], [7, 1, 33, 12, 50]]
    forward(runner, texts, [(0, 8, 0, 9), (0, 3, 0, 4)])
    table = runner.input_batch.block_table[0].get_device_tensor(2)
    table[1, 1] = table[0, 0]
    first = BLOCK * int(table[0, 0])
    assert runner.drafter.cache is not None
    memory = runner.drafter.cache.memory
    assert isinstance(memory, HeadCache)
    remembered = memory.kv_cache[0, :, :, first : first + BLOCK]
    before = remembered.clone()
    drafts = forward(runner, texts, [(8, 4, 3, 13), (3, 1, 0, 5)])
    assert drafts == [drafted(head, text) for text in texts]
    assert before.any()
    assert torch.equal(remembered, before)


def test_register_does_nothing_without_a_head(prepared, monkeypatch):
    monkeypatch.delenv(HEAD_VARIABLE, raising=False)
    before = dict(vars(prepared))
    vllm.register()
    assert dict(vars(prepared)) == before
    with pytest.raises(ValueError, match=f"{HEAD_VARIABLE} must name a head, got None"):
        vllm.Proposer(config())


def test_request_at_the_end_of_its_context_does_not_stop_drafting(prepared, tmp_path, monkeypatch):
    runner = serve(prepared, build("redrafter"), tmp_path, monkeypatch)
    assert runner._input_fits_in_drafter(None)
    runner.drafter = None  # pyright: ignore[reportAttributeAccessIssue]
    assert not runner._input_fits_in_drafter(None)


def test_projection_has_the_logit_scale_of_the_base(prepared, tmp_path, monkeypatch):
    head = build("medusa", projection="low_rank", rank=4)
    runner = serve(prepared, head, tmp_path, monkeypatch)
    runner.drafter.config.model_config.hf_text_config.logits_scaling = 4.0
    runner.drafter.load_model(target())
    served = runner.drafter.head
    state = torch.randn(1, 32 + 4, dtype=torch.float64)
    base = tiny.base()
    head.bind(base.embedding, base.projection.scaled_weight / 4)
    torch.testing.assert_close(served.logits(state, 0), head.logits(state, 0))


def test_projection_has_the_bias_of_the_base(prepared, tmp_path, monkeypatch):
    head, bias = build("medusa", projection="shared"), torch.randn(tiny.VOCAB).double()
    runner, model = serve(prepared, head, tmp_path, monkeypatch), target()
    model[1].bias = nn.Parameter(torch.cat([bias, torch.zeros(3)]))
    runner.drafter.load_model(model)
    state = torch.randn(1, 32, dtype=torch.float64)
    served = runner.drafter.head.logits(state, 0)
    torch.testing.assert_close(served, head.logits(state, 0) + bias)


@pytest.mark.parametrize(
    ("changes", "specs", "message"),
    [
        ({"kv_transfer_config": object()}, [FullAttentionSpec(block_size=4)], "transferred"),
        ({}, [SimpleNamespace(block_size=4)], "full attention"),
    ],
)
def test_head_with_a_cache_refuses_unsupported_vllm_caches(
    changes, specs, message, prepared, tmp_path, monkeypatch
):
    runner = serve(prepared, build("hydra_heads", attention_heads=4), tmp_path, monkeypatch)
    vars(runner.drafter.config).update(changes)
    with pytest.raises(ValueError, match=message):
        runner.initialize_kv_cache(cache(*specs))


@pytest.mark.parametrize(
    ("head", "num_drafted", "message"),
    [
        (("dflash", {"attention_heads": 4, "mask_token": 1}), DEPTH, "drafts blocks"),
        (("eagle3", {"aux_layers": [0, 1, 2]}), DEPTH, "which vLLM does not return"),
        (("medusa", {}), DEPTH + 1, f"at most {DEPTH}"),
    ],
)
@pytest.mark.usefixtures("prepared")
def test_unsupported_head_is_refused(head, num_drafted, message, tmp_path, monkeypatch):
    kind, settings = head
    build(kind, **settings).save_pretrained(tmp_path)
    monkeypatch.setenv(HEAD_VARIABLE, str(tmp_path))
    vllm.register()
    speculative_config = SimpleNamespace(num_speculative_tokens=num_drafted)
    with pytest.raises(ValueError, match=message):
        vllm.Proposer(config(speculative_config=speculative_config)).load_model(
            nn.ModuleList(target())
        )


@pytest.mark.usefixtures("prepared")
def test_model_whose_states_lack_the_final_norm_is_refused(tmp_path, monkeypatch):
    build("medusa").save_pretrained(tmp_path)
    monkeypatch.setenv(HEAD_VARIABLE, str(tmp_path))
    vllm.register()
    model = target()
    model.__class__ = type("MiMoForCausalLM", (Target,), {})
    with pytest.raises(ValueError, match="before it for MiMoForCausalLM; serve another base"):
        vllm.Proposer(config()).load_model(model)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("packed", [True, False])
def test_a_base_with_a_quantised_lm_head_is_refused(packed, tmp_path, monkeypatch):
    build("medusa").save_pretrained(tmp_path)
    monkeypatch.setenv(HEAD_VARIABLE, str(tmp_path))
    vllm.register()
    model: Any = target()
    if packed:
        # GPTQ has a qweight instead
        del model[1].weight
    else:
        model[1].weight = nn.Parameter(model[1].weight.to(torch.float8_e4m3fn), False)
    with pytest.raises(ValueError, match="this base has a quantised one"):
        vllm.Proposer(config()).load_model(model)


@pytest.mark.usefixtures("prepared")
def test_base_with_other_weights_is_refused_unless_forced(tmp_path, monkeypatch):
    base = tiny.base()
    head = load.build_for_base({"kind": "mlp_speculator", "depth": DEPTH}, base)
    head.save_pretrained(tmp_path)
    monkeypatch.setenv(HEAD_VARIABLE, str(tmp_path))
    vllm.register()
    vllm.Proposer(config()).load_model(target())
    vllm.Proposer(config()).load_model(target().bfloat16())
    sibling = nn.ModuleList([Embedding(base.embedding), LMHead(base.projection.weight * 1.01)])
    with pytest.raises(ValueError, match="a head fits the weights it was trained on: those are"):
        vllm.Proposer(config()).load_model(sibling)
    monkeypatch.setenv(FORCE_VARIABLE, "true")
    vllm.Proposer(config()).load_model(sibling)


def test_names_in_exports_can_be_imported():
    module, _, proposer = PROPOSER.rpartition(".")
    assert getattr(importlib.import_module(module), proposer) is vllm.Proposer
    # the entry point of pyproject.toml
    assert importlib.import_module("specheads.export.vllm").register is vllm.register


# --- the budget ----------------------------------------------------------------------------------

SURE = Curve(probs=[0.0, 1.0], accepted=[0.9, 0.9])
UNSURE = Curve(probs=[0.0, 1.0], accepted=[0.1, 0.1])
TEXTS = [
    [5, 9, 2, 44, 8, 17, 3, 30, 21, 6, 11, 60],
    [7, 1, 33, 12, 50, 4, 28, 19, 2, 9, 40, 13],
]


def cost(fixed: float, token: float, draft: float = 0.0) -> StepCost:
    return StepCost(
        verify=ForwardCost(fixed=fixed, token=token, context=0.0),
        draft=ForwardCost(fixed=draft, token=0.0, context=0.0),
    )


def tune(
    folder: Any,
    spent: StepCost,
    curves: list[Curve],
    rates: list[float] = [0.5] * DEPTH,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Write what `specheads tune` and `specheads tune engine=vllm` measured."""
    machine = Machine.of(torch.device("cpu"), dtype)
    tuned_head = tuned.tuned(machine=machine)
    acceptance = replace(tuned_head.acceptance, per_depth=rates, curves=curves)
    measured = replace(tuned_head, acceptance=acceptance)
    (folder / FILE).write_text(dumps(measured))
    served = vllm_adapter.ServingCost(engine="vLLM", machine=machine, cost=spent, cost_error={})
    (folder / vllm_adapter.COST_FILE).write_text(dumps(served))


def budgeted(
    prepared: type[Runner],
    folder: Any,
    monkeypatch: Any,
    *measurements: Any,
    kind: str = "redrafter",
) -> tuple[Runner, Head]:
    tune(folder, *measurements)
    head = build(kind, **KINDS[kind])
    return serve(prepared, head, folder, monkeypatch), head


def test_head_does_not_run_if_a_verified_token_costs_as_much_as_a_step(
    prepared, tmp_path, monkeypatch
):
    runner, _ = budgeted(prepared, tmp_path, monkeypatch, cost(0.0, 1.0), [SURE] * DEPTH)
    assert forward(runner, TEXTS, [(0, 6, 0, 7), (0, 6, 0, 7)]) == [[], []]
    # the first step has shown that drafts do not pay
    monkeypatch.setattr(runner.drafter.head, "begin", None)
    assert forward(runner, TEXTS, [(6, 1, 0, 8), (6, 1, 0, 8)]) == [[], []]


def test_whole_chains_are_drafted_if_verification_is_free(prepared, tmp_path, monkeypatch):
    runner, head = budgeted(prepared, tmp_path, monkeypatch, cost(1.0, 0.0), [SURE] * DEPTH)
    drafts = forward(runner, TEXTS, [(0, 6, 0, 7), (0, 6, 0, 7)])
    assert drafts == [drafted(head, text[:7]) for text in TEXTS]


@pytest.mark.parametrize("first", [(0, 6, 0, 7), (0, 4, 0, 4)], ids=["drafts", "reads its prompt"])
def test_drafting_stops_below_a_token_that_is_seldom_accepted(
    first, prepared, tmp_path, monkeypatch
):
    # after the second token nothing more pays
    measurements = cost(1.0, 0.3, 0.01), [SURE, UNSURE, SURE], [0.9] * DEPTH
    runner, head = budgeted(prepared, tmp_path, monkeypatch, *measurements)
    calls = []
    extend = runner.drafter.head.extend
    monkeypatch.setattr(
        runner.drafter.head, "extend", lambda *inputs: calls.append(inputs) or extend(*inputs)
    )
    drafts = forward(runner, TEXTS, [first, (0, 6, 0, 7)])
    first_levels = [drafted(head, text[:7])[:1] for text in TEXTS]
    assert drafts == [first_levels[0] if first[1] == 6 else [], first_levels[1]]
    assert len(calls) == 1


def make_faster(runner: Runner) -> None:
    """Let drafts pay from now on."""
    assert runner.drafter.budget is not None
    runner.drafter.budget.cost = cost(1.0, 0.0)
    runner.drafter.budget._batches.clear()


def with_unread(prepared: type[Runner], folder: Any, monkeypatch: Any) -> tuple[Runner, Head]:
    """Serve both texts without drafts; the head has not read the last position of either."""
    measurements = cost(0.0, 1.0), [SURE] * DEPTH
    runner, head = budgeted(prepared, folder, monkeypatch, *measurements, kind="eagle_gru")
    forward(runner, TEXTS, [(0, 4, 0, 5), (0, 5, 0, 6)])
    forward(runner, TEXTS, [(4, 1, 0, 6), (5, 1, 0, 7)])
    assert set(runner.drafter.unread.spans) == {"a", "b"}
    return runner, head


@pytest.mark.parametrize("kind", ["hydra_heads", "eagle_gru", "eagle3", "mtp"])
def test_positions_are_read_once_a_block_is_full_while_nothing_is_drafted(
    kind, prepared, tmp_path, monkeypatch
):
    measurements = cost(0.0, 1.0), [SURE] * DEPTH
    runner, head = budgeted(prepared, tmp_path, monkeypatch, *measurements, kind=kind)
    assert forward(runner, TEXTS, [(0, 4, 0, 5), (0, 5, 0, 6)]) == [[], []]
    served, counts = runner.drafter.head, list[list[int]]()
    store_committed = served.store_committed

    def watched(committed: Committed, memory: Any) -> None:
        counts.append(committed.counts.tolist())
        store_committed(committed, memory)

    monkeypatch.setattr(served, "store_committed", watched)
    for step in range(3):
        plan = [(4 + step, 1, 0, 6 + step), (5 + step, 1, 0, 7 + step)]
        assert forward(runner, TEXTS, plan) == [[], []]
    # the eighth position of the second text fills its second block
    assert counts == [[3]]
    make_faster(runner)
    drafts = forward(runner, TEXTS, [(7, 1, 0, 9), (8, 1, 0, 10)])
    assert drafts == [drafted(head, TEXTS[0][:9]), drafted(head, TEXTS[1][:10])]
    assert not runner.drafter.unread.spans


def test_unread_positions_of_preempted_and_finished_requests_are_dropped(
    prepared, tmp_path, monkeypatch
):
    runner, head = with_unread(prepared, tmp_path, monkeypatch)
    # b left, and a new request has its row
    runner.input_batch.req_ids[1] = "c"
    new = [TEXTS[0], TEXTS[1][::-1]]
    make_faster(runner)
    drafts = forward(runner, new, [(0, 6, 0, 7), (0, 5, 0, 6)], finished=["b"])
    assert drafts == [drafted(head, new[0][:7]), drafted(head, new[1][:6])]
    assert not runner.drafter.unread.spans


def test_a_request_that_waits_for_its_turn_keeps_its_unread_positions(
    prepared, tmp_path, monkeypatch
):
    runner, head = with_unread(prepared, tmp_path, monkeypatch)
    # the engine runs only the second request, which has the second row of the block table
    batch, table = runner.input_batch, runner.input_batch.block_table[0].get_device_tensor(2)
    batch.req_ids, saved_table = ["b"], table.clone()
    table[0] = saved_table[1]
    forward(runner, TEXTS[1:], [(6, 1, 0, 8)])
    batch.req_ids = ["a", "b"]
    table[:] = saved_table
    make_faster(runner)
    drafts = forward(runner, TEXTS, [(5, 1, 0, 7), (7, 1, 0, 9)])
    assert drafts == [drafted(head, TEXTS[0][:7]), drafted(head, TEXTS[1][:9])]


def test_times_of_steps_without_prompts_are_followed(prepared, tmp_path, monkeypatch):
    measurements = cost(1.0, 0.0), [SURE] * DEPTH
    runner, _ = budgeted(prepared, tmp_path, monkeypatch, *measurements)
    budget, noted, drafting = runner.drafter.budget, [], []
    assert budget is not None
    clock = iter(range(100))
    monkeypatch.setattr(vllm.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(budget, "follow_verify", lambda *inputs: noted.append(inputs))
    monkeypatch.setattr(budget, "follow_draft", lambda *inputs: drafting.append(inputs))
    decisions = set[tuple[int, int]]()
    monkeypatch.setattr(
        budget, "should_draft_level", lambda _, *inputs: decisions.add(inputs) is None
    )
    drafts = forward(runner, TEXTS, [(0, 6, 0, 7), (0, 6, 0, 7)])
    assert noted == []
    # one accepted draft of each request, and one new token
    forward(runner, TEXTS, [(6, 1 + DEPTH, DEPTH, 9), (6, 1 + DEPTH, DEPTH, 9)])
    assert len(drafts[0]) == DEPTH
    assert noted == [([DEPTH, DEPTH], 2 * 8, 1)]
    assert drafting == [(2, DEPTH, 2 * 8, 1)]
    assert decisions == {(level, 2 * end) for level in range(1, DEPTH) for end in (6, 8)}
    # the second request reads a prompt
    forward(runner, TEXTS, [(8, 1, 0, 10), (0, 3, 0, 4)])
    assert len(noted) == len(drafting) == 1


@pytest.mark.parametrize("absent", [FILE, vllm_adapter.COST_FILE])
def test_every_request_gets_all_drafts_without_a_calibration_or_a_cost(
    absent, prepared, tmp_path, monkeypatch
):
    tune(tmp_path, cost(0.0, 1.0), [SURE] * DEPTH)
    (tmp_path / absent).unlink()
    runner = serve(prepared, build("redrafter"), tmp_path, monkeypatch)
    assert runner.drafter.budget is None
    drafts = forward(runner, TEXTS, [(0, 6, 0, 7), (0, 6, 0, 7)])
    assert [len(chain) for chain in drafts] == [DEPTH, DEPTH]


def test_cost_of_another_machine_is_not_used_and_logged(prepared, tmp_path, monkeypatch, caplog):
    tune(tmp_path, cost(0.0, 1.0), [SURE] * DEPTH, dtype=torch.bfloat16)
    runner = serve(prepared, build("redrafter"), tmp_path, monkeypatch)
    assert runner.drafter.budget is None
    assert "measure again with specheads tune engine=vllm" in caplog.text
