"""Exports: every layout drafts as the head does, and the gate refuses a wrong tensor."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import to_json
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.export.layouts import engine_module, engines, find_layout, objection
from specheads.export.layouts._shared import Folder
from specheads.export.layouts.vllm import PLUGIN
from specheads.export.write import (
    RECORD,
    CheckText,
    LevelDraft,
    acceptance_profile,
    export_head,
    generate_check_texts,
    in_float64,
    largest_difference,
    level_drafts,
    load_export,
    read_features,
    scale_positions,
)
from specheads.heads.load import build_for_base, copy_head
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import guess_ranks, replay
from tests import recurrent, tiny
from tests import results as tests_results
from tests.oracles import ORACLES, eagle3, medusa
from tests.oracles.shared import DraftOracle, view_base
from tests.slow import slow_except
from tests.tuned import tree
from tests.tuned import tuned as made_up

OUT = Path("/serve/head")
OTHERS = [engine for engine in engines() if engine != "base"]
"""All but the copy of a base: see test_transformers.py."""
PAIRS = [(kind, engine) for engine in OTHERS for kind in sorted(engine_module(engine).LAYOUTS)]
FAST = [("medusa", "tgi"), ("mtp", "vllm"), ("eagle3", "speculators"), ("dspark", "sglang")]
"""A layout of each family: the default run changes the tensors of its first variant."""
ORIGINAL = "original_max_position_embeddings"
STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 8},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        ORIGINAL: 16,
    },
}  # fmt: skip
GROUPED = {"attention_heads": 4, "key_value_heads": 2}
VARIANTS = {
    "medusa": [{}, {"num_layers": 2}, {"projection": "shared"}, {"projection": "low_rank"}],
    "mlp_speculator": [
        {"aux_layers": [1, 5]}, {"inner_dim": 20, "scale_input": False},
        {"tie_weights": False}, {"state": "gated"},
    ],
    "hydra_heads": [{"num_layers": 2}, {"prefix": False, "aux_layers": [6]}],
    "eagle_gru": [GROUPED, {"sliding_window": 4, "attention_sink": True}],
    "redrafter": [{"aux_layers": [0, 3]}, {"rnn": False}, {"exit_dim": 24}],
    "mtp": [
        {**GROUPED, "qk_norm": True, "head_dim": 4, "aux_layers": [2]},
        {"hidden_first": True, "attention_bias": True, "rope_scaling": STRETCHED["yarn"]},
    ],
    "dflash": [
        {**GROUPED, "num_layers": 2},
        {"sample_from_anchor": True, "num_layers": 1, "mask_token": 7},
        {"num_layers": 1, "attention_sink": True},
        {
            "num_layers": 1, "sliding_window": 6, "window_counts_slots": True, "causal": True,
            "attention_sink": True,
        },
        {"num_layers": 3, "sliding_window": 6, "window_counts_slots": True, "full_layers": [1]},
    ],
    "dflash2": [
        {**GROUPED, "num_layers": 1, "conv_kernel_size": 3, "selector_rank": 5},
        {
            "num_layers": 2, "sliding_window": 6, "window_counts_slots": True, "causal": True,
            "full_layers": [0], "selector_top_k": 4,
        },
        {"num_layers": 1, "attention_sink": True},
    ],
    "domino": [
        {**GROUPED, "num_layers": 1, "gru_hidden_dim": 6, "emb_dim": 5},
        {"num_layers": 2, "gru_hidden_dim": 6, "mask_token": 7, "uncorrected_loss": 0.0},
    ],
    "dspark": [
        {**GROUPED, "num_layers": 1, "markov_rank": 5},
        {"sample_from_anchor": False, "num_layers": 1, "mask_token": 7, "markov_rank": 5},
        {"num_layers": 1, "markov_rank": 5, "attention_sink": True},
    ],
    "eagle3": [
        GROUPED,
        {"norm_before_residual": True},
        {"num_layers": 2, "fc_norm": True, "norm_output": True, "own_embedding": True},
        {"norm_before_fc": True, "rope_scaling": STRETCHED["llama3"]},
        {"rope_scaling": STRETCHED["yarn"], "aux_layers": [0, 3, 5], "own_embedding": True},
        {"parallel": True, "num_layers": 2, "mask_token": 5, "own_embedding": True},
        {"parallel": True, "fc_norm": True, "rope_scaling": STRETCHED["linear"]},
    ],
}  # fmt: skip
REDUCED = {kind: {"draft_tokens": 20} for kind in VARIANTS}


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    """Return a base with seven layers, the fewest for which all engines have the same defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = tiny.config("llama", num_hidden_layers=7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(7.0)
    return FrozenBase(model, name="tiny/base")


@pytest.fixture(scope="module")
def texts(base: FrozenBase) -> list[CheckText]:
    prompts = tiny.prompts()
    return list(zip(prompts, generate(base, None, prompts, max_new_tokens=24).tokens, strict=True))


def make(kind: str, base: FrozenBase, depth: int = 3, **settings) -> Head:
    """Return a head with random values in every tensor, so that each tensor matters."""
    torch.manual_seed(1)
    counts = torch.randint(1, 100, (base.vocab_size,), generator=torch.manual_seed(2))
    settings |= {"kind": kind, "depth": depth}
    head = build_for_base(settings, base, counts if "draft_tokens" in settings else None).eval()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def variants(kind: str, engine: str, base: FrozenBase, depth: int = 3) -> Iterator[Head]:
    """Yield every variant of a head that an engine can serve."""
    for settings in [*VARIANTS[kind], REDUCED[kind]]:
        head = make(kind, base, depth, **settings)
        if not objection(head, base, engine):
            yield head


def oracles_of(kind: str, engine: str) -> list[DraftOracle]:
    """Return the readers of a folder: vLLM 0.32 reads TGI's Medusa folder, too."""
    if engine == "vllm" and kind in PLUGIN:
        return []
    is_medusa_on_tgi = (kind, engine) == ("medusa", "tgi")
    return [ORACLES[kind, engine], *([medusa.vllm_0_32] if is_medusa_on_tgi else [])]


def drafts_of_head(head: Head, base: FrozenBase, texts: list[CheckText]) -> list[list[LevelDraft]]:
    """Return the drafts of a head for each text, in float64."""
    bound = in_float64(copy_head(head), base)
    return [level_drafts(bound, features) for features in read_features(head, base, texts)]


def compare(
    expected: list[list[LevelDraft]],
    folder: Path,
    engine: str,
    head: Head,
    base: FrozenBase,
    texts: list[CheckText],
) -> float:
    """Return the largest difference to the drafts that an engine makes from a folder."""
    views = [view_base(base, text) for text in texts]
    differences = [
        largest_difference(
            (drafts, list(oracle(folder, view, head.depth)))
            for drafts, view in zip(expected, views, strict=True)
        )
        for oracle in oracles_of(head.kind, engine)
    ]
    return max(differences, default=0.0)


@pytest.mark.parametrize(
    ("kind", "engine", "limit"),
    slow_except(
        [(*pair, 1) for pair in PAIRS], [(*pair, limit) for pair in PAIRS for limit in (1, None)]
    ),
)
def test_export_drafts_as_the_head_does_here_and_by_the_oracle(
    kind, engine, limit, base, texts, tmp_path
):
    assert {*PAIRS} == {*ORACLES} | {(kind, "vllm") for kind in PLUGIN}
    heads = list(islice(variants(kind, engine, base), limit))
    assert heads
    for number, head in enumerate(heads):
        out = tmp_path / str(number)
        lines, parity = export_head(head, base, engine, out, texts)
        chain = policies.chain(head.depth)
        walked = [replay(guess_ranks(base, head, *text, width=1), chain) for text in texts]
        assert parity.per_depth == DepthCounts.total(walked, head.depth).per_depth()
        assert parity.largest_difference < 1e-5
        expected = drafts_of_head(head, base, texts)
        assert compare(expected, out, engine, head, base, texts) < 1e-5
        assert any(str(out) in line for line in lines)
        record = json.loads((out / RECORD).read_text())
        assert record["parity"]["per_depth"] == to_json(parity.per_depth)
        assert record["base"]["name"] == "tiny/base"


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_scaled_positions_of_the_base_are_written_for_a_head_without(kind, texts, tmp_path):
    parameters = STRETCHED["yarn"] | {"rope_theta": 10_000.0}
    scaled_base = tiny.own_base(
        "llama", dtype=torch.float32, num_hidden_layers=7, rope_parameters=parameters
    )
    head = make(kind, scaled_base)
    head.tuned = made_up()
    scaled = scale_positions(head, scaled_base)
    # measured at other positions
    assert acceptance_profile(scaled, None) == {}
    engine, out = "vllm", tmp_path / "out"
    _, parity = export_head(scaled, scaled_base, engine, out, texts)
    assert parity.largest_difference < 1e-5
    written = json.loads((out / "config.json").read_text())["rope_scaling"]
    assert written == STRETCHED["yarn"]
    assert head.config.rope_scaling == {}
    plain, stretched = (drafts_of_head(each, scaled_base, texts) for each in (head, scaled))
    assert not torch.equal(plain[0][0].logits, stretched[0][0].logits)
    if kind == "eagle3":
        assert compare(stretched, out, engine, scaled, scaled_base, texts) < 1e-5


def test_scaled_positions_are_refused_where_they_have_no_meaning(base):
    for kind in ("eagle3", "medusa"):
        with pytest.raises(InputError, match="rope_scaling=base needs a base that scales"):
            scale_positions(make(kind, base), base)


def test_acceptance_profile_lies_in_the_export(base, texts, tmp_path):
    head = make("medusa", base)
    assert acceptance_profile(head, None) == {}
    head.tuned = made_up()
    assert acceptance_profile(head, None)["rates"] == head.tuned.acceptance.per_depth
    rates = [{"rate": 0.5, "interval": [0.4, 0.6]}, {"rate": 0.25, "interval": [0.1, 0.4]}]
    results = tests_results.bare(
        offline={
            "tokens_per_forward": 1.6, "interval": [1.5, 1.7], "per_depth": [],
            "top_k_accuracy": [], "forwards": 3, "replayed": "chain",
            "conditional_acceptance": rates,
        }
    )  # fmt: skip
    profile = acceptance_profile(head, results)
    export_head(head, base, "vllm", tmp_path / "out", texts, profile)
    record = json.loads((tmp_path / "out" / RECORD).read_text())["acceptance"]
    assert record == json.loads(json.dumps(profile))
    assert (record["measured_by"], record["rates"]) == ("specheads evaluate", [0.5, 0.25])
    assert record["prompts"]["count"] == results.prompts.count
    assert record["settings"]["temperature"] == results.settings.temperature


def mutations(value: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    yield "deleted", None
    yield "renamed", value
    yield "zeroed", torch.zeros_like(value)
    if value.ndim > 1:
        yield "transposed", value.mT


OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "t2d")
"""Tensors that `load_head` does not need and engines do, so that only the oracle misses them."""


@pytest.mark.parametrize(
    ("kind", "engine", "limit"),
    slow_except(
        [(*pair, 1) for pair in FAST],
        [*((*pair, 1) for pair in FAST), *((*pair, None) for pair in PAIRS)],
    ),
)
def test_gate_refuses_a_mutation_of_any_tensor(kind, engine, limit, base, texts, tmp_path):
    accepted, text = [], texts[:1]
    for number, head in enumerate(islice(variants(kind, engine, base, depth=2), limit)):
        folder = tmp_path / str(number)
        export_head(head, base, engine, folder, text)
        expected = drafts_of_head(head, base, text)
        (file,) = folder.glob("*.safetensors")
        weights = load_file(file)
        for name, value in weights.items():
            for mutation, changed in mutations(value):
                mutated = {
                    other_name: weights[other_name] for other_name in weights if other_name != name
                }
                if changed is not None:
                    mutated[f"{name}_" if mutation == "renamed" else name] = changed.contiguous()
                save_file(mutated, file)
                try:
                    if mutation != "deleted" or name not in OPTIONAL or kind in PLUGIN:
                        loaded = load_export(folder, head, base)
                        pairs = zip(expected, drafts_of_head(loaded, base, text), strict=True)
                        largest_difference(pairs)
                    compare(expected, folder, engine, head, base, text)
                except ValueError:
                    continue
                accepted.append((head.config, name, mutation))
    assert accepted == []


def test_gate_refuses_a_wrong_writer_and_leaves_no_folder(base, texts, tmp_path, monkeypatch):
    layouts = engine_module("vllm").LAYOUTS
    right = layouts["medusa"].make_folder

    def write(head: Head, base: FrozenBase, out: Path) -> Folder:
        """Scale the logits of depth 1, which changes no draft."""
        folder = right(head, base, out)
        folder.tensors["head.1.weight"] = folder.tensors["head.1.weight"] * 0.99
        return folder

    monkeypatch.setitem(layouts, "medusa", replace(layouts["medusa"], make_folder=write))
    rule = r"logits at depth 1 are 1.0e-02 of .* rounding explains 1.0e-04; nothing was written"
    with pytest.raises(ValueError, match=rule):
        export_head(make("medusa", base), base, "vllm", tmp_path / "out", texts)
    assert list(tmp_path.iterdir()) == []


# settings that engines read differently


BLOCKS = {"target_layer_ids": [0, 1, 3, 4, 5], "mask_token_id": 60}


def edit(folder: Path, **changes) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    settings = {name: value for name, value in config.items() if value is not ...}
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("kind", "engine", "settings", "changes"),
    [
        # vLLM 0.32 would drop the biases, and TGI would serve without a head
        ("medusa", "tgi", {}, {"medusa_fc_bias": ...}),
        ("mlp_speculator", "tgi", {}, {"n_predict": 4}),
        # ids in the wrong convention, and a default that is True in one format only
        ("eagle3", "vllm", {}, {eagle3.IDS: [1, 2, 3]}),
        ("eagle3", "sglang", {}, {"eagle_config": {eagle3.IDS: [2, 3, 4]}}),
        ("eagle3", "speculators", {}, {"norm_before_residual": ...}),
        ("dflash", "speculators", {}, {"sliding_window_non_causal": False}),
        # SGLang's ids are one lower, and its default block size is 16
        ("dflash", "sglang", {}, {"dflash_config": BLOCKS | {"target_layer_ids": [0, 1, 2, 3, 4]}}),
        ("dflash", "sglang", {}, {"dflash_config": BLOCKS | {"block_size": 3}}),
        ("dflash", "transformers", {}, {"layer_types": ["sliding_attention"] * 5}),
        ("dspark", "sglang", {"sample_from_anchor": False}, {"sample_from_anchor": ...}),
        ("dflash", "llama_cpp", {}, {"architectures": ["DFlashDraftModel"]}),
        ("dspark", "llama_cpp", {}, {"markov_head_type": "gated"}),
    ],
)
def test_oracle_refuses_settings_that_an_engine_would_read_differently(
    kind, engine, settings, changes, base, texts, tmp_path
):
    head, text = make(kind, base, **settings), texts[1:2]
    export_head(head, base, engine, tmp_path / "out", text)
    edit(tmp_path / "out", **changes)
    expected = drafts_of_head(head, base, text)
    with pytest.raises((ValueError, KeyError)):
        compare(expected, tmp_path / "out", engine, head, base, text)


YARN = STRETCHED["yarn"] | {"truncate": False, "mscale": 1.0}
UNSUPPORTED = [
    ("redrafter", "sglang", {}, "does not load this kind; engines that can: vllm$"),
    ("medusa", "tgi", {"draft_tokens": 20}, "draft_tokens=20; engines that can: vllm$"),
    ("mlp_speculator", "tgi", {"tie_weights": False}, "tie_weights=False; .*: vllm$"),
    ("mlp_speculator", "tgi", {"aux_layers": []}, r"hold aux_layers=\[.*; engines that can: vllm$"),
    ("eagle3", "sglang", {"aux_layers": [0, 3, 5]}, "5]; .*: llama_cpp, speculators, vllm$"),
    ("eagle3", "sglang", {"num_layers": 2}, "hold num_layers=2; .*: speculators, vllm$"),
    ("eagle3", "llama_cpp", {"aux_layers": [3, 5]}, r"reads 3 layers, .* \[3, 5\]; .*: spec"),
    ("eagle3", "llama_cpp", {"rope_scaling": YARN}, "read mscale, truncate .*: speculators, vllm$"),
    ("eagle3", "tensorrt_llm", {"fc_norm": True}, "hold fc_norm=True"),
    ("eagle3", "tensorrt_llm", {"sliding_window": 64}, "window=64; .*: speculators, vllm$"),
    ("eagle3", "speculators", {"parallel": True, "fc_norm": True}, "fc_norm of a .*: vllm$"),
    ("eagle3", "vllm", {"aux_layers": [2, 3, 7]}, "streams after layers 0 to 6.*: none$"),
    ("eagle3", "vllm", {"attention_sink": True}, "hold attention_sink=True; .* can: none$"),
    ("dspark", "speculators", {"sliding_window": 64}, "window causal, those of .*: none$"),
    ("dflash", "vllm", {"sliding_window": 64}, "its window counts slots, .*: speculators$"),
    ("dflash", "sglang", {"attention_sink": True}, "attention_sink=True; .*: speculators, vllm$"),
    ("dflash", "sglang", {"draft_tokens": 20}, "draft_tokens=20; .*: llama_cpp, speculators$"),
    ("dflash", "sglang", {"sample_from_anchor": True}, "sample_from_anchor=True; .*: llama_cpp$"),
    ("dflash", "transformers", {"aux_layers": [0, 3]}, "streams after layers 1 to 6, head.aux"),
    ("mtp", "base", {}, "its base cannot be copied: .*; engines that can: vllm$"),
]


@pytest.mark.parametrize(("kind", "engine", "settings", "message"), UNSUPPORTED)
def test_unsupported_head_is_refused_with_engines_that_support_it(
    kind, engine, settings, message, base, texts, tmp_path
):
    head = make(kind, base, **settings)
    with pytest.raises(ValueError, match=message):
        export_head(head, base, engine, tmp_path / "out", texts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp", "speculators", "transformers"])
def test_a_block_head_is_refused_for_a_base_with_a_bias_of_its_lm_head(engine):
    base = tiny.biased()
    head = build_for_base({"kind": "dflash", "attention_heads": 4, "aux_layers": [1, 2]}, base)
    with pytest.raises(ValueError, match=r"lm_head .* without its bias; engines that can: none$"):
        find_layout(head, base, engine)


def test_gemma_3_is_refused_for_eagle3_in_sglang():
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    base = tiny.own_base("gemma3", **layers)
    head = make("eagle3", base, aux_layers=[1, 2, 3])
    with pytest.raises(ValueError, match=r"without their residual stream; .*: llama_cpp, .*vllm$"):
        find_layout(head, base, "sglang")


@pytest.mark.parametrize("engine", ["sglang", "llama_cpp", "speculators"])
def test_dspark_is_refused_for_a_base_that_scales_its_logits(engine):
    base = tiny.base("granite")
    head = make("dspark", base, num_layers=1, markov_rank=5)
    with pytest.raises(ValueError, match="logits that the engine does not scale"):
        find_layout(head, base, engine)
    # the logits of other blocks keep their order, and a draft vocabulary has scaled rows
    find_layout(make("dflash", base, num_layers=1), base, engine)
    if engine != "sglang":
        find_layout(make("dspark", base, num_layers=1, draft_tokens=20), base, engine)


@pytest.mark.parametrize(
    ("kind", "aux_layers", "is_right"),
    [
        ("deepseek_v3", [2, 3, 5], True),
        ("deepseek_v3", [3, 4, 5], False),
        ("llama", [3, 4, 5], True),
    ],
)
def test_layers_of_a_base_that_sglang_would_misread_are_refused(kind, aux_layers, is_right):
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "moe_intermediate_size": 16, "n_group": 1}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
    config = AutoConfig.for_model(
        kind,
        **(sizes if kind == "deepseek_v3" else {}),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=7,
        vocab_size=61,
    )
    base = FrozenBase(AutoModelForCausalLM.from_config(config, dtype=torch.float32), name=kind)
    head = make("eagle3", base, aux_layers=aux_layers)
    if is_right:
        find_layout(head, base, "sglang")
    else:
        with pytest.raises(
            ValueError, match=r"begin with 2, here with 3; engines that can: .*vllm$"
        ):
            find_layout(head, base, "sglang")


@pytest.mark.parametrize(
    ("kind", "engine", "settings", "by_oracle"),
    [
        # vLLM counts what EAGLE-3 has drafted, so that only the first levels are equal
        ("eagle3", "vllm", {"depth": 1, "num_layers": 2}, True),
        ("eagle3", "speculators", {"depth": 3}, False),
        ("eagle3", "speculators", {"depth": 3, "parallel": True, "num_layers": 2}, True),
        ("dflash", "speculators", {"num_layers": 2}, False),
        ("dspark", "speculators", {"num_layers": 2, "causal": True}, False),
        ("dspark", "speculators", {"num_layers": 3, "causal": True, "full_layers": [0, 2]}, False),
        ("dspark", "speculators", {"confidence_head": False, "causal": True}, False),
        ("eagle3", "speculators", {"num_layers": 2, "full_layers": [1]}, False),
    ],
)
def test_a_window_is_exported_and_read_back(
    kind, engine, settings, by_oracle, base, texts, tmp_path
):
    head, out = make(kind, base, sliding_window=5, **settings), tmp_path / "out"
    _, parity = export_head(head, base, engine, out, texts)
    assert parity.largest_difference < 1e-5
    config = json.loads((out / "config.json").read_text())
    inner = config.get("transformer_layer_config", config)
    types = ["sliding_attention"] * head.config.num_layers
    for index in head.config.full_layers:
        types[index] = "full_attention"
    assert inner["layer_types"] == types
    assert (inner["sliding_window"], inner["use_sliding_window"]) == (5, True)
    if kind != "eagle3":
        assert config["sliding_window_non_causal"] is (not head.config.causal)
    again = load_export(out, head, base).config
    assert (again.sliding_window, again.full_layers) == (5, head.config.full_layers)
    assert getattr(again, "causal", None) == getattr(head.config, "causal", None)
    if by_oracle:
        expected = drafts_of_head(head, base, texts)
        assert compare(expected, out, engine, head, base, texts) < 1e-5
        inner["sliding_window"] = 6
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="logits at depth"):
            compare(expected, out, engine, head, base, texts)


def test_dflash_for_vllm_has_modelopt_s_settings(base, texts, tmp_path):
    settings = {"sliding_window": 6, "window_counts_slots": True, "attention_sink": True}
    head, out = make("dflash", base, num_layers=2, **settings), tmp_path / "out"
    export_head(head, base, "vllm", out, texts)
    config = json.loads((out / "config.json").read_text())
    assert config["dflash_config"] == {
        "target_layer_ids": [layer - 1 for layer in head.aux_layers],
        "mask_token_id": head.mask_token,
        "use_swa": True,
        "swa_window_size": 6,
        "causal": False,
        "attention_sink_bias": True,
    }
    assert (config["layer_types"], config["sliding_window"]) == (["full_attention"] * 2, 6)
    sinks = load_file(out / "model.safetensors")["layers.1.self_attn.attention_sink_bias"]
    assert torch.equal(sinks, head.state_dict()["layers.1.self_attn.attention_sink_bias"])
    again = load_export(out, head, base).config
    for name in (*settings, "causal"):
        assert getattr(again, name) == getattr(head.config, name)


def test_unknown_engine_lists_valid_engines():
    with pytest.raises(ValueError, match=r"one of base, .*vllm; got 'os'"):
        engine_module("os")


def test_export_replaces_only_an_earlier_export(base, texts, tmp_path, monkeypatch):
    head, out = make("redrafter", base), tmp_path / "out"
    # a killed export leaves a scratch folder
    (tmp_path / ".out.abcdef01").mkdir()
    export_head(head, base, "vllm", out, texts[:1])
    export_head(head, base, "vllm", out, texts[:1])
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    for subject in ("base", "working folder"):
        with monkeypatch.context() as patch:
            if subject == "base":
                patch.setattr(base, "location", str(out / "config.json"))
            else:
                patch.chdir(out)
            with pytest.raises(InputError, match="which is in use; name another"):
                export_head(head, base, "vllm", out, texts[:1])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="mine holds other files"):
        export_head(head, base, "vllm", mine, texts[:1])
    assert [file.name for file in mine.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "name", ["NOTES.md", "vllm.json", "in/notes.txt", ".env", "base/config.json", "run.sh"]
)
def test_export_keeps_files_that_were_added_to_an_earlier_one(base, texts, tmp_path, name):
    head, out = make("redrafter", base), tmp_path / "out"
    export_head(head, base, "vllm", out, texts[:1])
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds {name}, which no export wrote; move it"):
        export_head(head, base, "vllm", out, texts[:1])
    assert (out / name).read_text() == "mine"
    (out / name).unlink()
    export_head(head, base, "vllm", out, texts[:1])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "file is a file"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
        ("loop", "Symlink loop"),
        ("locked/new", "is not writable"),
    ],
)
def test_unwritable_folder_is_refused_before_any_work(name, reason, tmp_path, base, monkeypatch):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "locked").mkdir()
    before, head = sorted(tmp_path.iterdir()), make("medusa", base)
    # root can write anywhere
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "locked")
    for write in (export_head, generate_check_texts):
        with pytest.raises(InputError, match=reason):
            write(head, base, "vllm", tmp_path / name, [])
    assert sorted(tmp_path.iterdir()) == before


SHALLOW, NONE = tree(paths=[[0], [0, 0]], depth=2), tree(kind="none")
MASKS, ANCHOR = {"sample_from_anchor": False}, {"sample_from_anchor": True}


@pytest.mark.parametrize(
    ("kind", "engine", "settings", "tuned", "pattern"),
    [
        # chains have the depth of the tuned tree, and draft at least one token
        ("medusa", "vllm", {}, None, '"num_speculative_tokens": 3'),
        ("medusa", "vllm", {}, SHALLOW, '"num_speculative_tokens": 2'),
        ("medusa", "vllm", {}, NONE, '"num_speculative_tokens": 1'),
        ("eagle3", "llama_cpp", {}, None, "n-max 3 --no-spec-draft-backend-sampling$"),
        # blocks are drafted whole
        ("dflash", "llama_cpp", {}, SHALLOW, "draft-dflash --spec-draft-n-max 3$"),
        ("dflash", "llama_cpp", ANCHOR, SHALLOW, "draft-dspark .*n-max 3$"),
        ("dspark", "llama_cpp", {}, SHALLOW, "draft-dspark --spec-draft-n-max 3$"),
        ("dspark", "llama_cpp", MASKS, SHALLOW, "draft-dspark .*n-max 3$"),
        ("dflash", "sglang", {}, SHALLOW, "-algorithm DFLASH .*-num-draft-tokens 4$"),
        ("dspark", "sglang", {}, SHALLOW, "-algorithm DSPARK .*-num-draft-tokens 4$"),
        ("domino", "sglang", {}, SHALLOW, "-algorithm DFLASH .*-num-draft-tokens 3$"),
    ],
)
def test_serving_command_drafts_the_right_number_of_tokens(
    kind, engine, settings, tuned, pattern, base
):
    head = make(kind, base, **settings)
    head.tuned = tuned and made_up(tuned)
    assert re.search(pattern, command(head, base, engine))


def command(head: Head, base: FrozenBase, engine: str) -> str:
    """Return the serving command, which is the last of an export's lines."""
    return find_layout(head, base, engine).make_folder(head, base, OUT).serve[-1]


@pytest.mark.parametrize(
    ("kind", "engine", "component"),
    [
        ("medusa", "vllm", "--model ada/base --revision v2 --spec"),
        ("eagle3", "sglang", "--model-path ada/base --revision v2 --spec"),
        ("eagle3", "tensorrt_llm", "serve ada/base --revision v2 --backend"),
        ("dflash", "speculators", "--model /serve/head --revision v2"),
        # TGI has no option for a revision
        ("mlp_speculator", "tgi", "3  # it loads the base's main, and the head is for v2"),
    ],
)
def test_serving_command_names_a_base_revision_other_than_main(
    kind, engine, component, base, monkeypatch
):
    head = make(kind, base)
    assert "revision" not in command(head, base, engine)
    monkeypatch.setattr(base, "location", "ada/base")
    monkeypatch.setattr(base, "revision", "v2")
    assert component in command(head, base, engine)


@pytest.mark.parametrize(
    ("kind", "engines"), [("qwen3_5_text", "sglang, speculators, vllm"), ("bamba", "none")]
)
def test_a_base_with_states_is_served_by_engines_that_roll_them_back(kind: str, engines: str):
    base = recurrent.base(kind)
    head = build_for_base({"kind": "eagle3", "aux_layers": [1, 2, 3]}, base)
    with pytest.raises(InputError, match=f"no base of type {kind}, .*engines that can: {engines}"):
        find_layout(head, base, "llama_cpp")
