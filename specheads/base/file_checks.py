"""Checks of the files of a base: errors in one line, and settings that transformers ignores.

transformers stores settings of config.json that it does not know, and computes without them. They
are refused if they matter. Settings that shape tensors need no check, because the weights must
match config.json exactly. `sliding_window` needs none either: many configs have one that their
architecture ignored in training too.
"""

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, cast

from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.utils import are_progress_bars_disabled
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from specheads.base.masks import sources
from specheads.core.errors import InputError
from specheads.core.foreign import refuse_unused

REWRITE = "name another, or write the folder again with save_pretrained"
FIX_CONFIG = "fix config.json, or write both again with save_pretrained"
MTP_MODULES = re.compile(r"(model\.)?mtp(_layers\.\d+)?\.")
"""Tensors of a module for multi-token prediction, which a base may contain. transformers ignores
them. A head of kind `mtp` is loaded from it: see heads/kinds/mtp.py."""


@contextmanager
def reading(content: str, source: str, remedy: str = REWRITE) -> Iterator[None]:
    """Name what of a base cannot be read; hide transformers' tables and progress bars."""
    # transformers' switch also changes the Hub client's bars, which may be off already
    shows_bars = logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # unlike Path.exists it accepts a name that is too long
        if isinstance(error, OSError) and not os.path.exists(source):  # noqa: PTH110
            raise InputError(
                f"a base must be a folder, a Hub id or a GGUF file, got {source!r:.200}: there is "
                f"no such folder, and the Hub gives {reason(error)}; correct its name, or "
                f"{'unset HF_HUB_OFFLINE' if HF_HUB_OFFLINE else 'check the network'}"
            ) from error
        # a damaged file can raise any error in transformers, and a bare Exception in tokenizers
        raise InputError(
            f"a base must be a folder or a Hub id that transformers can load, got "
            f"{source!r:.200}, whose {content} it cannot read ({reason(error)}); {remedy}"
        ) from error
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """Return a library's error message in one short line."""
    return f"{type(error).__name__}: {shorten(str(error), 160)}"


def refuse_mismatch(source: str, info: dict[str, Any], remedy: str = FIX_CONFIG) -> None:
    """Refuse weights that do not match config.json; missing ones would be initialised randomly."""
    shapes = [f"{name} of {[*has]} for {[*wants]}" for name, has, wants in info["mismatched_keys"]]
    unexpected = sorted(info["unexpected_keys"])
    mismatches = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": [name for name in unexpected if not MTP_MODULES.match(name)],
        "of another shape": sorted(shapes),
    }
    listed = [
        f"{mismatch} {', '.join(names[:2])}{f' and {len(names) - 2} more' if names[2:] else ''}"
        for mismatch, names in mismatches.items()
        if names
    ]
    if listed:
        raise InputError(
            f"the weights of a base must match its config.json, and those of {source!r} do not: "
            f"{'; '.join(listed)}; {remedy}"
        )


COMPUTES = re.compile(
    "attn|attention|layer_types|rope|rotary|alibi|position_emb|sink|clip|residual|softcap|scal[ei]"
    "|multiplier|logit|norm|eps|hidden_act|activation|act_fn|glu|rout|topk|expert|scoring|n_group"
)
"""Names of settings that change what is computed, without a tensor of their own."""
TRAINING = re.compile("drop|loss|jitter|init_|output_|flash|fp32|implementation|head_dim|fuse")
"""Names of settings that change training or speed only, or the shape of a tensor."""
ROPE = {"rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor"}
"""Settings that transformers moves into `rope_parameters`."""

COMPUTED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_rotary_emb": 64},
    "codegen": {"rotary": True, "scale_attn_weights": True},
    "cohere2": {
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "use_gated_activation": True,
    },
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "granitemoehybrid": {"normalization_function": "rmsnorm"},
    "hunyuan_v1_dense": {"norm_type": "rms", "use_qk_norm": True, "use_rotary_pos_emb": True},
    "jamba": {"mamba_inner_layernorms": True},
    "kimi_linear": {
        **{"moe_router_activation_func": "sigmoid", "use_grouped_topk": True},
        "rope_theta": 10_000,
    },
    "lfm2": {"block_use_swiglu": True},
    "llama": {"activation": "swiglu"},
    "mamba": {"rms_norm": True},
    "mamba2": {"rms_norm": True},
    "nemotron_h": {"rope_theta": 10_000},
    "stablelm": {"rope_pct": 0.25},
    "starcoder2": {
        "activation_function": "gelu",
        "norm_type": "layer_norm",
        "scale_attn_weights": True,
    },
}
"""Published settings that a class ignores, with the value that its code computes anyway."""
NEUTRAL = {"factor": 1, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1}
"""Parameters of a rotary embedding with the value that changes nothing."""
QUOTED = r"[\"'](\w+)[\"']"
REMEDY = (
    "use a base whose class in transformers has them, or remove from config.json what has no effect"
)
TOKENIZER_REMEDY = (
    "write the tokenizer again with save_pretrained so that its tokenizer.json has them, or remove "
    "them from tokenizer_config.json"
)
CLASSES: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
"""Auto classes of transformers for a base, with their classes by config."""


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads a base with this config, or None for an unknown config."""
    return next((auto for auto, classes in CLASSES.items() if type(config) in classes), None)


def attention_of(config: PreTrainedConfig, attention: str) -> str:
    """Return the attention, or "eager" in place of "sdpa" if the class lacks it (Gemma 2)."""
    model = CLASSES[auto_class(config)][type(config)]
    return "eager" if attention == "sdpa" and not model._supports_sdpa else attention


def refuse_ignored(
    config: PreTrainedConfig, settings: dict[str, Any], outer: PreTrainedConfig | None = None
) -> None:
    """Refuse settings that the class of a base ignores and that would change its logits, by name.

    A setting passes if a known one with a similar name has the same value. `outer` is the config of
    the vision-language model around it, if any.
    """
    code = _code(config, outer)
    code_words = {*re.findall(r"\w+", code)} | (
        ROPE if hasattr(type(config), "rope_parameters") else set()
    )
    present = {name: value for name, value in settings.items() if name in code_words}
    ignored = {
        name: value
        for name, value in settings.items()
        if COMPUTES.search(name) and not TRAINING.search(name) and name not in code_words
        # a factor of 1 changes nothing
        if type(value) is bool
        or not (
            value == 1
            or any(
                _is_same_setting(name, other_name) and value == present[other_name]
                for other_name in present
            )
        )
    }
    fixed = {"layer_types": "full_attention"} | COMPUTED.get(config.model_type, {})
    ropes = _ignored_ropes(config, {*re.findall(QUOTED, code)})
    refuse_unused(type(config).__name__, ignored, *ropes, used=(), fixed=fixed, remedy=REMEDY)
    inner = getattr(config, "text_config", None)
    if isinstance(inner, PreTrainedConfig) and isinstance(settings.get("text_config"), dict):
        refuse_ignored(inner, settings["text_config"], config)


def _code(config: PreTrainedConfig, outer: PreTrainedConfig | None) -> str:
    """Return the code of a config's class and of its model, which may be a part of another one."""
    loaded = config if auto_class(config) or outer is None else outer
    model = CLASSES.get(auto_class(loaded), {}).get(type(loaded), None)
    return "\n".join(sources(code for code in (type(config), model) if code))


def _is_same_setting(name: str, other_name: str) -> bool:
    """Return whether one name has the words of the other, as `norm_eps` and `layer_norm_eps`."""
    # words may be shortened: act and activation, tok and token
    words, other_words = ({word[:3] for word in text.split("_")} for text in (name, other_name))
    return words <= other_words or other_words <= words


def _ignored_ropes(config: Any, code_words: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each rotary embedding that the model's code does not read."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        scaled = ROPE_INIT_FUNCTIONS.get(kind)
        used = {"type", "rope_theta", "original_max_position_embeddings", *code_words} - {
            "rope_type"
        }
        if scaled or kind == "default" or kind in code_words:
            used.add("rope_type")
        if scaled:
            used.update(re.findall(QUOTED, inspect.getsource(scaled)))
        # a model rotates a part of its heads only if its own code does
        used -= {"partial_rotary_factor"} - code_words
        ignored = {name: value for name, value in rope.items() if name not in used}
        yield {f"rope.{n}": value for n, value in ignored.items() if value != NEUTRAL.get(n, 1)}


def honour_tokenizer(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> None:
    """Honour in place, or refuse, the settings of tokenizer_config.json that change token ids.

    With a tokenizer.json, transformers drops several of them. The token before a text is added
    here. An end token needs nothing: a document ends with one anyway, and a prompt never does.
    """
    bos, vocabulary = tokenizer.bos_token_id, tokenizer.get_vocab()
    wrong: dict[str, Any] = {}
    if settings.get("add_bos_token") is True and tokenizer("a")["input_ids"][:1] != [bos]:
        if bos is None or not tokenizer.is_fast:
            wrong["add_bos_token"] = True
        else:
            cast(Any, tokenizer).add_bos_token = True
    if settings.get("add_prefix_space") is True and tokenizer.tokenize("a") == ["a"]:
        wrong["add_prefix_space"] = True
    if settings.get("do_lower_case") is True and tokenizer.tokenize("A") != tokenizer.tokenize("a"):
        wrong["do_lower_case"] = True
    for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
        if vocabulary.get(_token_text(token)) != int(token_id):
            wrong[f"added_tokens_decoder.{token_id}"] = _token_text(token)
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = settings.get(name) or []
        tokens = tokens.values() if isinstance(tokens, dict) else tokens
        if missing := [
            _token_text(token) for token in tokens if _token_text(token) not in vocabulary
        ]:
            wrong[name] = missing
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        wrong["chat_template"] = [*templates]
    refuse_unused("the tokenizer", wrong, used=(), remedy=TOKENIZER_REMEDY)


def _token_text(token: Any) -> str:
    """Return the text of a token, which may be a dictionary with its properties."""
    return token["content"] if isinstance(token, dict) else token
