"""Medusa as TGI and vLLM 0.32 read it.

Sources: text-generation-inference server/layers/medusa.py; vLLM 0.32 models/medusa.py and
transformers_utils/configs/medusa.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.export.write import LevelDraft
from tests.oracles.shared import BaseView, Stored, read_config, silu
from tests.oracles.shared import require as need

FILE = "medusa_lm_head.safetensors"


def tgi(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Read `{head}.{layer}.linear.*` and each head's own `{head}.{layers}.weight`.

    With any `architectures` other than the MLP speculator's, TGI serves without a head.
    """
    config = read_config(folder)
    need(config, architectures=None, medusa_num_heads=depth)
    if not config.get("base_model_name_or_path"):
        raise InputError("TGI needs base_model_name_or_path in config.json")
    yield from _fasterdecoding(folder, config, base, depth, biased=True)


def vllm_0_32(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Read the same names; without medusa_fc_bias vLLM 0.32 drops every bias."""
    config = read_config(folder)
    width, vocab = base.hidden.shape[1], len(base.embedding)
    need(config, model_type="medusa", hidden_size=width, vocab_size=vocab, medusa_num_heads=depth)
    stray = [n for n in config if "num" in n and "heads" in n and n != "medusa_num_heads"]
    if stray or config.get("truncated_vocab_size", vocab) != vocab:
        raise InputError(f"vLLM 0.32 misreads {stray or 'truncated_vocab_size'} in config.json")
    biased = config.get("medusa_fc_bias", False)
    yield from _fasterdecoding(folder, config, base, depth, biased=biased)


def _fasterdecoding(
    folder: Path, config: dict[str, Any], base: BaseView, depth: int, *, biased: bool
) -> Iterator[LevelDraft]:
    stored = Stored(folder / FILE)
    width, vocab, layers = base.hidden.shape[1], len(base.embedding), config["medusa_num_layers"]
    for head in range(depth):
        state = base.hidden
        for layer in range(layers):
            state = _block(stored, f"{head}.{layer}.linear", state, biased=biased)
        projection = stored.take(f"{head}.{layers}.weight", vocab, width)
        yield LevelDraft(state @ projection.T, torch.arange(vocab))
    stored.close()


def _block(stored: Stored, name: str, state: Tensor, *, biased: bool = True) -> Tensor:
    width = state.shape[-1]
    weight, bias = stored.take(f"{name}.weight", width, width), stored.take(f"{name}.bias", width)
    return state + silu(state @ weight.T + (bias if biased else 0))
