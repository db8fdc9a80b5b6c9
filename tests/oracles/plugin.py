"""Hydra, ReDrafter and MTP in our own layout, which the vLLM plug-in reads."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.export.write import LevelDraft
from tests.oracles.llama import Layer
from tests.oracles.shared import BaseView, Stored, open_own, rms, silu

EPSILON = 1e-5


def hydra_heads(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Head k reads the state and the next k + 1 embeddings.

    Source: zankner/Hydra, hydra/model/hydra_heads/mlp_head.py and prefix_mlp_head.py.
    """
    config, stored, ids = open_own(folder, base, depth, "hydra_heads")
    width = base.hidden.shape[1]
    read = [_prefixed(stored, config, base.hidden) if config["prefix"] else base.hidden]
    for level in range(depth):
        read.append(base.embedding[base.tokens.roll(-1 - level)])
        state = torch.cat(read, dim=-1)
        for layer in range(config["num_layers"]):
            name = f"blocks.{level}.{layer}"
            moved = silu(stored.linear(f"{name}.linear", width, state))
            if layer == 0:
                state = stored.linear(f"{name}.res_connection", width, state)
            state = state + moved
        yield LevelDraft(stored.linear(f"head.{level}", len(ids), state), ids)
    stored.close()


def _prefixed(stored: Stored, config: dict[str, Any], hidden: Tensor) -> Tensor:
    """Apply one Llama layer and a norm to the hidden states of the text."""
    width = hidden.shape[1]
    layer = Layer(stored, "prefix", _llama(config, width, EPSILON), width)
    before, after = (
        stored.take(f"prefix.{name}.weight", width) for name in ("input_layernorm", "norm")
    )
    return rms(layer.round(rms(hidden, before, EPSILON), hidden), after, EPSILON)


def redrafter(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Apply a recurrent cell or a sum to embeddings, then blocks to [hidden, state].

    Source: apple/ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py.
    """
    config, stored, ids = open_own(folder, base, depth, "redrafter")
    width = base.hidden.shape[1]
    exit_dim = config["exit_dim"] or 2 * width
    cell, adapter = [], []
    if config["rnn"]:
        cell = [stored.take(f"rnn_{name}.weight", width, width) for name in "wu"]
        cell.append(stored.take("rnn_u.bias", width))
    if exit_dim != 2 * width:
        adapter = [stored.take("input_proj.weight", exit_dim, 2 * width)]
        adapter.append(stored.take("input_proj.bias", exit_dim))
    blocks = [
        [
            stored.take(f"blocks.{layer}.linear.weight", exit_dim, exit_dim),
            stored.take(f"blocks.{layer}.linear.bias", exit_dim),
        ]
        for layer in range(config["num_layers"])
    ]
    head = stored.take("head.weight", len(ids), exit_dim)
    stored.close()
    state = torch.zeros_like(base.hidden)
    for level in range(depth):
        embedded = base.embedding[base.tokens.roll(-1 - level)]
        if cell:
            reads, keeps, shift = cell
            state = silu(embedded @ reads.T + state @ keeps.T + shift)
        else:
            state = state + embedded
        out = torch.cat([base.hidden, state], dim=-1)
        if adapter:
            out = out @ adapter[0].T + adapter[1]
        for weight, bias in blocks:
            out = out + silu(out @ weight.T + bias)
        yield LevelDraft(out @ head.T, ids)


def mtp(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Apply one layer repeatedly to a projection of its output and a token.

    Source: DeepSeek-V3, arXiv:2412.19437, 2.2; vLLM 0.32 models/deepseek_mtp.py, without its zero
    for the first embedding of a text.
    """
    config, stored, ids = open_own(folder, base, depth, "mtp")
    width, epsilon = base.hidden.shape[1], config["epsilon"]
    enorm, hnorm, inner_norm, norm = (
        partial(rms, weight=stored.take(f"{name}.weight", width), epsilon=epsilon)
        for name in ("layer.enorm", "layer.hnorm", "layer.mtp_block.input_layernorm", "norm")
    )
    matrix = stored.take("layer.eh_proj.weight", width, 2 * width)
    layer = Layer(stored, "layer.mtp_block", _llama(config, width, epsilon), width)
    stored.close()
    hidden = base.hidden
    for level in range(depth):
        parts = [enorm(base.embedding[base.tokens.roll(-1 - level)]), hnorm(hidden)]
        if config["hidden_first"]:
            parts.reverse()
        stream = torch.cat(parts, dim=-1) @ matrix.T
        hidden = norm(layer.round(inner_norm(stream), stream))
        yield LevelDraft(hidden @ base.projection[ids].T, ids)


def _llama(config: dict[str, Any], width: int, epsilon: float) -> dict[str, Any]:
    """Translate our settings to the names of a Llama config.json."""
    heads = config["attention_heads"] or max(1, width // 64)
    return {
        "hidden_size": width,
        "intermediate_size": config["inner_dim"] or math.ceil(width / 6) * 16,
        "num_attention_heads": heads,
        "num_key_value_heads": config["key_value_heads"] or heads,
        "head_dim": config.get("head_dim", 0),
        "rope_theta": config["rope_theta"],
        "rope_scaling": config.get("rope_scaling", {}),
        "rms_norm_eps": epsilon,
    }
