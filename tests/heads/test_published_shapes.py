"""Folders as projects publish them: which load and draft exactly, which are refused, and why.

The settings are the facts of published files, in small sizes; the tensors are random ones.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.heads.load import bind_to_base, build_head, load_head
from specheads.measure.offline import offline_logits
from tests import tiny
from tests.heads.golden import GOLDEN, changed

SIZES = {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 48, "head_dim": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
LAYERS = {"attention_heads": 4, "key_value_heads": 2, "head_dim": 8, "inner_dim": 48}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
WINDOW_OFF = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28}
IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def published_head(folder: Path, head: dict[str, Any], config: dict[str, Any]) -> Path:
    """Write a head with the tensor names and the settings of its project."""
    return write_published(folder, build_head(LAYERS | head, width=32, vocab_size=64), config)


def write_published(
    folder: Path, head: Head, config: dict[str, Any], prefix: str = "", column: int = 0
) -> Path:
    """Write a head by its own names of tensors, or by those of a base's module."""
    tensors = tiny.module(head, prefix, column) if prefix else head.state_dict()
    if tensors.pop("draft_ids", None) is not None:
        tensors["d2t"], tensors["t2d"] = head.draft_maps()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "x.safetensors"
    )
    # speculators nests the sizes
    sizes = {} if "transformer_layer_config" in config else SIZES
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


EAGLE3: dict[str, dict[str, Any]] = {
    "llama3-8B, ling-flash, llama4-scout": {"model_type": "llama"},
    "llama3-70B": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
        | {"low_freq_factor": 1.0, "original_max_position_embeddings": 4096},
    },
    "deepseek-v2-lite": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek-v3, gpt-oss, qwen3-235B": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    },
    "gemma3-1b": {"sliding_window": 512, "use_sliding_window": False},
    "phi4": {"model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0},
    "qwen2.5 of both projects, qwq-32B": WINDOW_OFF | {"use_mrope": False, "modal_type": "Audio"},
    "qwen2.5-vl of SpecForge": WINDOW_OFF | {"rope_scaling": MROPE, "pretraining_tp": 1},
    "qwen2.5-vl of AngelSlim": WINDOW_OFF
    | {"rope_scaling": MROPE, "modal_type": "VLM", "vision_token_id": 5}
    | dict.fromkeys(IMAGES, 7),
    "qwen3-vl of AngelSlim": {"rope_scaling": {"type": "default", "mrope_section": [24, 20, 20]}}
    | dict.fromkeys(IMAGES, 7),
    "qwen3, qwen3-coder, longcat": WINDOW_OFF | {"sliding_window": None, "rope_scaling": None},
    "qwen3-30B-A3B, EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "qwen3-next, qwen3.5-35b-a3b": {"decoder_sparse_step": 1, "use_sliding_window": False},
    "qwen3-30b-a3b of AngelSlim": {
        **{"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    },
    "cosyvoice3, the base's number of layers": WINDOW_OFF | {"num_hidden_layers": 24},
    "hunyuan_ocr": {"eod_token_id": 3, "image_newline_token_id": 4, "modal_type": "VLM"},
    "hunyuan-4b, hunyuan-7b": {
        **{"attention_head_dim": 8, "use_qk_norm": True, "use_rotary_pos_emb": True, "pad_id": 2},
        **{"dense_list": [32, 0], "cla_share_factor": 2, "use_cla": False, "norm_type": "rms"},
        **{"im_start_id": 4, "im_end_id": 5, "text_start_id": 6, "org_vocab_size": 64},
    },
}


@pytest.mark.parametrize("name", EAGLE3)
@pytest.mark.parametrize("draft_tokens", [0, 16])
def test_published_eagle3_configs_load(name: str, draft_tokens: int, tmp_path: Path):
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1} | EAGLE3[name]
    norms = {norm: True for norm in ("fc_norm", "norm_output") if config.get(norm)}
    config |= {"draft_vocab_size": draft_tokens or 64}
    settings = {"kind": "eagle3", "draft_tokens": draft_tokens, **norms}
    head = load_head(published_head(tmp_path, settings, config))
    assert (head.kind, head.drafted_size, head.config.num_layers) == (
        "eagle3",
        draft_tokens or 64,
        1,
    )


BLOCK = {"attention_bias": False, "num_hidden_layers": 2, "num_target_layers": 36, "block_size": 7}
BLOCK |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "rope_scaling": None}
LAYER_IDS = {"target_layer_ids": [1, 9], "mask_token_id": 63}
MARKOV = {"projector_type": "dspark", "markov_rank": 4, "markov_head_type": "vanilla"}
MARKOV |= {"confidence_head_alpha": 1.0, "enable_confidence_head": True, "attention_mode": "gqa"}
DFLASH_HEAD = {"kind": "dflash", "num_layers": 2, "aux_layers": [2, 10]}
DOMINO = {"projector_type": "domino", "gru_hidden_dim": 8, "emb_dim": 4, "shift_label": True}
DOMINO |= {"pure_draft_prefix_len": 1}
DOMINO_HEAD = DFLASH_HEAD | {"kind": "domino", "gru_hidden_dim": 8, "emb_dim": 4, "depth": 7}
DSPARK_HEAD = DFLASH_HEAD | {"kind": "dspark", "markov_rank": 4}


@pytest.mark.parametrize(
    ("head", "config", "depth"),
    [
        (DFLASH_HEAD, {"architectures": ["DFlashDraftModel"]}, 6),
        (DFLASH_HEAD, {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, 6),
        # AngelSlim writes settings of its training, too
        (DFLASH_HEAD, {"loss_decay_gamma": 7.0, "attention_backend": "flex_attention"}, 6),
        (
            DSPARK_HEAD,
            {"architectures": ["DSparkDraftModel"], "dflash_config": LAYER_IDS | MARKOV}
            | {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "target_hidden_size": None},
            7,
        ),
    ],
)
def test_published_block_configs_load(head: dict, config: dict, depth: int, tmp_path: Path):
    loaded = load_head(
        published_head(tmp_path, head, BLOCK | {"dflash_config": LAYER_IDS} | config)
    )
    assert (loaded.kind, loaded.depth, loaded.aux_layers) == (head["kind"], depth, (2, 10))


# folders of six projects, and modules of bases

QWEN3 = {"model_type": "qwen3", "attention_bias": False, "rope_theta": 1e6, "vocab_size": 61}
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 7, "use_sliding_window": True}
ALL_SLIDING = MIXED | {"layer_types": [SLIDING, SLIDING]}
THETA = {"rope_theta": 1_000_000.0}
BY_Z_LAB = QWEN3 | {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2}
BY_Z_LAB |= {"num_target_layers": 3, "block_size": 6, "max_window_layers": 2, "is_causal": None}
READS = {"target_layer_ids": [0, 1], "mask_token_id": 60}
BY_Z_LAB |= {"dflash_config": READS, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
BLOCK_HEAD = {"kind": "dflash", "num_layers": 2, "aux_layers": [1, 2], "depth": 5} | THETA
WINDOWED = BLOCK_HEAD | {"sliding_window": 7, "window_counts_slots": True}
SELECTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
LLAMA = {"model_type": "llama", "mlp_bias": False, "num_hidden_layers": 1, "vocab_size": 61}
EAGLE = {"kind": "eagle3", "draft_tokens": 16, "aux_layers": [1, 2, 3], "epsilon": 1e-6}
BY_EAGLE = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 16}
STREAMS = "eagle_aux_hidden_state_layer_ids"
IN_NESTED = {"eagle_config": {STREAMS: [0, 1, 2], "use_aux_hidden_state": True}}
LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG |= {"original_max_position_embeddings": 8192}
MTP = {"kind": "mtp", "depth": 3}
DEEPSEEK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}


def by_speculators(kind: str, layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a config.json of speculators with these layers."""
    method = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": SIZES | layers,
        "speculators_config": {"algorithm": kind, "proposal_methods": [method]},
        **settings,
    }


PUBLIC: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "z-lab/Qwen3-8B-DFlash-b16": (BLOCK_HEAD, BY_Z_LAB | {"layer_types": [FULL, FULL]}, ""),
    "z-lab/gemma-4-31B-it-DFlash": (
        WINDOWED | {"full_layers": [1], "causal": True}, BY_Z_LAB | MIXED, "",
    ),
    "z-lab/Qwen3.8-27B-DFlash2": (
        WINDOWED | SELECTS | {"kind": "dflash2"},
        BY_Z_LAB | ALL_SLIDING | {"is_causal": False, "dflash_config": READS | SELECTS}, "",
    ),
    "z-lab/Muse-Glimmer-30B-DFlash2": (
        WINDOWED | SELECTS | {"kind": "dflash2"},
        BY_Z_LAB | ALL_SLIDING | {"is_causal": False}
        | {"dflash_config": READS | SELECTS | {"final_logit_softcapping": 20.0}},
        "final_logit_softcapping=20.0",
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": (
        EAGLE | {"norm_before_residual": True, "depth": 5},
        by_speculators("eagle3", LLAMA, draft_vocab_size=16, norm_before_residual=True)
        | {STREAMS: [1, 2, 3], "architectures": ["Eagle3Speculator"]}, "",
    ),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": (
        EAGLE | {"depth": 5, "sliding_window": 7},
        by_speculators("eagle3", LLAMA | MIXED | {"layer_types": [SLIDING]}, draft_vocab_size=16)
        | {STREAMS: [1, 2, 3], "embed_requires_grad": False}, "",
    ),
    "RedHatAI/Qwen3-8B-speculator.dflash": (
        BLOCK_HEAD | {"sliding_window": 7, "causal": True, "full_layers": [1]},
        by_speculators("dflash", QWEN3 | MIXED | {"num_hidden_layers": 2}, block_size=6)
        | {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 60, "draft_vocab_size": 61}, "",
    ),
    "nvidia/Llama-4-Maverick-17B-128E-Eagle3": (
        EAGLE | {"draft_tokens": 0, "rope_scaling": LONG},
        BY_EAGLE | IN_NESTED | {"draft_vocab_size": 61, "rope_scaling": LONG, STREAMS: [1, 2, 3]},
        "",
    ),
    "nvidia/gpt-oss-120b-Eagle3-short-context": (
        EAGLE, BY_EAGLE | {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state=False",
    ),
    "nvidia/gpt-oss-120b-Eagle3-v3": (
        EAGLE | {"norm_before_fc": True},
        BY_EAGLE | {"eagle_config": {STREAMS: [24, 30, 36], "norm_before_fc": True}},
        f"{STREAMS} in eagle_config must start with 1 .* to the top level of config.json",
    ),
    "DFlash of nvidia's Model-Optimizer": (
        WINDOWED | {"attention_sink": True},
        BY_Z_LAB | {"layer_types": [FULL, FULL], "sliding_window": 7, "attention_sink_bias": True}
        | {"dflash_config": READS | {"use_swa": True, "swa_window_size": 7, "causal": False}}, "",
    ),
    "DSpark of nvidia's Model-Optimizer": (
        BLOCK_HEAD | {"kind": "dspark", "markov_rank": 4, "confidence_head": False, "depth": 6},
        BY_Z_LAB | {"architectures": ["DSparkDraftModel"], "layer_types": [FULL, FULL]}
        | {"markov_rank": 4, "markov_head_type": "vanilla", "use_confidence_head": False}
        | {"projector_type": "dspark", "shift_label": True}, "",
    ),
    "Domino of nvidia's Model-Optimizer, Qwen3-8B-Domino-b16": (
        BLOCK_HEAD | {"kind": "domino", "gru_hidden_dim": 8, "emb_dim": 4, "depth": 6},
        BY_Z_LAB | {"layer_types": [FULL, FULL], "emb_dim": 4}
        | {"dflash_config": READS | DOMINO | {"causal": False}}, "",
    ),
    "lmsys/Qwen3-235B-A22B-EAGLE3": (
        EAGLE | {"aux_layers": [2, 3]}, BY_EAGLE | {"eagle_config": {STREAMS: [1, 2]}}, "",
    ),
    "lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1": (
        EAGLE | {"aux_layers": []}, BY_EAGLE | {"pretraining_tp": 1, "bias": False}, "",
    ),
    "AngelSlim/Qwen3-8B_eagle3": (
        EAGLE | {"aux_layers": [], "rope_scaling": {}},
        BY_EAGLE | WINDOW_OFF | {"architectures": ["Eagle3LlamaForCausalLM"], "modal_type": "LLM"},
        "",
    ),
    "DFlash of AngelSlim": (
        BLOCK_HEAD,
        BY_Z_LAB | {"layer_types": [FULL, FULL], "loss_decay_gamma": 7.0}
        | {"attention_backend": "flex_attention"}, "",
    ),
    "XiaomiMiMo/MiMo-7B-RL": (
        MTP | {"hidden_first": True, "attention_bias": True},
        LLAMA | {"num_nextn_predict_layers": 1, "attention_bias": True, "model_type": "mimo"}, "",
    ),
    "deepseek-ai/DeepSeek-V3": (
        MTP, LLAMA | DEEPSEEK | {"num_nextn_predict_layers": 1, "model_type": "deepseek_v3"},
        "q_lora_rank=8, kv_lora_rank=8",
    ),
}  # fmt: skip
"""Settings of a head, its folder's config.json, and the name in the refusal or nothing."""
MODULE: dict[str, tuple[str, int]] = {
    "mimo": ("model.mtp_layers.0.", 1),
    "deepseek_v3": ("model.layers.3.", 0),
}
"""Names of a base's module: their prefix, and the column of `MODULES`."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_folders_load_and_draft_exactly_or_name_the_key(name: str, tmp_path: Path):
    assert len(PUBLIC) >= 16
    base, (settings, config, refused) = tiny.base(), PUBLIC[name]
    torch.manual_seed(3)
    head = build_head(LAYERS | settings, width=32, vocab_size=61)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    if head.draft_ids is not None:
        head.choose_vocabulary(torch.randperm(61))
    prefix, column = MODULE.get(config.get("model_type", ""), ("", 0))
    write_published(tmp_path, head, config, prefix, column)
    if refused:
        with pytest.raises(InputError, match=refused) as caught:
            load_head(tmp_path, base)
        assert "\n" not in str(caught.value)
        return
    loaded = load_head(tmp_path, base).double()
    bind_to_base(head.double(), base)
    assert (loaded.kind, loaded.depth) == (head.kind, head.depth)
    tokens = torch.randint(61, (2, 24), generator=torch.manual_seed(4))
    drafts, expected = (
        offline_logits(value, base.read(tokens, value.aux_layers), tokens)
        for value in (loaded, head)
    )
    for result, reference in zip(drafts, expected, strict=True):
        assert torch.equal(result, reference)
    continuations = [text[:12] for text in tiny.continuations()]
    assert generate(base, loaded, tiny.prompts(), max_new_tokens=12).tokens == continuations


PEAGLE = {"kind": "eagle3", "parallel": True, "num_layers": 2}
XPRESS = {"speculators_model_type": "xpress", "architectures": ["XPressSpeculator"]}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "sliding_window": 2048}


@pytest.mark.parametrize(
    ("head", "config", "message"),
    [
        # they rotate with `alpha`
        ({"kind": "eagle3"}, {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "'dynamic'"),
        (PEAGLE, {"num_hidden_layers": 2}, "mask_hidden needs one of mask_token_id, .* add it"),
        (
            DOMINO_HEAD,
            BLOCK | {"dflash_config": LAYER_IDS | DOMINO | {"shift_label": False}},
            "shift_label=False",
        ),
        (
            DOMINO_HEAD,
            BLOCK | {"dflash_config": LAYER_IDS | DOMINO | {"projector_type": "causal_v5"}},
            "projector_type='causal_v5'",
        ),
        (DFLASH_HEAD, BLOCK | XPRESS, r"checkpoint of .* names \['XPressSpeculator'\]"),
        (DFLASH_HEAD, BLOCK | {"dflash_config": LAYER_IDS} | CHUNKS, "layer_types=.*chunked"),
        (
            DSPARK_HEAD,
            BLOCK | {"dflash_config": LAYER_IDS | MARKOV, "rope_scaling": YARN},
            "rope_type='yarn'",
        ),
    ],
)
def test_published_configs_of_other_networks_are_refused_by_name(
    head: dict, config: dict, message: str, tmp_path: Path
):
    with pytest.raises(InputError, match=message):
        load_head(published_head(tmp_path, head, config))


def test_the_remedy_for_a_missing_mask_token_leads_on(tmp_path: Path):
    config = {"num_hidden_layers": 2, "mask_token_id": 5}
    head = load_head(published_head(tmp_path, PEAGLE, config))
    assert (head.config.parallel, head.config.mask_token) == (True, 5)


# weights that are no numbers


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of a folder."""
    (file,) = (file for file in folder.glob("*.safetensors") if file.stem != "expected")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


CASES = ("eagle3_chain", "dflash_z_lab", "dspark_deepspec", "mtp_mimo", "eagle3_layers")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_integer_weights_are_refused_by_name_and_dtype(
    case: str, dtype: torch.dtype, tmp_path: Path
):
    def quantise(tensors: dict[str, Tensor]) -> None:
        name = max(tensors, key=lambda name: tensors[name].ndim)
        tensors[name] = tensors[name].to(dtype)

    folder = rewrite_weights(changed(case, tmp_path), quantise)
    with pytest.raises(InputError, match=f"floating-point numbers, got {str(dtype)[6:]};"):
        load_head(folder)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(case: str, value: float, tmp_path: Path):
    def damage(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("q_proj.weight"):
                tensors[name][-1, -1] = value

    with pytest.raises(InputError, match="must hold finite numbers"):
        load_head(rewrite_weights(changed(case, tmp_path), damage))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_every_floating_point_type_load(dtype: torch.dtype, tmp_path: Path):
    def cast(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor

    assert load_head(rewrite_weights(changed("eagle3_chain", tmp_path), cast)).kind == "eagle3"


# null, auto_map, layers


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("eagle3_chain", {"eagle_config": None}),
        ("eagle3_chain", {"rope_scaling": None, "pretraining_tp": None}),
        ("eagle3_speculators_ttt", {"speculators_config": None, "eagle_config": None}),
        ("dflash_z_lab", {"layer_types": None, "sliding_window": None, "head_dim": None}),
        ("dspark_deepspec", {"dflash_config": None, "markov_head_type": None}),
        ("mtp_mimo", {"text_config": None, "speculators_config": None}),
        ("redrafter_rnn", {"architectures": None}),
    ],
)
def test_null_means_unset(case: str, settings: dict, tmp_path: Path):
    assert load_head(changed(case, tmp_path, **settings)).depth > 0


@pytest.mark.parametrize("case", [*CASES, "medusa_heads", "hydra_mlp"])
def test_auto_map_is_ignored_and_its_code_not_run(case: str, tmp_path: Path):
    folder = changed(case, tmp_path, auto_map={"AutoModel": "code.Model", "AutoConfig": "code.C"})
    (folder / "code.py").write_text("raise SystemExit\n")
    assert load_head(folder).depth > 0


@pytest.mark.parametrize("num_layers", [0, 2, 28, 61, 80])
def test_one_layer_is_counted_from_the_file(num_layers: int, tmp_path: Path):
    head = load_head(changed("eagle3_chain", tmp_path, num_hidden_layers=num_layers))
    assert head.config.num_layers == 1


@pytest.mark.parametrize("num_layers", [4, 61])
def test_a_file_that_lacks_a_layer_is_refused(num_layers: int, tmp_path: Path):
    with pytest.raises(InputError, match=r"Missing key.*layers\.3"):
        load_head(changed("eagle3_layers", tmp_path, num_hidden_layers=num_layers))


# vLLM's layout of Medusa


def write_vllm_medusa(folder: Path, *, bias: bool, **settings: Any) -> tuple[Path, Head]:
    """Write a golden head of FasterDecoding in vLLM's layout; return both."""
    original = load_head(GOLDEN / "medusa_heads")
    tensors = {}
    for name, tensor in original.state_dict().items():
        module, head, *suffix = name.split(".")
        if module == "head":
            tensors[f"lm_heads.{head}.weight"] = tensor
        elif bias or suffix[-1] == "weight":
            tensors[f"blocks.{head}.layers.{suffix[0]}.{suffix[-1]}"] = tensor
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "m.safetensors"
    )
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": original.depth}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1} | settings))
    return folder, original


def test_vllm_s_medusa_layout_is_the_same_head(tmp_path: Path):
    folder, original = write_vllm_medusa(tmp_path, bias=True, medusa_fc_bias=True)
    weights = load_head(folder).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in original.state_dict().items())


def test_vllm_s_medusa_layout_without_biases_has_zero_biases(tmp_path: Path):
    folder, _ = write_vllm_medusa(tmp_path, bias=False)
    assert not load_head(folder).get_parameter("blocks.0.0.linear.bias").any()


@pytest.mark.parametrize(
    ("bias", "settings", "message"),
    [
        (False, {"medusa_fc_bias": True}, "Missing key.*linear.bias"),
        (True, {"original_lm_head": True}, "original_lm_head=True"),
        (True, {"vocab_size": 211, "truncated_vocab_size": 100}, "truncated_vocab_size=100"),
        (True, {"num_heads": 4}, "Missing key"),
        (True, {"num_hidden_layers": 2}, "Missing key"),
    ],
)
def test_vllm_s_medusa_layout_that_contradicts_its_tensors_is_refused(
    bias: bool, settings: dict, message: str, tmp_path: Path
):
    folder, _ = write_vllm_medusa(tmp_path, bias=bias, **settings)
    with pytest.raises(InputError, match=message):
        load_head(folder)
