"""MTP: numbers of other projects, modules of bases, and training states that equal drafts."""

import importlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, modeling_layers

from specheads.base.file_checks import auto_class
from specheads.base.model import FrozenBase
from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.decoding.generate import generate
from specheads.export.write import export_head
from specheads.heads.kinds import mtp
from specheads.heads.load import load_head, resume_head
from specheads.training.depth_loss import weights_of_depths
from tests import tiny
from tests.export.trained import train_head
from tests.heads.golden import GOLDEN, close, expected
from tests.heads.test_heads import make

CASES = ["mtp_speculators", "mtp_mimo", "mtp_deepseek"]
FIRST = 5
"""Positions that the first of two drafts has seen."""

QWEN3_NEXT = {
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}


def loaded(folder: Path) -> mtp.Head:
    head = load_head(folder)
    assert isinstance(head, mtp.Head)
    return head


def case(name: str) -> tuple[mtp.Head, dict[str, Tensor]]:
    head, golden = loaded(GOLDEN / name), expected(name)
    head.double().bind(golden["in.embedding"], golden["in.projection"])
    return head, golden


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", CASES)
def test_a_public_module_drafts_like_its_project_s_layer(name: str):
    """Draft twice from one memory: after the first positions, and after all."""
    head, golden = case(name)
    hidden, tokens = golden["in.hidden"], golden["in.tokens"]
    memory = head.memory(2, capacity=32)
    for step, (start, end) in enumerate(itertools.pairwise((0, FIRST, hidden.shape[1]))):
        new_features, following = Features(hidden[:, start:end]), tokens[:, start + 1 : end + 1]
        count = torch.full((2,), end - start)
        logits, state = head.begin(Committed(new_features, following, count), memory)
        decoding = golden[f"out.drafted.{step}"]
        for level, reference in enumerate(golden[f"out.draft_logits.{step}"].unbind(1)):
            close(logits[:, 0], reference)
            assert torch.equal(logits.argmax(-1)[:, 0], decoding[:, level])
            node = decoding[:, level : level + 1]
            logits, state = head.extend(state, node, torch.zeros_like(node))
    assert golden["out.drafted.0"].shape[1] == head.depth == 3


@pytest.mark.usefixtures("in_float64")
def test_the_first_training_round_equals_speculators():
    head, golden = case("mtp_speculators")
    state = next(head.states(Features(golden["in.hidden"]), golden["in.tokens"][:, :-1]))
    reference = golden["out.logits"]
    assert reference.shape[1] == 9
    close(head.logits(state, 0)[:, : reference.shape[1]], reference)


def test_decay_equals_fastmtp_s_level_weights_up_to_scale():
    reference = expected("mtp_speculators")["out.step_weights"]
    result = torch.tensor(weights_of_depths(3, 0.6), dtype=reference.dtype)
    close(result / result.sum(), reference)


def edited(
    name: str,
    folder: Path,
    rename: Callable[[str], str] = str,
    extra_tensors: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Copy a checkpoint with other names and more tensors; return its tensors."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(key): value for key, value in tensors.items()} | (extra_tensors or {})
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_a_module_with_qwen3_next_s_names_is_read(tmp_path: Path):
    def rename(name: str) -> str:
        suffix = name.removeprefix("mtp_layers.0.")
        module = suffix.removesuffix(".weight")
        return (
            f"mtp.{QWEN3_NEXT[module]}.weight" if module in QWEN3_NEXT else f"mtp.layers.0.{suffix}"
        )

    assert "mtp.layers.0.mlp.up_proj.weight" in edited("mtp_speculators", tmp_path, rename)
    config = json.loads((GOLDEN / "mtp_speculators" / "config.json").read_text())
    inner = config["transformer_layer_config"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner}))
    result, reference = loaded(tmp_path), loaded(GOLDEN / "mtp_speculators")
    assert result.config == reference.config
    for name, value in reference.state_dict().items():
        assert torch.equal(value, result.state_dict()[name]), name


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.2.mlp.experts.0.up_proj.weight", r"mlp\.experts\.0\.gate_proj\.weight"),
        ("model.layers.2.mlp.shared_experts.up_proj.weight", "Unexpected key"),
        ("model.layers.2.self_attn.kv_a_proj_with_mqa.weight", "Unexpected key"),
        ("model.layers.3.eh_proj.weight", r"has 2: model\.layers\.2\., model\.layers\.3\.;"),
        ("model.layers.2.input_layernorm.bias", "Unexpected key"),
        (
            "model.layers.2.self_attn.q_proj.weight",
            "size mismatch for layer.mtp_block.self_attn.q_proj",
        ),
    ],
)
def test_unsupported_modules_are_refused_in_one_line(tensor: str, message: str, tmp_path: Path):
    edited("mtp_deepseek", tmp_path, extra_tensors={tensor: torch.zeros(64, 32)})
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(only 'silu'\)"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"kv_lora_rank": 512, "scoring_func": "x"}, "kv_lora_rank=512, scoring_func='x'"),
        ({"num_attention_heads": 0}, "do not describe a head: ZeroDivisionError"),
    ],
)
def test_unsupported_settings_are_refused(change: dict, message: str, tmp_path: Path):
    edited("mtp_mimo", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    config.pop("head_dim")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


def test_a_base_and_its_mtp_head_load_from_one_folder(tmp_path: Path):
    """The base ignores the module, and `init=` loads it."""
    folder = tiny.saved(tmp_path)
    base = FrozenBase.load(folder, dtype="float64", device="cpu")
    shape = {"attention_heads": 4, "key_value_heads": 2, "head_dim": 8, "inner_dim": 48}
    suffix = make({"kind": "mtp", "hidden_first": True, **shape}, base).float()
    module = tiny.module(suffix, "model.mtp_layers.0.", column=1)
    save_file(load_file(folder / "model.safetensors") | module, folder / "model.safetensors")
    again = FrozenBase.load(folder, dtype="float64", device="cpu")
    head = resume_head(folder, again, "mtp")
    for name, value in suffix.state_dict().items():
        assert torch.equal(value, head.state_dict()[name]), name
    decoding = generate(again, head.double().eval(), tiny.prompts(), max_new_tokens=12)
    assert decoding.tokens == generate(base, None, tiny.prompts(), max_new_tokens=12).tokens


# modules of bases by the classes of transformers

VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
    **{"num_position_embeddings": 16, "out_hidden_size": 32, "deepstack_visual_indexes": []},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh"},
}
ROTARY = {
    **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    **{"mrope_interleaved": True, "mrope_section": [1, 1, 0]},
}
LINEAR = {
    **{"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    **{"full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
}
QWEN3_5 = LINEAR | {
    **{"rope_parameters": ROTARY, "attn_output_gate": True, "mtp_num_hidden_layers": 1},
    **{"mtp_use_dedicated_embeddings": False, "output_gate_type": "swish", "dtype": "float32"},
    **{"mamba_ssm_dtype": "float32", "attention_bias": False, "mlp_only_layers": []},
}
SHARED = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 24},
}
MODULES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
        **{"topk_group": 1, "moe_intermediate_size": 16, "routed_scaling_factor": 2.5},
        **{"norm_topk_prob": True, "first_k_dense_replace": 0, "attention_bias": True},
        **{"use_qk_norm": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
    },
    "qwen3_next": LINEAR
    | SHARED
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "partial_rotary_factor": 0.25},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5 | SHARED | {"router_aux_loss_coef": 0.001},
    # Nemotron 3 Super's config.json
    "nemotron_h": {
        **{"hybrid_override_pattern": "ME*", "mtp_hybrid_override_pattern": "*E"},
        **{"num_nextn_predict_layers": 1, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5},
        **{"norm_eps": 1e-5, "partial_rotary_factor": 1.0, "n_routed_experts": 4, "n_group": 1},
        **{"n_shared_experts": 1, "num_experts_per_tok": 2, "topk_group": 1},
        **{"moe_intermediate_size": 16, "moe_latent_size": 16, "norm_topk_prob": True},
        **{"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": False},
        **{"routed_scaling_factor": 2.5, "mamba_num_heads": 8, "mamba_head_dim": 8},
        **{"ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4, "chunk_size": 16, "expand": 2},
        **{"mamba_hidden_act": "silu", "mamba_proj_bias": False, "use_conv_bias": True},
        **{"mamba_ssm_cache_dtype": "float32", "use_mamba_kernels": True, "use_bias": False},
        **{"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001},
        **{"rescale_prenorm_residual": True, "residual_in_fp32": False, "num_logits_to_keep": 1},
        **{"mlp_bias": False, "sliding_window": None, "eos_token_id": 60},
    },
}
"""Settings of config.json as published, with small sizes, by `model_type`."""
STACKED = "qwen3_5_moe_text stacked"
"""Its experts as one tensor, as Qwen3.5's own layers are stored."""
CLASSES = {
    **{"glm4_moe": "Glm4Moe", "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5"},
    **{"qwen3_5_moe_text": "Qwen3_5Moe", "nemotron_h": "NemotronH"},
}
EXPERT_BASE = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu"},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}


def published_settings(kind: str) -> dict[str, Any]:
    """Return a config.json as a project publishes it."""
    settings = EXPERT_BASE | MODULES[kind] | {"model_type": kind, "rope_theta": 10_000.0}
    if kind == "nemotron_h":
        del settings["hidden_act"], settings["rms_norm_eps"]
    if not kind.startswith("qwen3_5"):
        return settings
    del settings["rope_theta"]
    outer = {"model_type": kind.removesuffix("_text"), "text_config": settings}
    tokens = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58}
    vision = VISION | {"model_type": outer["model_type"]}
    return outer | tokens | {"vision_config": vision, "tie_word_embeddings": False}


class Blocks(nn.ModuleList):
    """Nemotron-H's blocks of a module."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        assert layer_idx == 0
        block = importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")
        super().__init__([block.NemotronHBlock(config, index) for index in range(2)])

    def forward(self, hidden: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        for block in self:
            hidden = block(hidden, attention_mask=attention_mask)
        return hidden


def public_names(kind: str, name: str) -> str:
    """Return the published name of a tensor of transformers' layer."""
    part, what = name.rsplit(".", 1)
    if kind == "nemotron_h":
        if part == "post_norm":
            return f"mtp.layers.1.final_layernorm.{what}"
        return (
            f"mtp.layers.{part.removeprefix('mtp_block.') if '.' in part else '0.' + part}.{what}"
        )
    prefix, column = ("model.layers.46.", 0) if kind == "glm4_moe" else ("mtp.", 2)
    ours = {"post_norm": "norm"}.get(part, f"layer.{part}")
    inner = "layers.0." if prefix == "mtp." else ""
    public = {name: names[column] for name, names in mtp.MODULES.items()}.get(ours)
    return f"{prefix}{public or inner + part.removeprefix('mtp_block.')}.{what}"


def transformers_module(case: str, folder: Path) -> tuple[Any, Any]:
    """Write a module as its base's project stores it; return transformers' layer and rotary."""
    kind, _, stacked = case.partition(" ")
    published = published_settings(kind)
    config = AutoConfig.for_model(**published).get_text_config()
    config._attn_implementation = config._experts_implementation = "eager"
    package = kind.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    norm = getattr(modeling, CLASSES[kind] + "RMSNorm")
    if kind == "nemotron_h":
        decoder, rotary = Blocks, None
        config.layers_block_type = config.mtp_layers_block_type
        config.rms_norm_eps = config.layer_norm_epsilon
    else:
        decoder = getattr(modeling, CLASSES[kind] + "DecoderLayer")
        text = "Text" if kind.startswith("qwen3_5") else ""
        rotary = getattr(modeling, CLASSES[kind] + text + "RotaryEmbedding")(config)
        config.layer_types = ["full_attention"]
    torch.manual_seed(3)
    layer = modeling_layers.MtpLayer(config, decoder, norm, layer_idx=0).double()
    for value in [*layer.parameters(), *layer.buffers()]:
        value.data.copy_((torch.randn(value.shape) * 0.3).float())
    tensors = {}
    for name, value in layer.state_dict().items():
        public = public_names(kind, name)
        if ".experts." not in name or stacked:
            tensors[public] = value
            continue
        # a matrix of each expert
        start, what = public.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if what == "gate_up_proj" else (what,)
        for index, matrix in enumerate(value):
            for part, half in zip(parts, matrix.chunk(len(parts)), strict=True):
                tensors[f"{start}.{index}.{part}.weight"] = half
    singles = {name: value.float().contiguous() for name, value in tensors.items()}
    save_file(singles, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published))
    return layer, rotary


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", [*MODULES, STACKED])
def test_a_module_drafts_as_transformers_layer(kind: str, tmp_path: Path):
    layer, rotary = transformers_module(kind, tmp_path)
    head = loaded(tmp_path).double()
    embedding, projection = torch.randn(2, 61, 32)
    head.bind(embedding, projection)
    hidden, tokens = torch.randn(2, 12, 32), torch.randint(61, (2, 12))
    positions = torch.arange(11).expand(2, -1)
    mask = torch.full((11, 11), -torch.inf).triu(1).expand(2, 1, -1, -1)
    embedded = embedding[tokens[:, 1:]]
    angles = rotary and rotary(embedded, positions)
    out = layer(embedded, hidden[:, :-1], angles, mask, positions, None)
    state = next(head.states(Features(hidden), tokens))
    # transformers computes norms and routes in float32
    close(head.logits(state, 0)[:, :-1], out @ projection.T, 1e-5)


@pytest.mark.parametrize("kind", [*MODULES, STACKED])
def test_a_module_is_tuned_and_written_back(kind: str, tmp_path: Path):
    folder = tmp_path / "base"
    folder.mkdir()
    transformers_module(kind, folder)
    module, published = (
        load_file(folder / "model.safetensors"),
        (folder / "config.json").read_text(),
    )
    config = AutoConfig.for_model(**json.loads(published))
    torch.manual_seed(0)
    auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    # transformers leaves the module and its settings out
    save_file(load_file(folder / "model.safetensors") | module, folder / "model.safetensors")
    (folder / "config.json").write_text(published)
    base = FrozenBase.load(folder, dtype="float64", device="cpu")
    head = resume_head(folder, base, "mtp")
    before = {name: value.clone() for name, value in head.state_dict().items()}
    prompts = [[token % 50 for token in prompt] for prompt in tiny.prompts()]
    texts = list(zip(prompts, generate(base, None, prompts, max_new_tokens=24).tokens, strict=True))
    train_head(head.double(), base, torch.tensor([(a + b)[:24] for a, b in texts]), 3, 1e-2)
    _, parity = export_head(head, base, "base", tmp_path / "out", texts)
    assert parity.largest_difference < 1e-5
    assert load_file(tmp_path / "out" / "model.safetensors").keys() >= module.keys()
    again = loaded(tmp_path / "out").state_dict()
    changed = {
        name for name, value in head.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed >= {name for name in before if "mlp.experts." in name or "q_proj" in name}
    for name, value in head.state_dict().items():
        close(again[name], value.float(), 1e-6)
    assert generate(base, head.eval(), prompts, max_new_tokens=24).tokens == [b for _, b in texts]


@pytest.mark.parametrize(
    ("kind", "setting", "tensor", "message"),
    [
        # a second step of Nemotron-H
        ("nemotron_h", {}, "mtp.layers.2.eh_proj.weight", "has 2: mtp.layers.0., mtp.layers.2.;"),
        ("nemotron_h", {}, "mtp.layers.2.mixer.in_proj.weight", "Unexpected key"),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*-"}, "", r"='\*-' \(only '\*E'\)"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "", "mlp_hidden_act='silu'"),
        # a second layer of Qwen3.5, and embeddings of its own
        ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "", "mtp_num_hidden_layers=2"),
        ("qwen3_5_text", {}, "mtp.layers.1.self_attn.q_proj.weight", "Unexpected key"),
        ("qwen3_5_text", {"mtp_use_dedicated_embeddings": True}, "", "dedicated_embeddings=True"),
        ("qwen3_5_text", {"attn_output_gate": False}, "", "attn_output_gate=False"),
    ],
)
def test_a_module_of_another_shape_is_refused_in_one_line(
    kind: str, setting: dict, tensor: str, message: str, tmp_path: Path
):
    transformers_module(kind, tmp_path)
    config = published_settings(kind)
    config.get("text_config", config).update(setting)
    (tmp_path / "config.json").write_text(json.dumps(config))
    extra = {tensor: torch.zeros(32, 64)} if tensor else {}
    save_file(load_file(tmp_path / "model.safetensors") | extra, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        load_head(tmp_path)
    assert "\n" not in str(caught.value)
