"""Bases in 8 or 4 bits: which library of those installed makes them, and where it can."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from specheads.core.errors import InputError

LIBRARIES = ("bitsandbytes", "torchao")
"""First come, first taken."""

HOW = ("none", "8bit", "4bit")


def quantisation(how: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' configuration that quantises a base while it is loaded.

    None for "none". "8bit" is LLM.int8() of bitsandbytes or int8 weights of torchao, "4bit" NF4 or
    int4; products are computed in `dtype`. Embeddings and the vocabulary projection stay as they
    are, so heads can borrow them.

    Raises:
        ValueError: The device is not CUDA, or neither library is installed.
    """
    if how not in HOW:
        raise InputError(f"quantization must be one of {', '.join(HOW)}, got {how!r}")
    if how == "none":
        return None
    if device.type != "cuda":
        raise InputError(
            f"a base is quantised on CUDA only, got quantization={how} on {device}; "
            "leave base.quantization out, or set base.device=cuda"
        )
    library = next((name for name in LIBRARIES if find_spec(name)), "")
    if not library:
        raise InputError(
            f"quantization={how} needs {' or '.join(LIBRARIES)}, and neither is installed; "
            "pip install bitsandbytes"
        )
    return _torchao(how) if library == "torchao" else _bitsandbytes(how, dtype)


def _bitsandbytes(how: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    if how == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _torchao(how: str) -> TorchAoConfig:
    # not a dependency: pyright need not find it
    kinds = import_module("torchao.quantization")
    kind = kinds.Int8WeightOnlyConfig if how == "8bit" else kinds.Int4WeightOnlyConfig
    return TorchAoConfig(kind())
