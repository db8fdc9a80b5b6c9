"""Small GGUF files, written from tiny bases as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import tiny

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ 5", "h i", "Ġ hi"]
TOKENS = [
    *CONTROL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in TOKENS],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """Return a tiny base whose vocabulary is `TOKENS`."""
    torch.manual_seed(5)
    sizes = {"vocab_size": len(TOKENS), "intermediate_size": 64, "tie_word_embeddings": True}
    config = tiny.config(architecture, **(sizes | changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write(
    file: Path,
    base: PreTrainedModel,
    *,
    architecture: str = "",
    fields: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
) -> Path:
    """Write a base as GGUF; `fields` and `tensors` replace entries, and None omits one."""
    kind, config = base.config.model_type, base.config
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    writer = gguf.GGUFWriter(file, architecture or kind)
    size_fields = {f"{architecture or kind}.{name}": value for name, value in sizes.items()}
    for name, value in (size_fields | FIELDS | (fields or {})).items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    weights = {name: value for name, value in _tensors(base).items() if value is not None}
    for name, value in (weights | (tensors or {})).items():
        if value is not None:
            writer.add_tensor(name, value.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(base: PreTrainedModel) -> dict[str, Tensor]:
    """Return a base's weights by their GGUF names, with rows in llama.cpp's order."""
    kind = next(
        key
        for key, model_type in gguf.MODEL_ARCH_NAMES.items()
        if model_type == base.config.model_type
    )
    names = gguf.get_tensor_name_map(kind, base.config.num_hidden_layers)
    weights = {}
    for full, value in base.named_parameters():
        name, _, end = full.rpartition(".")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        count = heads.get(name.rpartition(".")[2]) if base.config.model_type == "llama" else None
        if count:
            # pairs of rotated rows: half a head apart in transformers, adjacent in llama.cpp
            pairs = value.unflatten(0, (getattr(base.config, count), 2, -1))
            value = pairs.transpose(1, 2).flatten(0, 2)
        weights[f"{names.get_name(name)}.{end}"] = value.contiguous()
    return weights
