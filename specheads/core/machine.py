"""What this machine is called: times that were measured on one say nothing of another."""

import os
import platform
from functools import cache
from pathlib import Path

import torch

MULTIPLYING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
"""What of a processor decides how fast it multiplies, and in which dtype; the newest last."""


@cache
def processor() -> str:
    """Return the processor's own name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def device_name(device: torch.device) -> str:
    """Return the name of what computes: the GPU's, or the processor's and what it multiplies with.

    Two generations of a processor may bear one name and differ threefold in a product.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return ", ".join((processor(), *instructions()[-1:]))


def dtype_name(dtype: torch.dtype) -> str:
    """Return how files and settings call a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def instructions() -> list[str]:
    """Return what of `MULTIPLYING` the processor has; none where the system does not tell."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.is_file() else set()
    return [name for name in MULTIPLYING if name in words]


def computes_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 itself: emulated it is slower than float32.

    What counts is the instruction set, AMX comes with it, and the newest that oneDNN may use.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    may = most in ("ALL", "DEFAULT") or any(one in most for one in ("BF16", "FP16", "AMX", "AVX10"))
    return may and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def synchronise(device: torch.device) -> None:
    """Wait until all work queued on a device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
