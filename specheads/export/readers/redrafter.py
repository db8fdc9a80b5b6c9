"""ReDrafter as our plug-in reads it: no engine of today loads it by itself.

Source: apple/ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from specheads.export.readers import BaseView, Guess, open_own, silu


def own(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Read our own layout: a cell or a sum over embeddings, then blocks over [hidden, state]."""
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
        yield Guess(out @ head.T, ids)
