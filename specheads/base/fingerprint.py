"""Fingerprints of a base's weights: one for results and resuming, one that a head carries."""

import hashlib

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.sharding import whole

TABLE_SAMPLES = 4096
WEIGHT_SAMPLES = 256
"""Numbers looked at in each of the two tables, and in each other tensor."""


def exact_fingerprint(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Hash the weights (evenly spaced samples of each tensor) as they are, and the vocabulary.

    The same weights in another dtype are others here.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        flat = whole(value.detach()).flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().cpu()
        digest.update(f"{name}{tuple(value.shape)}".encode() + sample.numpy().tobytes())
    if tokenizer is not None:
        digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()[:32]


def base_fingerprint(model: nn.Module, embedding: Tensor, projection: Tensor) -> str:
    """Return what tells a base from its fine-tuned siblings, in whatever dtype it was loaded.

    Samples are rounded to bfloat16 first, so float32, float64 and bfloat16 loads of one checkpoint
    agree; a float16 load does where the checkpoint is in 16 bits. A change is seen where it moves
    one of the samples to another bfloat16 number: 2**-8 of a weight's value moves each, and a
    change of all weights by a share of 2**-8 / samples is likely to move one. Of a checkpoint in
    bfloat16 every sample that changed at all is seen. Names of tensors do not count.

    The projection is the unscaled one. What is returned is `tables_fingerprint`, a hyphen, and 16
    hex digits of all parameters.
    """
    found = {_sample(whole(value.detach()), WEIGHT_SAMPLES) for value in model.parameters()}
    weights = hashlib.sha256(b"".join(sorted(found))).hexdigest()[:16]
    return f"{tables_fingerprint(embedding, projection)}-{weights}"


def tables_fingerprint(
    embedding: Float[Tensor, "vocab width"], projection: Float[Tensor, "vocab width"]
) -> str:
    """Return the first half of `base_fingerprint`: what engines that fuse layers can compute too.

    A sibling whose two tables stayed the same, as under LoRA of inner layers, is not seen by it.
    """
    samples = _sample(embedding, TABLE_SAMPLES) + _sample(projection, TABLE_SAMPLES)
    return hashlib.sha256(samples).hexdigest()[:16]


def _sample(value: Shaped[Tensor, "*any"], count: int) -> bytes:
    """Return about `count` numbers of a tensor, rounded, behind its shape."""
    value = torch.atleast_1d(value.detach())
    # an even stride would stay in a few columns of most matrices
    stride = max(1, value.numel() // count) | 1
    places = torch.arange(0, value.numel(), stride, device=value.device)
    numbers = value[torch.unravel_index(places, value.shape)].float()
    # float16 keeps fewer digits of smaller numbers
    rounded = numbers.masked_fill(numbers.abs() < 2.0**-14, 0).to(torch.bfloat16)
    return f"{tuple(value.shape)}".encode() + rounded.view(torch.int16).cpu().numpy().tobytes()
