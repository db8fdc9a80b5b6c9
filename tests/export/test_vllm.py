"""Real vLLM serves tiny_code with each kind of head: `make vllm`, in its own environment.

Each engine runs in its own process, one at a time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.features import Committed
from specheads.core.files import dumps
from specheads.decoding.calibration import Curve
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import FILE, Machine
from specheads.export.layouts.vllm import HEAD_VARIABLE, PLUGIN, PROPOSER
from specheads.export.vllm_adapter import COST_FILE, ServingCost
from specheads.export.write import export_head
from specheads.heads.load import build_for_base
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import guess_ranks, replay
from tests import tiny, tuned
from tests.decoding.test_noise import FAR, chi_square
from tests.export.trained import (
    BASE,
    DEPTH,
    DFLASH,
    DSPARK,
    LLAMA3_ROPE,
    NEW_TOKENS,
    ORIGINAL,
    ROOT,
    base,
    check_texts,
    continuations,
    prompts,
    trained,
)
from tests.servers import VLLM

pytestmark = pytest.mark.vllm

SETTINGS: dict[str, dict[str, Any]] = {
    # vLLM 0.32 cannot load Medusa heads with a draft vocabulary
    "medusa": {"num_layers": 1},
    "hydra_heads": {"num_layers": 1, "draft_tokens": 512},
    "mlp_speculator": {"draft_tokens": 512},
    "mtp": {"draft_tokens": 512},
    "redrafter": {"num_layers": 1, "draft_tokens": 512},
    "eagle_gru": {"draft_tokens": 512},
    "eagle3": {"draft_tokens": 512},
    "eagle3.1": {
        "kind": "eagle3", "num_layers": 2, "fc_norm": True, "norm_output": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}, "draft_tokens": 512,
    },
    "p_eagle": {
        "kind": "eagle3", "parallel": True, "mask_token": 1, "num_layers": 2,
        "norm_before_fc": True, "own_embedding": True, "rope_scaling": LLAMA3_ROPE,
    },
    "dflash": DFLASH,
    "dspark": DSPARK,
}  # fmt: skip
NATIVE = ("eagle3", "eagle3.1", "p_eagle")
STEPS = dict.fromkeys(("eagle3", "eagle_gru", "eagle3.1"), 60) | {"mtp": 100}
STEPS |= dict.fromkeys(("p_eagle", "dflash", "dspark"), 150)
"""Training steps of heads that learn slowly."""
QUIET = VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

# a serving environment may lack these packages
ABSENT = ("accelerate", "datasets", "hydra", "matplotlib", "omegaconf", "peft", "wandb")
START = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
from tests.export.vllm_engine import main
main()
"""


@cache
def head(kind: str) -> Head:
    """Return a head that was trained on half of the texts."""
    return trained({"kind": kind, **SETTINGS.get(kind, {})}, STEPS.get(kind, 15))


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Callable[[str, str], Path]:
    """Return a function that exports a trained head for an engine once."""

    @cache
    def exported(kind: str, engine: str) -> Path:
        out = tmp_path_factory.mktemp("exports") / f"{kind}-{engine}"
        export_head(head(kind), base(), engine, out, check_texts())
        return out

    return exported


def serve(
    engine: dict[str, Any],
    environment: dict[str, str] | None = None,
    *,
    texts: list[list[int]] | None = None,
    sampling: dict[str, Any] | None = None,
    repair: bool = False,
) -> dict[str, Any]:
    """Run one engine and return its answer: see tests/export/vllm_engine.py."""
    job = {
        "engine": {"model": str(BASE), "dtype": "float32", "max_model_len": 256} | engine,
        "prompts": texts or list(prompts()),
        "sampling": {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        | (sampling or {}),
        "repair": repair,
    }
    process = subprocess.run(
        [sys.executable, "-c", START],
        input=json.dumps(job),
        cwd=ROOT,
        env=os.environ | QUIET | (environment or {}),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return json.loads(process.stdout)


def plugged(folder: Path, recorded: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engine arguments and the environment that use an exported head."""
    proposer = "tests.export.vllm_engine.Recorder" if recorded else PROPOSER
    settings = {"method": "custom_class", "model": proposer, "num_speculative_tokens": DEPTH}
    return {"speculative_config": settings, "max_num_seqs": 4}, {HEAD_VARIABLE: str(folder)}


@cache
def alone() -> list[list[int]]:
    """Return the text of vLLM without speculation."""
    return serve({"max_num_seqs": 4})["tokens"]


def engine_counts(kind: str, indices: Sequence[int] = range(6)) -> dict[str, Any]:
    """Return the counters of our own replay of a chain, as vLLM counts them.

    vLLM truncates a text after counting, so it also counts drafts accepted beyond the limit. So
    the replayed text ends with the tokens of the last forward.
    """
    counts = []
    for index in indices:
        ranks = guess_ranks(base(), head(kind), prompts()[index], continuations()[index], width=1)
        anchor = 0
        while anchor + 1 < NEW_TOKENS:
            anchor += int((ranks[anchor] == 0).cumprod(0).sum()) + 1
        counts.append(replay(_cut(ranks, anchor), policies.chain(DEPTH)))
    total = DepthCounts.total(counts, DEPTH)
    return {
        "spec_decode_num_drafts": total.forwards,
        "spec_decode_num_draft_tokens": total.forwards * DEPTH,
        "spec_decode_num_accepted_tokens": sum(total.accepted),
        "spec_decode_num_accepted_tokens_per_pos": total.accepted,
    }


def _cut(ranks: torch.Tensor, num_roots: int) -> torch.Tensor:
    """Truncate the ranks to a text with this number of roots."""
    is_within = torch.arange(num_roots)[:, None] + torch.arange(ranks.shape[1]) < num_roots
    return ranks[:num_roots].where(is_within, -1)


def check(answer: dict[str, Any], kind: str, indices: Sequence[int] = range(6)) -> None:
    """Require the text of vLLM without speculation and the counters of our replay."""
    assert answer["tokens"] == [alone()[index] for index in indices]
    counts = engine_counts(kind, indices)
    # some of all texts' drafts are accepted at every depth, and some are rejected
    per_depth = counts["spec_decode_num_accepted_tokens_per_pos"]
    assert per_depth[-1] > 0 or len(indices) < len(prompts())
    assert per_depth[0] < counts["spec_decode_num_drafts"] or len(indices) < len(prompts())
    assert {name: answer["counters"][name] for name in counts} == counts


def test_vllm_without_a_head_generates_the_text_of_the_base():
    assert alone() == [text[:NEW_TOKENS] for text in continuations()]


@pytest.mark.parametrize("kind", PLUGIN)
def test_plugin_is_lossless_and_counters_equal_the_replay(kind, export):
    engine, environment = plugged(export(kind, "vllm"))
    check(serve(engine, environment), kind)


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle"])
def test_plugin_serves_a_native_kind_from_its_own_folder(kind, tmp_path):
    head(kind).save_pretrained(tmp_path)
    engine, environment = plugged(tmp_path)
    check(serve(engine, environment), kind)


def budgeted(folder: Path, out: Path, token: float) -> Path:
    """Return a copy of an export with a calibration and with the cost of a verified token."""
    shutil.copytree(folder, out)
    machine = Machine.of(torch.device("cpu"), torch.float32)
    curve = Curve(probs=[0.0, 0.5, 1.0], accepted=[0.02, 0.6, 0.98])
    measured = tuned.tuned(machine=machine)
    rates = replace(measured.acceptance, per_depth=[0.5] * DEPTH, curves=[curve] * DEPTH)
    (out / FILE).write_text(dumps(replace(measured, acceptance=rates)))
    spent = StepCost(
        verify=ForwardCost(fixed=1.0, token=token, context=0.0),
        draft=ForwardCost(fixed=0.01, token=0.0, context=0.0),
    )
    served = ServingCost(engine="vLLM", machine=machine, cost=spent, cost_error={})
    (out / COST_FILE).write_text(dumps(served))
    return out


@pytest.mark.parametrize("kind", ["redrafter", "hydra_heads"])
def test_budget_cuts_drafts_and_keeps_the_text(kind, export, tmp_path):
    engine, environment = plugged(
        budgeted(export(kind, "vllm"), tmp_path / "budget", 0.2), recorded=True
    )
    answer = serve(engine, environment)
    assert answer["tokens"] == alone()
    lengths = {len(draft) for _, draft in answer["drafts"]}
    assert len(lengths) > 1
    for text, draft in answer["drafts"]:
        assert draft == drafted(kind, text)[: len(draft)]
    counters, full_counts = answer["counters"], engine_counts(kind)
    accepted, offered = "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"
    assert counters[offered] < full_counts[offered]
    # the drafts that are left out are those that are seldom right
    assert counters[accepted] / counters[offered] > full_counts[accepted] / full_counts[offered]


def test_budget_only_tries_drafts_if_each_verified_token_costs_a_step(export, tmp_path):
    folder = budgeted(export("hydra_heads", "vllm"), tmp_path / "budget", 1e6)
    engine, environment = plugged(folder)
    answer = serve(engine, environment)
    assert answer["tokens"] == alone()
    offered, full_counts = "spec_decode_num_draft_tokens", engine_counts("hydra_heads")
    assert 0 < answer["counters"][offered] < 0.1 * full_counts[offered]


def test_budget_stops_to_draft_if_drafts_take_longer_than_its_costs(export, tmp_path):
    # by its costs all drafts pay
    folder, texts = (
        budgeted(export("redrafter", "vllm"), tmp_path / "budget", 0.0),
        [*prompts()] * 3,
    )
    engine, environment = plugged(folder)
    engine["speculative_config"]["model"] = "tests.export.vllm_engine.SlowProposer"
    answer = serve(engine, environment, texts=texts)
    assert answer["tokens"] == alone() * 3
    offered = "spec_decode_num_draft_tokens"
    full_counts = engine_counts("redrafter")
    assert 0 < answer["counters"][offered] < 0.3 * 3 * full_counts[offered]


def test_sampled_texts_have_the_distribution_of_the_base_with_ragged_drafts(export, tmp_path):
    # the third token follows a draft, or none, or a rejected one
    prompt = prompts()[0]
    folder = budgeted(export("redrafter", "vllm"), tmp_path / "budget", 0.05)
    engine, environment = plugged(folder, recorded=True)
    answer = serve(
        engine,
        environment,
        texts=[prompt] * 1500,
        sampling={"temperature": 0.7, "max_tokens": 3},
        repair=True,
    )
    assert len({len(draft) for _, draft in answer["drafts"]}) > 1
    assert answer["counters"]["spec_decode_num_accepted_tokens"] > 0
    texts = [tuple(tokens) for tokens in answer["tokens"]]
    laws = {(): 1.0}
    for _ in range(3):
        longer = dict[tuple[int, ...], float]()
        for prefix, prob in laws.items():
            hidden = base().read(torch.tensor([[*prompt, *prefix]])).hidden[0, -1]
            law = (base().projection(hidden).double() / 0.7).softmax(-1) * prob
            # others are expected less than five times, and count as one
            often = (law > 5 / len(texts)).nonzero()[:, 0].tolist()
            longer |= {(*prefix, token): float(law[token]) for token in often}
        laws = longer
    counts = torch.tensor([float(texts.count(text)) for text in laws])
    expected = torch.tensor([*laws.values()]) * len(texts)
    remainder = len(texts) - torch.stack([counts.sum(), expected.sum()])
    assert len(laws) > 3
    assert (
        chi_square(torch.cat([counts, remainder[:1]]), torch.cat([expected, remainder[1:]])) < FAR
    )


def test_plugin_is_loaded_in_processes_that_vllm_starts(export):
    engine, environment = plugged(export("medusa", "vllm"))
    check(serve(engine, environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}), "medusa")


@pytest.mark.parametrize(
    ("kind", "layout"), [*((kind, "vllm") for kind in NATIVE), ("medusa", "tgi")]
)
def test_native_heads_are_lossless_and_counters_equal_the_replay(kind, layout, export):
    settings = {
        "method": "medusa" if kind == "medusa" else "eagle3",
        "model": str(export(kind, layout)),
        "num_speculative_tokens": DEPTH,
        "parallel_drafting": kind == "p_eagle",
    }
    check(serve({"speculative_config": settings}), kind)


@pytest.mark.parametrize("kind", [*NATIVE, "dflash"])
def test_folder_in_speculators_format_is_served_by_its_path(kind, export):
    folder = export(kind, "speculators")
    check(serve({"model": str(folder)}), kind)


MIMO = {
    "hidden_first": True, "attention_bias": True, "attention_heads": 4, "key_value_heads": 2,
    "head_dim": 64, "inner_dim": 688,
}  # fmt: skip


def mimo(folder: Path) -> FrozenBase:
    """Save tiny_code as a MiMo with a random module, and load it; the layers get zero biases."""
    shutil.copytree(BASE, folder)
    config = json.loads((BASE / "config.json").read_text())
    for name in ("attention_bias", "mlp_bias", "pretraining_tp", "head_dim"):
        del config[name]
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(BASE / "model.safetensors")
    for name, value in [*tensors.items()]:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = torch.zeros(len(value))
    module = build_for_base({"kind": "mtp", "depth": 1, **MIMO}, base())
    tensors |= tiny.module(module, "model.mtp_layers.0.", column=1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return FrozenBase.load(folder, dtype="float32", device="cpu")


def test_copy_of_a_base_loads_as_the_base_and_drafts_with_the_trained_module(tmp_path):
    base_folder, copy = tmp_path / "mimo", tmp_path / "copy"
    head = trained({"kind": "mtp", "depth": 1, **MIMO}, 100)
    head.base_fingerprint = ""
    _, parity = export_head(head, mimo(base_folder), "base", copy, check_texts())
    rates = []
    for folder in (base_folder, copy):
        answer = serve(
            {
                "model": str(folder),
                "max_num_seqs": 4,
                "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
            }
        )
        assert answer["tokens"] == [text[:NEW_TOKENS] for text in continuations()]
        drafts, accepted = (
            answer["counters"][f"spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")
        )
        rates.append(accepted / drafts)
    # vLLM gives MiMo's module the states before the final norm, so the counts are not equal
    first = parity.per_depth[0]
    assert rates[0] < 0.05
    assert rates[1] == pytest.approx(first.accepted / first.offered, abs=0.1)


def test_serving_benchmark_counts_equal_its_replay(tmp_path):
    tokenizer: Any = base().tokenizer
    head("eagle3").save_pretrained(tmp_path / "head")
    rows = [json.dumps({"prompt": tokenizer.decode(prompt)}) for prompt in prompts()[:4]]
    (tmp_path / "stdlib.jsonl").write_text("\n".join(rows))
    command = [
        *(sys.executable, str(ROOT / "scripts" / "bench_serve.py")),
        *("--limit", "4", "--batch", "1,4", "--depths", "1,3"),
        *("--dtype", "float32", "--eager", "--threads", "1"),
        *("--base", str(BASE), "--head", str(tmp_path / "head")),
        *("--sets", f"stdlib={tmp_path / 'stdlib.jsonl'}", "--new-tokens", str(NEW_TOKENS)),
        *("--vllm-python", sys.executable, "--out", str(tmp_path / "serve.json")),
    ]
    environment = os.environ | QUIET | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-5000:]
    served = json.loads((tmp_path / "serve.json").read_text())
    settings = [(row["batch"], row["depth"]) for row in served["rows"]]
    assert settings == [(1, 1), (1, 3), (4, 1), (4, 3)]
    for row in served["rows"]:
        assert row["identical"] == row["count"] == 4
        assert row["served"]["forwards"] == row["replay"]["forwards"]
        assert row["served"]["tokens_per_forward"] == row["replay"]["tokens_per_forward"] > 1
        assert row["speedup"]["interval"][0] <= row["speedup"]["ratio"]


def drafted(kind: str, text: list[int]) -> list[int]:
    """Return the chain that our own head drafts after a text."""
    features = base().read(torch.tensor([text[:-1]]))
    count = torch.tensor([len(text) - 1])
    memory = head(kind).memory(1, len(text) + DEPTH)
    tree = policies.chain(DEPTH).grow(
        head(kind), Committed(features, torch.tensor([text[1:]]), count), memory
    )
    return tree.tokens[0, 1:].tolist()


@pytest.mark.parametrize("kind", ["hydra_heads", "mlp_speculator"])
def test_drafts_do_not_depend_on_chunks_shared_prefixes_or_preemption(kind, export):
    # chunks of at most 24 positions, and 9 blocks of 32; each text needs 3 blocks
    engine, environment = plugged(export(kind, "vllm"), recorded=True)
    engine |= {"max_num_batched_tokens": 24, "block_size": 32, "num_gpu_blocks_override": 9}
    answer = serve(engine, environment, texts=list(prompts()) * 2)
    assert answer["tokens"] == alone() * 2
    assert answer["counters"]["num_preemptions"] > 0
    assert answer["counters"]["prefix_cache_hits"] > 0
    assert len(answer["drafts"]) > len(prompts())
    for text, draft in answer["drafts"]:
        assert draft == drafted(kind, text)


def decision(index: int) -> float:
    """Return the smallest difference between the base's two best logits."""
    first = len(prompts()[index]) - 1
    text = torch.tensor([prompts()[index] + continuations()[index]])
    logits = base().projection(base().read(text).hidden[0, first : first + NEW_TOKENS])
    best, second = logits.topk(2).values.T
    return (best - second).min().item()


def test_sampling_at_low_temperature_accepts_as_greedy(export):
    # at vLLM's lowest temperature, 0.01, this text is sampled with probability 1 - 1e-9; without
    # the repair vLLM samples wrongly on a CPU (docs/vllm.md)
    index = max(range(len(prompts())), key=decision)
    assert decision(index) > 0.2
    engine, environment = plugged(export("redrafter", "vllm"))
    answer = serve(
        engine,
        environment,
        texts=[prompts()[index]] * 3,
        sampling={"temperature": 0.01, "seed": 1},
        repair=True,
    )
    check(answer, "redrafter", [index] * 3)
