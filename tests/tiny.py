"""Random bases of three layers, and their greedy continuations."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from specheads.base.model import FrozenBase
from specheads.config import data_dir
from specheads.core.drafter import Head
from specheads.heads.kinds.mtp import MODULES
from tests.oracle import Oracle

CPU = torch.device("cpu")
VOCAB = 61
NEW_TOKENS = 40
"""Length of a reference continuation; it exceeds the sliding windows."""

PROMPT_LENGTHS = (5, 21, 11)
"""Three ragged rows, one longer than the sliding windows (12 and 16)."""

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template for tokenizers without one."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GATED = _COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_GRANITE = {
    "logits_scaling": 2.0,
    "residual_multiplier": 0.9,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
}
_GEMMA3 = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of one tiny base; seed and sharpness give varied text."""

    config: type[PreTrainedConfig]
    settings: dict[str, Any]
    seed: int
    sharpness: float = 9.0
    """Factor on every matrix. With the default initialisation a base repeats one token, and would
    not detect a wrong mask."""


RECIPES = {
    "llama": Recipe(transformers.LlamaConfig, _GATED, seed=4),
    "granite": Recipe(transformers.GraniteConfig, _GATED | _GRANITE, seed=4),
    "gpt_bigcode": Recipe(transformers.GPTBigCodeConfig, _COMMON, seed=2, sharpness=6.0),
    "gpt2": Recipe(transformers.GPT2Config, _COMMON, seed=4),
    "gpt_neox": Recipe(
        transformers.GPTNeoXConfig, _COMMON | {"intermediate_size": 48}, seed=1, sharpness=20.0
    ),
    "qwen3": Recipe(transformers.Qwen3Config, _GATED, seed=2),
    "mistral": Recipe(transformers.MistralConfig, _GATED | {"sliding_window": 12}, seed=3),
    "gemma3": Recipe(transformers.Gemma3TextConfig, _GATED | _GEMMA3, seed=1, sharpness=6.0),
}
ARCHITECTURES = tuple(RECIPES)
WINDOWED = ("mistral", "gemma3")

_EXPERTS = {"num_experts_per_tok": 2}
_GEMMA2 = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
}
RECIPES |= {
    "qwen2": Recipe(transformers.Qwen2Config, _GATED, seed=1, sharpness=14.0),
    "phi3": Recipe(
        transformers.Phi3Config, _GATED | {"sliding_window": 12}, seed=1, sharpness=14.0
    ),
    "gemma2": Recipe(transformers.Gemma2Config, _GATED | _GEMMA2, seed=3),
    "olmo2": Recipe(transformers.Olmo2Config, _GATED, seed=6, sharpness=200.0),
    "smollm3": Recipe(
        transformers.SmolLM3Config, _GATED | {"no_rope_layers": [1, 0, 1]}, seed=4, sharpness=14.0
    ),
    "starcoder2": Recipe(
        transformers.Starcoder2Config, _GATED | {"sliding_window": 12}, seed=4, sharpness=20.0
    ),
    "qwen3_moe": Recipe(
        transformers.Qwen3MoeConfig,
        _GATED | _EXPERTS | {"num_experts": 6, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
        seed=4,
        sharpness=20.0,
    ),
    "mixtral": Recipe(
        transformers.MixtralConfig,
        _GATED | _EXPERTS | {"num_local_experts": 4, "sliding_window": 12},
        seed=1,
    ),
    "olmoe": Recipe(
        transformers.OlmoeConfig, _GATED | _EXPERTS | {"num_experts": 6}, seed=3, sharpness=14.0
    ),
    "granitemoe": Recipe(
        transformers.GraniteMoeConfig,
        _GATED | _GRANITE | _EXPERTS | {"num_local_experts": 6},
        seed=4,
    ),
}
EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "granitemoe")
"""Mixtures of experts."""
FURTHER = tuple(name for name in RECIPES if name not in ARCHITECTURES)
"""Architectures that only tests/decoding/test_exact.py runs."""


def config(architecture: str = "llama", **changes: Any) -> PreTrainedConfig:
    """Return the config of a tiny base, with some settings changed."""
    recipe = RECIPES[architecture]
    return recipe.config(**(recipe.settings | changes))


@functools.cache
def base(
    architecture: str = "llama",
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    **changes: Any,
) -> FrozenBase:
    """Return a random base: the same weights for every attention, dtype and device.

    It is cached and shared by all tests. `changes` are settings of its config.
    """
    return own_base(architecture, attention, dtype, device, **changes)


def own_base(
    architecture: str = "llama",
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    *,
    compile: bool | None = False,
    **changes: Any,
) -> FrozenBase:
    """Return a base like `base` that is not shared, for tests that change or compile it."""
    recipe = RECIPES[architecture]
    if architecture == "gemma2":
        # transformers has no sdpa for it
        attention = "eager"
    # sampled on the CPU, so the weights are equal on every device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(
            config(architecture, **changes), attn_implementation=attention, dtype=torch.float32
        )
    _sharpen(model, recipe)
    torch.nn.Module.to(model, device=device, dtype=dtype)
    return FrozenBase(model, name=f"tiny-{architecture}", compile=compile)


@functools.cache
def biased() -> FrozenBase:
    """Return a base whose lm_head has a bias, as those of Phi and GPT-J."""
    config = AutoConfig.for_model("phi", **_COMMON, intermediate_size=48)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        torch.nn.init.normal_(model.lm_head.bias)
    return FrozenBase(model, name="tiny-phi")


def saved(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Save a random base in float32, with the tokenizer of recipes/tiny_code; return its folder."""
    author = data_dir("recipes") / "tiny_code" / "base"
    tokenizer = AutoTokenizer.from_pretrained(author)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    recipe = RECIPES[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(
            config(architecture, vocab_size=len(tokenizer), **special | changes),
            dtype=torch.float32,
        )
    _sharpen(model, recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _sharpen(model: PreTrainedModel, recipe: Recipe) -> None:
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_" not in name:
            parameter.data.mul_(recipe.sharpness)


def module(head: Head, prefix: str, column: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an MTP head by published names: see `MODULES` in heads/kinds/mtp.py."""
    parts, named = {ours: theirs[column] for ours, theirs in MODULES.items()}, {}
    for name, value in head.state_dict().items():
        part, what = name.removeprefix("layer.mtp_block.").rsplit(".", 1)
        inner = "layers.0." if prefix == "mtp." else ""
        named[f"{prefix}{parts.get(part, inner + part)}.{what}"] = value.clone().contiguous()
    return named


def prompts() -> list[list[int]]:
    """Return three ragged prompts."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


@functools.cache
def continuations(
    architecture: str = "llama",
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    **changes: Any,
) -> list[list[int]]:
    """Return the greedy continuation of each prompt, by one full forward per token.

    It uses no cache and no mask of ours: all other decoding is compared with it.
    """
    model = base(architecture, "eager", dtype, device, **changes).model
    return [_continue(model, prompt) for prompt in prompts()]


@torch.inference_mode()
def _continue(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    text = torch.tensor([prompt], device=model.device)
    for _ in range(NEW_TOKENS):
        chosen = model(input_ids=text, use_cache=False).logits[:, -1:].argmax(-1)
        text = torch.cat([text, chosen], dim=1)
    return text[0, len(prompt) :].tolist()


def oracle(
    depth: int, architecture: str = "llama", *, rate: float = 1.0, device: torch.device = CPU
) -> Oracle:
    """Return the drafter that knows the reference continuations, on a device."""
    pairs = zip(prompts(), continuations(architecture), strict=True)
    texts = [prompt + continuation for prompt, continuation in pairs]
    return Oracle(texts, depth, VOCAB, rate=rate, device=device)
