"""Vision-language bases: their text model is decoded and trained on, and pictures are refused."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from tests import tiny
from tests.oracle import Oracle

PICTURE = 5
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
}
TEXT = tiny.RECIPES["llama"].settings
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def config(family: str) -> PreTrainedConfig:
    if family == "llava":
        return transformers.LlavaConfig(
            text_config=transformers.MistralConfig(**TEXT, sliding_window=12),
            vision_config=transformers.CLIPVisionConfig(**VISION),
            image_token_index=PICTURE,
        )
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        windowed = {"sliding_window": 16, "layer_types": kinds, "query_pre_attn_scalar": 8}
        return transformers.Gemma3Config(
            text_config=TEXT | windowed,
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=PICTURE,
            tie_word_embeddings=False,
        )
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE},
        vision_config=QWEN | {"fullatt_block_indexes": [0]},
        image_token_id=PICTURE,
        tie_word_embeddings=False,
    )


@functools.cache
def model(family: str) -> Any:
    torch.manual_seed(1)
    vision_model = AutoModelForImageTextToText.from_config(config(family), dtype=torch.float64)
    for name, parameter in vision_model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(14)
    return vision_model.eval()


FAMILIES = [
    "llava",
    pytest.param("gemma3", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
]
PROMPT = list(range(7, 28))


@torch.inference_mode()
def continuation(vision_model: Any) -> list[int]:
    tokens = torch.tensor([PROMPT])
    for _ in range(tiny.NEW_TOKENS):
        chosen = vision_model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_of_a_vision_language_model_is_a_base_for_text(family: str, tmp_path: Path):
    text = continuation(model(family))
    assert len({*text}) > 12
    model(family).save_pretrained(tmp_path / "base")
    base = FrozenBase.load(tmp_path / "base", dtype="float64", device="cpu")
    tree = policies.Static([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)], "tree")
    oracle = Oracle([PROMPT + text], 3, base.vocab_size, rate=0.7)
    out = generate(base, oracle, [PROMPT], max_new_tokens=tiny.NEW_TOKENS, tree=tree)
    assert out.tokens == [text]
    with pytest.raises(InputError, match=f"token {PICTURE} stands for a picture"):
        generate(base, None, [[9, PICTURE, 9]], max_new_tokens=2)
