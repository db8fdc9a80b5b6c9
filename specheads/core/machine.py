"""This machine: its processor, its memory, and copies to its devices."""

import os
import platform
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

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


STATUS, MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int:
    """Return the bytes that nobody uses now, a host's caches of files counted as unused."""
    if device.type == "cpu" and MEMORY.is_file():
        return _named(MEMORY, "MemAvailable")
    return device_bytes(device)


def held_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds of a device, its libraries' on a host."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return _named(STATUS, "VmRSS") if STATUS.is_file() else process_peak_bytes()


def restart_peak(device: torch.device) -> None:
    """Have `peak_bytes` forget what was; where a system cannot, it goes on from its start."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process held of a device since `restart_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _named(STATUS, "VmHWM") if STATUS.is_file() else process_peak_bytes()


def process_peak_bytes() -> int:
    """Return the most bytes of a host that this process ever held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kibibytes on Linux, bytes on macOS
    return most if sys.platform == "darwin" else most * 1024


def peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: of a GPU since its last reset, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return process_peak_bytes() / 2**30


def synchronise(device: torch.device) -> None:
    """Wait until all work queued on a device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _named(file: Path, name: str) -> int:
    lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on a device, which goes on with its work meanwhile.

    CUDA copies in the background only from pinned memory. torch keeps that until the copy is made.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


def device_bytes(device: torch.device) -> int:
    """Return the bytes that may be asked for: what is free on CUDA, all memory of a host."""
    if device.type == "cuda":
        # what torch holds and nobody uses is free too
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return host_bytes() if device.type == "cpu" else sys.maxsize


def host_bytes() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
