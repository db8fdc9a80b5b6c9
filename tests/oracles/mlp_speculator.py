"""MLP speculators as TGI reads them.

Source: fms-extras models/speculator.py; text-generation-inference server/layers/mlp.py.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.export.write import LevelDraft
from tests.oracles.shared import BaseView, Stored, read_config, rms
from tests.oracles.shared import require as need

EPSILON = 1e-6


def tgi(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Read the first copy of each tied tensor, and the second projection, as TGI does.

    TGI computes the weights of state and token from `--speculate`, so that number must equal
    n_predict. Other readers of the format use all levels, so the copies must be equal.
    """
    config = read_config(folder)
    need(config, model_type="mlp_speculator", tie_weights=True, n_predict=depth)
    need(config, architectures=["MLPSpeculatorPreTrainedModel"])
    if not config.get("base_model_name_or_path") or len(config["top_k_tokens_per_head"]) != depth:
        raise InputError("TGI needs base_model_name_or_path, and top_k_tokens_per_head a level")
    stored = Stored(folder / "model.safetensors")
    width, vocab, inner = base.hidden.shape[1], len(base.embedding), config["inner_dim"]
    need(config, emb_dim=width, vocab_size=vocab)
    shapes = {"emb.weight": (vocab, inner), "head.weight": (vocab, inner)}
    shapes |= {"ln.weight": (inner,), "ln.bias": (inner,)}
    tied = {name: _tied(stored, name, shapes[name], range(depth)) for name in shapes}
    first = stored.take("speculator.proj.0.weight", inner, width)
    later = _tied(stored, "proj.weight", (inner, inner), range(1, depth))
    stored.close()
    state = _scaled(base.hidden) if config["scale_input"] else base.hidden
    old, new = weigh(depth, inner)
    for level in range(depth):
        embedded = tied["emb.weight"][base.tokens.roll(-1 - level)]
        mixed = old * (state @ (later if level else first).T) + new * embedded
        state = _gelu(rms(mixed, tied["ln.weight"], EPSILON) + tied["ln.bias"])
        yield LevelDraft(state @ tied["head.weight"].T, torch.arange(vocab))


def _tied(stored: Stored, name: str, shape: tuple[int, ...], levels: range) -> Tensor:
    module, _, suffix = name.partition(".")
    copies = [stored.take(f"speculator.{module}.{level}.{suffix}", *shape) for level in levels]
    for level, copy in zip(levels, copies, strict=True):
        if not torch.equal(copy, copies[0]):
            raise InputError(f"tied weights must agree: {module}.{level} differs from the first")
    return copies[0]


def weigh(depth: int, inner: int) -> tuple[float, float]:
    """Return the weights of state and token; half of the first state's energy is left at the end.

    >>> [round(value, 6) for value in weigh(3, 4096)]
    [0.890899, 20.554837]
    """
    old = 0.5 ** (0.5 / depth)
    return old, math.sqrt((1 - old**2) * inner / 2)


def _scaled(hidden: Tensor) -> Tensor:
    return hidden / (2 * (hidden.pow(2).mean(-1, keepdim=True) + EPSILON)).sqrt()


def _gelu(values: Tensor) -> Tensor:
    return values * 0.5 * (1 + torch.erf(values / math.sqrt(2)))
