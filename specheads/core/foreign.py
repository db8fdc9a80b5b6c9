"""Settings of configs that other projects wrote: used, without effect, or refused by name.

A reader names the settings that it uses. `refuse_unused` refuses every other one, in one line,
unless it has no effect on the result. So no setting is dropped silently.
"""

from collections.abc import Collection, Mapping
from typing import Any

from specheads.core.errors import InputError

_BOOKKEEPING = """
    architectures model_type dtype torch_dtype transformers_version initializer_range use_cache
    name_or_path _name_or_path _commit_hash base_model_name_or_path attn_implementation
    _attn_implementation _attn_implementation_autoset auto_map pretraining_tp
    return_dict output_hidden_states output_attentions torchscript chunk_size_feed_forward
    is_encoder_decoder is_decoder tie_word_embeddings gradient_checkpointing
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    tokenizer_class id2label label2id problem_type finetuning_task task_specific_params prefix
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
BOOKKEEPING = frozenset(_BOOKKEEPING.split())
"""Settings that no forward pass of a trained model reads. No code of `auto_map` is ever run."""
_LAYERS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps attention_bias mlp_bias
    max_position_embeddings rope_theta rope_scaling rope_parameters
    sliding_window use_sliding_window max_window_layers layer_types
"""
LAYERS = frozenset(_LAYERS.split())
"""Settings of decoder layers as in Llama and Qwen. The config of a head without such layers may
have those of its base."""
SECTIONS = ("transformer_layer_config", "speculators_config")
"""Settings of vllm-project/speculators that have settings of their own."""
SPECULATORS = (
    *SECTIONS,
    *("speculators_model_type", "speculators_version", "verifier"),
    *("algorithm", "default_proposal_method", "proposal_methods"),
)
"""Settings of vllm-project/speculators that name the layout of a folder and how it is served."""
MAX_LISTED = 8
"""Number of settings that a message names."""
REMEDY = "choose another checkpoint, or remove from config.json what has no effect"


def refuse_unused(
    reader: str,
    *sections: Mapping[str, Any],
    used: Collection[str],
    fixed: Mapping[str, Any] | None = None,
    remedy: str = REMEDY,
) -> None:
    """Refuse all settings of a config that a reader does not support, together and by name.

    Null, false and empty values turn a setting off and pass, unless it is one of `fixed`. Dropout
    and ids of tokens pass.

    Args:
        reader: Name of the reader.
        sections: Parts of the config, which may repeat a setting.
        used: Settings that the reader uses, or that do not change its result; with any value.
        fixed: Settings with the only value that the reader computes. In a list each item is one.
        remedy: What the user can do.

    Raises:
        InputError: A setting would be dropped.
    """
    fixed, harmless = fixed or {}, BOOKKEEPING.union(used)
    unsupported: list[str] = []
    for name, value in (item for section in sections for item in section.items()):
        shown_name = name if name.replace(".", "_").isidentifier() else repr(name)
        setting = f"{shown_name:.60}={value!r:.60}"
        if value is None or "dropout" in name or name.endswith("_token_id"):
            continue
        if name in fixed:
            values = value if isinstance(value, list) else [value]
            if any(choice != fixed[name] for choice in values):
                unsupported.append(f"{setting} (only {fixed[name]!r:.60})")
        elif name not in harmless and value is not False and value not in ("", [], {}):
            unsupported.append(setting)
    if unsupported:
        listed = ", ".join(unsupported[:MAX_LISTED])
        if len(unsupported) > MAX_LISTED:
            listed += f" and {len(unsupported) - MAX_LISTED} more"
        raise InputError(
            f"every setting of a config must be honoured, and {reader} does not support {listed}; "
            f"{remedy}"
        )
