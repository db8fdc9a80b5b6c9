"""Fingerprints of a base's weights: an exact one for results, and one stored in each head."""

import hashlib
import json

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.sharding import whole
from specheads.core.foreign import BOOKKEEPING

TABLE_SAMPLES = 4096
WEIGHT_SAMPLES = 256
"""Numbers sampled from each of the two tables, and from each other tensor."""


def exact_fingerprint(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a hash of the weights in their dtype (samples of each tensor) and the vocabulary."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        flat = whole(value.detach()).flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().cpu()
        digest.update(f"{name}{tuple(value.shape)}".encode() + sample.numpy().tobytes())
    if tokenizer is not None:
        digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()[:32]


def config_fingerprint(config: PreTrainedConfig) -> str:
    """Return a hash of the settings that change what a base computes, such as `rope_theta`."""
    settings = config.to_diff_dict().items()
    relevant = {
        name: value for name, value in settings if name not in BOOKKEEPING and name[0] != "_"
    }
    text = json.dumps(relevant, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def base_fingerprint(model: nn.Module, embedding: Tensor, projection: Tensor) -> str:
    """Return a fingerprint that distinguishes a base from fine-tuned versions of it.

    Samples are rounded to bfloat16, so loads of one checkpoint in another dtype agree. Names of
    tensors are ignored; the projection is the unscaled one. The result is `tables_fingerprint`, a
    hyphen, and 16 hex digits of all parameters.
    """
    samples = {_sample(whole(value.detach()), WEIGHT_SAMPLES) for value in model.parameters()}
    weights = hashlib.sha256(b"".join(sorted(samples))).hexdigest()[:16]
    return f"{tables_fingerprint(embedding, projection)}-{weights}"


def tables_fingerprint(
    embedding: Float[Tensor, "vocab width"], projection: Float[Tensor, "vocab width"]
) -> str:
    """Return the first half of `base_fingerprint`, which engines with fused layers can compute.

    It does not detect changes of inner layers, such as LoRA, that leave the two tables unchanged.
    """
    samples = _sample(embedding, TABLE_SAMPLES) + _sample(projection, TABLE_SAMPLES)
    return hashlib.sha256(samples).hexdigest()[:16]


def _sample(value: Shaped[Tensor, "*any"], count: int) -> bytes:
    """Return the shape of a tensor and about `count` of its numbers, rounded."""
    value = torch.atleast_1d(value.detach())
    # an even stride would sample only a few columns of most matrices
    stride = max(1, value.numel() // count) | 1
    positions = torch.arange(0, value.numel(), stride, device=value.device)
    numbers = value[torch.unravel_index(positions, value.shape)].float()
    # float16 keeps fewer digits of smaller numbers
    rounded = numbers.masked_fill(numbers.abs() < 2.0**-14, 0).to(torch.bfloat16)
    return f"{tuple(value.shape)}".encode() + rounded.view(torch.int16).cpu().numpy().tobytes()
