"""Settings of bases, their tokenizers and adapters: honoured, or refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.base import lora
from specheads.base.loading import load_config, load_tokenizer
from specheads.core.errors import InputError
from specheads.data.encode import encode_prompt
from tests import tiny
from tests.base.test_model import SHIPPED

FAMILIES = json.loads((Path(__file__).with_name("families.json")).read_text())
"""config.json of published families, with small sizes, from memory."""


def read(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    load_config(str(folder), revision="main")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configs_are_accepted(family: str, tmp_path: Path):
    read(tmp_path, FAMILIES[family])


LLAMA3 = FAMILIES["llama3.1"]["rope_scaling"]
VICUNA = FAMILIES["llava-1.5"]["text_config"]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "setting", "message", "neutral"),
    [
        ("llama3", {"logit_scale": 0.5}, "logit_scale=0.5", {"logit_scale": 1.0}),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50", {"x_scale": None}),
        (
            "llama3",
            {"scale_emb": 12, "residual_multiplier": 0.2},
            "scale_emb=12, residual_mult",
            {},
        ),
        ("llama3", {"use_qk_norm": True}, "use_qk_norm=True", {"use_qk_norm": False}),
        ("llama3", {"attention_sink_size": 4}, "attention_sink_size=4", {"planted_setting": 3}),
        ("llama3", {"hidden_activation": "gelu"}, "hidden_activ", {"hidden_activation": "silu"}),
        ("llama3", {"num_experts_per_tok": 3}, "num_experts_per_tok=3", {"attention_dropout": 0.1}),
        ("llama3", WINDOW, "layer_types=", {"sliding_window": 8}),
        ("llama3", {"partial_rotary_factor": 0.5}, "rope.partial", {"partial_rotary_factor": 1.0}),
        (
            "llama3",
            {"rope_scaling": {"factor": 4}},
            "rope.factor=4",
            {"rope_scaling": {"factor": 1}},
        ),
        ("llama3", {"rope_scaling": {"type": "warp"}}, "rope_type='warp'", {"rope_scaling": None}),
        ("llama3.1", {"rope_scaling": LLAMA3 | {"mscale": 0.7}}, "rope.mscale=0.7", {}),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'", {}),
        ("granite4", {"normalization_function": "layernorm"}, "tion_function='layernorm'", {}),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu=False", {}),
        ("llava-1.5", {"text_config": VICUNA | {"residual_multiplier": 0.2}}, "residual_mul", {}),
    ],
)
def test_a_setting_that_transformers_ignores_is_refused_and_its_neutral_value_passes(
    family: str, setting: dict, message: str, neutral: dict, tmp_path: Path
):
    with pytest.raises(InputError, match="every setting of a config must be honoured") as caught:
        read(tmp_path, FAMILIES[family] | setting)
    assert message in str(caught.value)
    read(tmp_path, FAMILIES[family] | neutral)


QUIET = pytest.mark.filterwarnings("ignore")
"""peft warns about names of transformers, and about biases that it trains."""

TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "k_proj"]}


def adapter_folder(folder: Path, **settings: Any) -> torch.Tensor:
    """Save an adapter of random weights for the tiny base; return the logits of peft's layers."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, **(TARGETS | settings))
    wrapped = get_peft_model(copy.deepcopy(tiny.base().model), config).double()
    for value in wrapped.parameters():
        value.data += 0.05 * value.requires_grad * torch.randn_like(value)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return wrapped.eval()(input_ids=TOKENS).logits.detach()


TOKENS = torch.tensor([[3, 4, 7, 9, 3, 1, 2, 8]])


@QUIET
@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2}},
        {"alpha_pattern": {"layers.1.self_attn.q_proj": 99}},
        {"use_rslora": True, "lora_dropout": 0.5},
        {"use_dora": True},
        {"use_qalora": True, "qalora_group_size": 8},
        {"modules_to_save": ["lm_head", "norm"]},
        {"trainable_token_indices": [3, 4]},
        {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["k_proj"]},
        {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]},
        {"target_modules": ["embed_tokens", "lm_head"], "fan_in_fan_out": False},
        {"init_lora_weights": "orthogonal"},
    ],
)
def test_an_honoured_setting_of_an_adapter_gives_the_logits_of_peft(settings, tmp_path: Path):
    expected = adapter_folder(tmp_path, **settings)
    model = copy.deepcopy(tiny.base().model)
    lora.merge(model, tmp_path)
    logits = model(input_ids=TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert (logits - tiny.base().model(input_ids=TOKENS).logits).abs().max() > 0.1


@QUIET
def test_biases_of_an_adapter_are_merged(tmp_path: Path):
    base = tiny.own_base("gpt2").model
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], bias="all")
    wrapped = get_peft_model(copy.deepcopy(base), config).eval()
    for value in wrapped.parameters():
        value.data += 0.05 * value.requires_grad
    wrapped.save_pretrained(str(tmp_path), save_embedding_layers=False)
    lora.merge(base, tmp_path)
    expected = wrapped(input_ids=TOKENS).logits
    torch.testing.assert_close(base(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-9)


@QUIET
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    ],
    ids=str,
)
def test_an_adapter_on_a_tied_matrix_changes_only_its_own_layer(settings: dict, tmp_path: Path):
    base = copy.deepcopy(tiny.base(tie_word_embeddings=True).model)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **settings)
    wrapped = get_peft_model(copy.deepcopy(base), config).double()
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    expected = wrapped(input_ids=TOKENS).logits
    lora.merge(base, tmp_path / "adapter")
    torch.testing.assert_close(base(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-9)
    base.save_pretrained(tmp_path / "merged")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(stored(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-9)


@QUIET
@pytest.mark.parametrize(
    ("setting", "neutral"),
    [
        ({"planted_setting": 3}, {"planted_setting": None}),
        ({"layer_replication": [[0, 3], [1, 3]]}, {"layer_replication": None}),
        ({"alora_invocation_tokens": [1, 2]}, {"alora_invocation_tokens": []}),
        ({"lora_bias": True}, {"lora_bias": False}),
        ({"init_lora_weights": "pissa"}, {"init_lora_weights": "gaussian"}),
        ({"use_bdlora": {"x": 1}, "arrow_config": {"top_k": 1}}, {"loftq_config": {}}),
    ],
)
def test_a_setting_of_an_adapter_that_is_not_merged_is_refused(setting, neutral, tmp_path: Path):
    adapter_folder(tmp_path)
    model, file = copy.deepcopy(tiny.base().model), tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | setting))
    with pytest.raises(InputError, match=r"base\.adapter does not support") as caught:
        lora.merge(model, tmp_path)
    assert all(f"{name}={value!r}" in str(caught.value) for name, value in setting.items())
    file.write_text(json.dumps(config | neutral))
    lora.merge(model, tmp_path)


SPECIAL = {"content": "<odd>", "lstrip": False, "rstrip": False, "special": True}


def tokenizer_folder(folder: Path, **settings: Any) -> str:
    """Save a small tokenizer, and change settings in its tokenizer_config.json."""
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(FAMILIES["llama3"]))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(folder)


@pytest.mark.parametrize(
    ("setting", "neutral"),
    [
        ({"add_prefix_space": True}, {"add_prefix_space": False}),
        ({"do_lower_case": True}, {"do_lower_case": False}),
        ({"added_tokens_decoder": {"7": SPECIAL}}, {"added_tokens_decoder": {}}),
        (
            {"additional_special_tokens": ["<odd>"], "extra_special_tokens": ["<|endoftext|>"]},
            {"additional_special_tokens": ["<|endoftext|>"], "planted_setting": 3},
        ),
        (
            {"chat_template": [{"name": "rag", "template": "x"}]},
            {"chat_template": [{"name": n, "template": n} for n in ("default", "rag")]},
        ),
        ({"bos_token": None, "add_bos_token": True}, {"bos_token": None, "add_bos_token": False}),
    ],
)
def test_a_setting_of_a_tokenizer_that_is_dropped_is_refused(setting, neutral, tmp_path: Path):
    folder = tokenizer_folder(tmp_path, **setting)
    with pytest.raises(InputError, match="the tokenizer does not support") as caught:
        load_tokenizer(folder, revision="main")
    assert [*setting][0 if "bos_token" not in setting else 1] in str(caught.value)
    assert load_tokenizer(tokenizer_folder(tmp_path, **neutral), revision="main") is not None


def test_a_tokenizer_adds_the_token_that_its_config_asks_for(tmp_path: Path):
    """transformers drops add_bos_token next to a tokenizer.json."""
    folder = tokenizer_folder(tmp_path, add_bos_token=True, add_eos_token=True)
    plain, tokenizer = (
        AutoTokenizer.from_pretrained(folder),
        load_tokenizer(folder, revision="main"),
    )
    assert tokenizer is not None
    assert encode_prompt(tokenizer, "def f") == [
        tokenizer.bos_token_id,
        *encode_prompt(plain, "def f"),
    ]
