"""Tiny random bases whose layers keep states, one of each class of transformers."""

import functools
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
)

from specheads.base.file_checks import attention_of
from specheads.base.model import FrozenBase
from specheads.config import data_dir

VOCAB = 97
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
_ATTENTION = _SIZES | {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 48, "max_position_embeddings": 512},
}
_LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_CONV = ["conv", "conv", "full_attention", "conv"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 24}
_DELTA = _ATTENTION | {
    **{"layer_types": _LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
}
_LATENT = {
    **{name: value for name, value in _ATTENTION.items() if name != "head_dim"},
    **{"layer_types": _LINEAR, "kv_lora_rank": 16, "num_key_value_heads": 4},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
_MAMBA2 = _ATTENTION | {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1},
    **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16},
}
_MAMBA = _SIZES | {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _SHARED,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _SHARED,
    "granitemoehybrid": _MAMBA2
    | {"layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 2.0}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "falcon_h1": _MAMBA2 | {"num_hidden_layers": 3, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "lfm2": _ATTENTION | {"layer_types": _CONV, "conv_L_cache": 3},
    "lfm2_moe": _ATTENTION
    | _EXPERTS
    | {"layer_types": _CONV, "conv_L_cache": 3, "num_dense_layers": 1},
    "nemotron_h": _ATTENTION
    | {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "mamba_num_heads": 8}
    | {"mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4, "n_group": 1}
    | {"chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
    | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24},
    "bamba": _MAMBA2 | {"attn_layer_indices": [2]},
    "jamba": _ATTENTION
    | {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4}
    | {"num_experts_per_tok": 2, "mamba_d_conv": 4, "mamba_expand": 2},
    "zamba2": _ATTENTION
    | {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "mamba_d_state": 16}
    | {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8}
    | {"mamba_headdim": 8, "num_mem_blocks": 1, "chunk_size": 16, "adapter_rank": 4}
    | {"use_shared_attention_adapter": False},
    "zamba": _ATTENTION
    | {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8}
    | {"n_mamba_heads": 2, "mamba_dt_rank": 4},
    "kimi_linear": _LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "olmo_hybrid": _DELTA,
    "mamba2": _SIZES
    | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16}
    | {"conv_kernel": 4, "expand": 2, "num_hidden_layers": 3},
    "mamba": _MAMBA | {"num_hidden_layers": 3},
    "falcon_mamba": _MAMBA | {"num_hidden_layers": 3},
    "bailing_hybrid": _LATENT
    | {"head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "zaya": {name: value for name, value in _ATTENTION.items() if name != "intermediate_size"}
    | {"num_hidden_layers": 3, "num_experts": 4, "moe_intermediate_size": 24}
    | {"router_hidden_size": 16},
}
"""Settings of each class by its model type."""
OWN_CACHES = {
    "minimax": _ATTENTION
    | {"layer_types": _LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16},
    "recurrent_gemma": _ATTENTION | {"lru_width": 32, "attention_window_size": 64},
}
"""Classes with states that are not in the cache of transformers."""
FAMILIES = ("qwen3_5_text", "granitemoehybrid", "falcon_h1", "jamba", "lfm2", "mamba")
"""Classes of the default tests: gated delta rule, Mamba-2 in layers of its own and next to
attention, Mamba-1, short convolutions, and a base without attention."""
_MULTIPLIERS = {
    f"{part}_{end}_multiplier" for part in ("ssm", "attention") for end in ("in", "out")
}


def model(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """Return a random model with slow decay and large weights, so that a wrong state shows."""
    settings = (CONFIGS | OWN_CACHES)[kind] | changes
    multipliers = dict.fromkeys(_MULTIPLIERS, 1.0) if kind == "falcon_h1" else {}
    config = AutoConfig.for_model(kind, **settings, **multipliers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention_of(config, "sdpa"), dtype=torch.float64
        )
        for name, parameter in made.named_parameters():
            _sharpen(name, parameter.data)
    return made.to(dtype).eval().requires_grad_(False)


def _sharpen(name: str, values: torch.Tensor) -> None:
    noise = torch.randn_like(values)
    if "A_log" in name:
        values.uniform_(-4, 0)
    elif "embed" in name and "norm" not in name:
        values.copy_(noise)
    elif values.ndim > 1:
        values.copy_(noise * 1.2 / values.shape[-1] ** 0.5)
    elif any(part in name for part in ("dt_bias", "conv1d.bias", "conv.bias", "dt_proj")):
        values.add_(0.3 * noise)


@functools.cache
def base(kind: str, dtype: torch.dtype = torch.float64) -> FrozenBase:
    """Return a base, shared by all tests."""
    return FrozenBase(model(kind, dtype), name=f"tiny-{kind}")


def saved(folder: Path, kind: str) -> Path:
    """Save a random base in float32, with the tokenizer of recipes/tiny_code; return its folder."""
    tokenizer = AutoTokenizer.from_pretrained(data_dir("recipes") / "tiny_code" / "base")
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model(kind, torch.float32, vocab_size=len(tokenizer), **special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the text that transformers alone decodes after a prompt, with its own cache."""
    names, text = signature(model.base_model.forward).parameters, list(prompt)
    argument = "cache_params" if "cache_params" in names else "past_key_values"
    cache: dict[str, Any] = {argument: DynamicCache(config=model.config.get_text_config())}
    new = torch.tensor([prompt])
    while len(text) < len(prompt) + count:
        positions = torch.arange(len(text) - new.shape[1], len(text))[None]
        # Mamba has no positions
        places = {"position_ids": positions} if "position_ids" in names else {}
        new = model(input_ids=new, use_cache=True, **cache, **places).logits[:, -1:].argmax(-1)
        text.append(int(new))
    return text[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
