"""Every causal architecture of transformers with two layers: lossless, or refused in one line.

Bases have random weights in float64 and a `sliding_window` of 12 in their config, whether they use
it or not. The reference is a forward over the whole text for each token, without a cache.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from tests import recurrent
from tests.oracle import Oracle

DOCS = Path(__file__).parents[2] / "docs" / "bases.md"
PROMPT = list(range(3, 11))
WINDOW, NEW_TOKENS = 12, 72
"""The text is more than 64 tokens longer than the window."""
MOST_PARAMETERS = 30_000_000


def _named(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


SMALL: dict[str, Any] = {
    **_named(32, "hidden_size", "n_embd", "d_model", "embed_dim", "dim", "word_embed_proj_dim"),
    **_named(32, "model_dim", "embedding_size"),
    **_named(2, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    **_named(2, "decoder_layers", "encoder_layers", "num_encoder_layers", "num_decoder_layers"),
    **_named(4, "num_attention_heads", "n_head", "n_heads", "num_heads"),
    **_named(4, "decoder_attention_heads", "encoder_attention_heads"),
    **_named(4, "num_encoder_attention_heads", "num_decoder_attention_heads", "mamba_n_heads"),
    **_named(2, "num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    **_named(2, "num_global_key_value_heads"),
    **_named(48, "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    **_named(48, "decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size", "d_inner"),
    **_named(48, "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    **_named(16, "moe_intermediate_size", "expert_intermediate_size", "q_lora_rank"),
    **_named(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_named(2, "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
    **_named(8, "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels"),
    **_named(8, "kv_lora_rank", "rotary_dim", "global_head_dim", "qk_head_dim", "d_head"),
    **_named(8, "attention_head_dim", "hidden_size_per_layer_input", "mamba_d_state"),
    **_named(8, "mamba_chunk_size", "ssm_state_size"),
    **_named(101, "vocab_size", "vocab_size_per_layer_input"),
    **_named(256, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    **_named(1, "n_group", "topk_group", "first_k_dense_replace", "bos_token_id"),
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "mamba_d_head": 16,
    "image_size": 32,
    "patch_size": 16,
}
"""Values of settings by their name, where a config has it."""

PARTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Settings with a value for each layer."""

OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"is_decoder": True},
}
"""Settings that some architectures need to be built so small."""


def small_config(kind: str) -> Any:
    """Return a config of two layers; raise where no such config can be made."""
    made_by: Any = CONFIG_MAPPING[kind]
    if kind in recurrent.CONFIGS:
        # the kinds of layers of a published model
        return made_by(**recurrent.CONFIGS[kind])
    changes = _changes(made_by()) | {"sliding_window": WINDOW} | OWN.get(kind, {})
    while True:
        try:
            return made_by(**changes)
        except Exception as error:
            # a setting that this config does not take, or takes with other values only
            message = str(error)
            if not (
                refused := [
                    name for name in changes if name in message.split() or f"'{name}'" in message
                ]
            ):
                raise
            del changes[refused[0]]


def _changes(config: Any) -> dict[str, Any]:
    """Return the settings that make a config small, those of its parts too."""
    changes = {name: value for name, value in SMALL.items() if _has(config, name)}
    if {"kv_lora_rank", "q_lora_rank"} & changes.keys():
        changes["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in PARTS:
        if _has(config, name) and isinstance(values := getattr(config, name), list) and values:
            kinds = sorted(set(values), key=str)
            changes[name] = (kinds * 2)[:2] if name == "layer_types" else values[:2]
    for name in getattr(type(config), "sub_configs", {}):
        sub_config = getattr(config, name, None)
        if hasattr(sub_config, "to_dict"):
            changes[name] = type(sub_config)(**_changes(sub_config))
    return changes


def _has(config: Any, name: str) -> bool:
    stored = getattr(type(config), "attribute_map", {}).get(name, name)
    attribute = getattr(type(config), stored, None)
    if isinstance(attribute, property) and attribute.fset is None:
        return False
    try:
        getattr(config, name)
    except Exception:
        return False
    return True


def small_model(kind: str) -> Any:
    """Return a model with random weights, large enough that its text varies."""
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(small_config(kind)).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(small_config(kind), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" not in name and parameter.ndim > 1:
            parameter.data.mul_(8)
    return model.eval()


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    """Return the text after the prompt, each token by a forward over all before it."""
    tokens = torch.tensor([PROMPT])
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=tokens, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(PROMPT) :].tolist()


def outcome(kind: str) -> str:
    """Return `tree` or `chain`, which a base verifies, `refused: LINE` or `not built: LINE`.

    Raises:
        AssertionError: The text differs from the reference.
    """
    try:
        model = small_model(kind)
    except Exception as error:
        return f"not built: {type(error).__name__} {' '.join(str(error).split())[:100]}"
    try:
        base = FrozenBase(model)
    except InputError as error:
        return f"refused: {error}"
    text = recurrent.greedy(model, PROMPT, NEW_TOKENS) if base.has_states else greedy(model)
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_at_eos": False}
    assert generate(base, None, [PROMPT], **settings).tokens[0] == text
    oracle = Oracle([PROMPT + text], 3, base.vocab_size, rate=0.7)
    tree = policies.Static([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)], "tree")
    tree = policies.chain(3) if base.has_states else tree
    assert generate(base, oracle, [PROMPT], tree=tree, **settings).tokens[0] == text
    return "chain" if base.has_states else "tree"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_causal_architecture_is_lossless_or_refused_in_one_line():
    transformers.logging.set_verbosity_error()
    outcomes: dict[str, str] = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            outcomes[kind] = outcome(kind)
        except Exception as error:
            outcomes[kind] = f"WRONG: {type(error).__name__} {' '.join(str(error).split())[:200]}"
    assert {kind: result for kind, result in outcomes.items() if result.startswith("WRONG")} == {}
    assert [result for result in outcomes.values() if "\n" in result] == []
    page = DOCS.read_text(encoding="utf-8").partition("## Architectures")[2]
    tree, below = page.partition("Chains (")[::2]
    chain, below = below.partition("| refused")[::2]
    refused, not_built = below.partition("Not built")[::2]
    sections = {"tree": tree, "chain": chain, "refused": refused, "not built": not_built}
    expected_sections = {
        kind: sections[result.partition(":")[0]] for kind, result in outcomes.items()
    }
    assert [kind for kind, section in expected_sections.items() if f"`{kind}`" not in section] == []
