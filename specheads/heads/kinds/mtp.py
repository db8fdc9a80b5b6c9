"""MTP: one Llama layer, applied repeatedly to its own state and the embedding of the next token.

Source: DeepSeek-V3, arXiv:2412.19437, 2.2; FastMTP, arXiv:2509.18362, which shares one layer among
all levels; the modules of Qwen3-Next, Qwen3.5, MiMo and Nemotron-H.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig

from specheads.base.experts import implementation_for
from specheads.core.errors import InputError
from specheads.core.features import Features
from specheads.core.foreign import LAYERS, SPECULATORS, refuse_unused
from specheads.core.ranges import Depth, LayerIndex, PositiveFloat, Probability
from specheads.heads.checkpoint import PLAIN, fill_head, fixed_without_window, read_layer_settings
from specheads.heads.layers.attention import AttentionConfig, LlamaLayer
from specheads.heads.layers.common import RMSNorm
from specheads.heads.layers.feedback import FeedbackHead


@dataclass(kw_only=True, slots=True)
class Config(AttentionConfig):
    """Settings of an MTP head; the defaults are FastMTP's depth and DeepSeek-V3's order."""

    depth: Depth = 3
    """Number of levels it drafts, and of rounds in training."""
    aux_layers: list[LayerIndex] | None = None
    """Base layers that it reads next to the final hidden state: k is the residual stream after k
    layers. Null is none; empty selects 2, n // 2 and n - 3 of n, or others for a shallow base."""
    hidden_first: bool = False
    """Whether its projection reads [state, token], as in MiMo, instead of [token, state], as in
    DeepSeek-V3 and Qwen3-Next."""
    qk_norm: bool = False
    """Whether the queries and keys of each head are normalised, as in Qwen3."""
    attention_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen2 and MiMo."""
    rotary_share: Probability = 1.0
    """Share of the channels of each attention head that the rotary embedding rotates; none in
    Nemotron-H."""
    output_gate: bool = False
    """Whether queries also give a gate of attention's output, as in Qwen3-Next and Qwen3.5. The
    norms of a base's own module then lack 1, which its reader adds."""
    experts: dict[str, Any] = field(default_factory=dict)
    """Settings of experts in place of the MLP, by transformers' names, with a base's `model_type`:
    glm4_moe, nemotron_h, qwen3_5_moe_text or qwen3_next. Empty is a plain MLP."""
    init_from_base: bool = False
    """Whether its first layer starts as the base's last one, with its sizes and rotary embedding
    unless they are set. Trained heads do not store this."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Scaling of the rotary embedding for longer texts, as in a Llama's config.json, by rope_type:
    linear, llama3 or yarn. Empty is no scaling."""
    epsilon: PositiveFloat = 1e-6
    """Epsilon of the norms."""


class Head(FeedbackHead):
    """The base's last hidden state and the token after it, then `depth` rounds of one layer.

    Each round reads the last drafted token and the normalised output of the previous round. The
    frozen projection of the base turns states into logits. Parameter names are DeepSeek-V3's.
    """

    borrows_projection = True
    feeds_normed = True

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        norms = {name: RMSNorm(width, config.epsilon) for name in ("enorm", "hnorm")}
        self.layer = nn.ModuleDict(norms)
        self.layer["eh_proj"] = nn.Linear(2 * width, width, bias=False)
        self.layer["mtp_block"] = layer = LlamaLayer(config, width)
        if config.experts:
            layer.add_module("mlp", build_experts(config.experts, width))
            # some implementations of experts read back which tokens each one gets
            self.can_record = False
        self.norm = RMSNorm(width, config.epsilon)

    @torch.no_grad()
    def initialise_layer(self, tensors: Mapping[str, Tensor], norm: Tensor) -> None:
        """Start from the base's next-token distribution: the outputs of the layer start at zero."""
        super().initialise_layer(tensors, norm)
        layer, joint = self.blocks()[0], self.layer["eh_proj"].get_parameter("weight")
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        nn.init.zeros_(joint)
        nn.init.eye_(joint.chunk(2, dim=1)[0 if self.config.hidden_first else 1])
        # the norm of a final hidden state, which hnorm removes
        self.norm.weight.fill_(norm.square().mean().sqrt())

    def blocks(self) -> list[LlamaLayer]:
        """Return its only layer."""
        return [cast(LlamaLayer, self.layer["mtp_block"])]

    def first_input(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the base's last hidden states, in the dtype of the weights."""
        return self.fuse_streams(features).hidden.to(self.norm.weight.dtype)

    def join_token(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Project the token's embedding and the previous state to the stream of the layer."""
        inputs = [self.layer["enorm"](embedded), self.layer["hnorm"](hidden)]
        if self.config.hidden_first:
            inputs.reverse()
        return self.layer["eh_proj"](torch.cat(inputs, dim=-1))


EXPERTS = {
    "glm4_moe": "Glm4MoeMoE",
    "nemotron_h": "NemotronHMoE",
    "qwen3_5_moe_text": "Qwen3_5MoeSparseMoeBlock",
    "qwen3_next": "Qwen3NextSparseMoeBlock",
}
"""transformers' classes of an MLP with experts, by the `model_type` of a base."""
EXPERT_SETTINGS = (
    *("model_type", "num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
    *("routed_scaling_factor", "n_group", "topk_group"),
    *("moe_latent_size", "moe_shared_expert_intermediate_size"),
)
"""Settings of these classes."""


def build_experts(settings: Mapping[str, Any], width: int) -> nn.Module:
    """Make transformers' MLP with experts for these settings, with random weights."""
    kind = settings.get("model_type")
    if kind not in EXPERTS or not {*settings} <= {*EXPERT_SETTINGS}:
        raise InputError(
            f"head.experts needs a model_type of {', '.join(EXPERTS)} and may have "
            f"{', '.join(EXPERT_SETTINGS[1:])}, got {dict(settings)!r:.200}; correct it"
        )
    name = kind.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    block = getattr(modeling, EXPERTS[kind])(AutoConfig.for_model(**settings, hidden_size=width))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    block.experts.register_forward_pre_hook(_choose_implementation)
    return block


def _choose_implementation(experts: Any, _: Any) -> None:
    """Compute experts as torch can for their dtype and sizes."""
    experts.config._experts_implementation = implementation_for(experts)


MLP = "layer.mtp_block.mlp."
EXPERT = re.compile(re.escape(MLP) + r"experts\.(\d+)\.")


def stacked_matrices(config: Config) -> dict[str, tuple[str, ...]]:
    """Return our tensors of all experts, each with the matrices of an expert that it joins."""
    has_gate = config.experts.get("model_type") != "nemotron_h"
    first = {"gate_up_proj": ("gate_proj", "up_proj")} if has_gate else {"up_proj": ("up_proj",)}
    return first | {"down_proj": ("down_proj",)}


def from_public(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Stack the matrices of all experts, as transformers does, and complete the norms."""
    weights = _shift_norms(weights, config.output_gate)
    count = 1 + max((int(match[1]) for match in map(EXPERT.match, weights) if match), default=-1)
    for stack, names in stacked_matrices(config).items() if count else ():
        matrices = [
            torch.cat([weights.pop(f"{MLP}experts.{index}.{name}.weight") for name in names])
            for index in range(count)
        ]
        weights[f"{MLP}experts.{stack}"] = torch.stack(matrices)
    return weights


def to_public(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Undo `from_public`; the stacks stay too, because some checkpoints have those."""
    weights = _shift_norms(weights, -config.output_gate)
    for stack, names in stacked_matrices(config).items() if config.experts else ():
        for index, joint in enumerate(weights[f"{MLP}experts.{stack}"]):
            for name, matrix in zip(names, joint.chunk(len(names)), strict=True):
                weights[f"{MLP}experts.{index}.{name}.weight"] = matrix
    return weights


def _shift_norms(weights: Mapping[str, Tensor], by: int) -> dict[str, Tensor]:
    return {name: value + by if by and "norm" in name else value for name, value in weights.items()}


PROJECTION = re.compile(
    r"(model\.layers\.\d+\.|(?:model\.)?mtp_layers\.\d+\.|mtp\.(?:layers\.\d+\.)?)"
    r"(?:eh_proj|input_proj|fc)\.weight"
)
"""A tensor that every module has, after the prefix of all its tensors."""
MODULES = {
    "layer.enorm": ("enorm", "token_layernorm", "pre_fc_norm_embedding"),
    "layer.hnorm": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden"),
    "layer.eh_proj": ("eh_proj", "input_proj", "fc"),
    "norm": ("shared_head.norm", "final_layernorm", "norm"),
}
"""Our names, and those of DeepSeek-V3, MiMo and speculators, and Qwen3-Next and Qwen3.5."""
RENAMED = {
    f"{name}.weight": f"{module}.weight" for module, names in MODULES.items() for name in names
}
BLOCKS = {
    "layers.0.norm.": "input_layernorm.",
    "layers.0.mixer.": "self_attn.",
    "layers.1.norm.": "post_attention_layernorm.",
    "layers.1.mixer.": "mlp.",
    "layers.1.final_layernorm.": "final_layernorm.",
    "layers.0.": "",
}
"""Starts of names and ours: Nemotron-H's blocks of attention and experts are one layer here."""
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Bases whose attention has a gate, and whose norms lack 1."""
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the base's tensors that a module may contain."""
FIXED = PLAIN | {
    **{"mtp_layer_types": "full_attention", "mtp_mlp_layer_types": "dense"},
    **{"mtp_num_hidden_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    **{"attn_output_gate": True, "mlp_hidden_act": "relu2"},
}
"""Settings of public checkpoints with the only supported value of each."""
UNREAD = (
    *("text_config", "num_nextn_predict_layers", "vision_config", "language_model_only"),
    *("mlp_layer_types", "num_local_experts", "router_aux_loss_coef", "partial_rotary_factor"),
    # the next ones describe other layers of the base, or the tensors decide
    *("first_k_dense_replace", "use_qk_norm", "decoder_sparse_step", "full_attention_interval"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "output_gate_type", "mamba_ssm_dtype"),
    *("hybrid_override_pattern", "layers_block_type", "mtp_layers_block_type", "chunk_size"),
    *("conv_kernel", "expand", "n_groups", "ssm_state_size", "use_conv_bias", "use_mamba_kernels"),
    *("mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "mamba_ssm_cache_dtype"),
    *("time_step_floor", "time_step_limit", "time_step_max", "time_step_min"),
    *("layer_norm_epsilon", "norm_eps", "moe_shared_expert_overlap", "num_logits_to_keep"),
    "rescale_prenorm_residual",
)
"""Settings that are read elsewhere, or have no effect: one layer is applied again and again."""


def module_names(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return the prefix of a checkpoint's module, and our names by the checkpoint's.

    Both are empty without a module. Copies of the base's tensors are left out.

    Raises:
        ValueError: There are several modules.
    """
    names = list(names)
    prefixes = sorted(match[1] for match in map(PROJECTION.fullmatch, names) if match)
    if not prefixes:
        return "", {}
    if len(prefixes) > 1:
        raise InputError(
            f"mtp reads one module and applies it repeatedly, this checkpoint has "
            f"{len(prefixes)}: {', '.join(prefixes)[:80]}; choose another, or train head=mtp"
        )
    prefix = re.sub(r"^mtp\.layers\..*", "mtp.", prefixes[0])
    suffixes = {name: name[len(prefix) :] for name in names if name.startswith(prefix)}
    return prefix, {
        name: _our_name(suffix) for name, suffix in suffixes.items() if suffix not in COPIES
    }


def _our_name(suffix: str) -> str:
    start = next(filter(suffix.startswith, BLOCKS), "")
    suffix = BLOCKS.get(start, "") + suffix.removeprefix(start)
    return RENAMED.get(suffix, f"layer.mtp_block.{suffix}")


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read the MTP module of a base's checkpoint, or a folder of speculators."""
    prefix, names = module_names(tensors)
    if not names:
        return None
    weights = {name: tensors[public_name] for public_name, name in names.items()}
    has_experts = any(name.startswith(f"{MLP}experts.") for name in weights)
    nested = (config.get(name, {}) for name in ("text_config", "transformer_layer_config"))
    sections = [config, *nested]
    settings = {name: value for section in sections for name, value in section.items()}
    kind = settings.get("model_type")
    if kind == "nemotron_h":
        settings |= {"rms_norm_eps": settings["layer_norm_epsilon"], "partial_rotary_factor": 0.0}
    is_gated = kind in GATED
    rope = settings.get("rope_parameters") or {}
    # some bases have one for each kind of attention
    rope = dict(rope.get("full_attention", rope))
    settings["rope_parameters"] = rope
    share = settings.get("partial_rotary_factor", 0.25 if is_gated else 1.0)
    share = rope.pop("partial_rotary_factor", share)
    # of such a base they are kinds of its other layers
    own_types = {"layer_types": None} if has_experts or is_gated else {}
    fixed = FIXED | fixed_without_window(settings | own_types)
    del fixed["partial_rotary_factor"]
    refuse_unused(
        "mtp",
        *sections,
        config.get("speculators_config", {}),
        used=(*LAYERS, *SPECULATORS, *UNREAD, *EXPERT_SETTINGS),
        fixed=fixed,
        remedy="train head=mtp instead",
    )
    attention = "layer.mtp_block.self_attn."
    values: dict[str, Any] = {
        **read_layer_settings(settings),
        "hidden_first": prefix.startswith("model.mtp_layers."),
        "qk_norm": f"{attention}q_norm.weight" in weights,
        "attention_bias": f"{attention}q_proj.bias" in weights,
        "rotary_share": share,
        "output_gate": is_gated,
    }
    if has_experts:
        values["experts"] = {name: settings[name] for name in EXPERT_SETTINGS if name in settings}
    rows = len(weights[f"{attention}q_proj.weight"])
    heads = values["attention_heads"] * (1 + is_gated)
    values["head_dim"] = values["head_dim"] or rows // heads
    head = Head(Config(**values), settings["hidden_size"], settings["vocab_size"])
    fill_head(head, from_public(weights, head.config))
    return head
