"""Heads that are trained for a moment on what a tiny base writes, so that drafts are accepted."""

import functools
from typing import Any

import torch

from specheads.core.drafter import Head
from specheads.heads.load import build_for_base, copy_head, fit_to_base
from tests import tiny
from tests.export.trained import train_head

DEPTH = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "dflash": {"num_layers": 1},
    "dflash2": {"num_layers": 1},
    "domino": {"num_layers": 1, "gru_hidden_dim": 32},
    "dspark": {"num_layers": 1},
    "hydra_heads": {"num_layers": 1},
}
"""Settings of kinds whose default has several layers."""


def texts(device: torch.device) -> torch.Tensor:
    """Return the tiny prompts with their continuations, cut to one length."""
    pairs = zip(tiny.prompts(), tiny.continuations("llama", torch.float32, device), strict=True)
    texts = [prompt + continuation for prompt, continuation in pairs]
    length = min(map(len, texts))
    return torch.tensor([text[-length:] for text in texts], device=device)


@functools.cache
def _trained(kind: str, device: torch.device) -> Head:
    base = tiny.base("llama", dtype=torch.float32, device=device)
    torch.manual_seed(1)
    head = build_for_base({"kind": kind, "depth": DEPTH, **SETTINGS.get(kind, {})}, base)
    return train_head(head, base, texts(device), steps=40, learning_rate=5e-3)


def head(kind: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Head:
    """Return a head for the tiny llama of a device in this precision."""
    head = copy_head(_trained(kind, device)).requires_grad_(False)
    # a base in another precision has another fingerprint where weights were cast
    fit_to_base(head, tiny.base("llama", dtype=dtype, device=device), force=True)
    return head.eval()
