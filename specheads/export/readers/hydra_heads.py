"""Hydra as our plug-in reads it: no engine of today loads it by itself.

Source: zankner/Hydra, hydra/model/hydra_heads/mlp_head.py and prefix_mlp_head.py.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.export.readers import BaseView, Guess, Stored, open_own, rms, rotate, silu

EPSILON = 1e-5


def own(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Read our own layout: head k reads the state and the k + 1 embeddings after it."""
    config, stored, ids = open_own(folder, base, depth, "hydra_heads")
    width = base.hidden.shape[1]
    read = [prefixed(stored, config, base.hidden) if config["prefix"] else base.hidden]
    for level in range(depth):
        read.append(base.embedding[base.tokens.roll(-1 - level)])
        state = torch.cat(read, dim=-1)
        for layer in range(config["num_layers"]):
            state = _block(stored, f"blocks.{level}.{layer}", state, width)
        weight = stored.take(f"head.{level}.weight", len(ids), width)
        yield Guess(state @ weight.T + stored.take(f"head.{level}.bias", len(ids)), ids)
    stored.close()


def _block(stored: Stored, name: str, state: Tensor, width: int) -> Tensor:
    wide = state.shape[-1]

    def linear(part: str) -> Tensor:
        weight = stored.take(f"{name}.{part}.weight", width, wide)
        return state @ weight.T + stored.take(f"{name}.{part}.bias", width)

    return (linear("res_connection") if wide > width else state) + silu(linear("linear"))


def prefixed(stored: Stored, config: dict[str, Any], hidden: Tensor) -> Tensor:
    """Read one Llama layer over the hidden states of the text, then a norm."""
    time, width = hidden.shape
    heads = config["attention_heads"] or max(1, width // 64)
    shared, size = config["key_value_heads"] or heads, width // heads
    inner = config["inner_dim"] or math.ceil(width / 6) * 16
    take = stored.take

    def norm(name: str, values: Tensor) -> Tensor:
        return rms(values, take(f"prefix.{name}.weight", width), EPSILON)

    def project(name: str, values: Tensor, rows: int) -> Tensor:
        return values @ take(f"prefix.{name}.weight", rows, values.shape[-1]).T

    normed, places = norm("input_layernorm", hidden), torch.arange(time)
    queries, keys, values = (
        project(f"self_attn.{name}_proj", normed, count * size).view(time, count, size)
        for name, count in (("q", heads), ("k", shared), ("v", shared))
    )
    queries = rotate(queries, places, config["rope_theta"])
    keys = rotate(keys, places, config["rope_theta"]).repeat_interleave(heads // shared, 1)
    scores = torch.einsum("thd,shd->hts", queries, keys) / math.sqrt(size)
    weights = scores.masked_fill(places[:, None] < places, -math.inf).softmax(-1)
    values = values.repeat_interleave(heads // shared, 1)
    mixed = torch.einsum("hts,shd->thd", weights, values).reshape(time, -1)
    stream = hidden + project("self_attn.o_proj", mixed, width)
    normed = norm("post_attention_layernorm", stream)
    gate = silu(project("mlp.gate_proj", normed, inner))
    stream = stream + project("mlp.down_proj", gate * project("mlp.up_proj", normed, inner), width)
    return norm("norm", stream)
