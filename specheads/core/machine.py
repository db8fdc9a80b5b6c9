"""This machine: its CPU, its memory, the limits of this process, and copies to devices."""

import ctypes
import os
import platform
import resource
import statistics
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.limits import memory_left, memory_limit

MULTIPLYING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
"""CPU features that decide the speed and dtype of matrix products; the newest last."""


@cache
def processor_name() -> str:
    """Return the model name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its newest feature from `MULTIPLYING`.

    Two CPU generations with one name may differ threefold in matrix products.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return ", ".join((processor_name(), *matrix_instructions()[-1:]))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and settings: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def matrix_instructions() -> list[str]:
    """Return the features in `MULTIPLYING` that the CPU has; empty if unknown."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.is_file() else set()
    return [name for name in MULTIPLYING if name in words]


def computes_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 natively; emulation is slower than float32.

    This depends on the instruction set (AMX implies it) and on oneDNN's ISA limit.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    is_enabled = limit in ("ALL", "DEFAULT") or any(
        name in limit for name in ("BF16", "FP16", "AMX", "AVX10")
    )
    return is_enabled and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


STATUS, MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int:
    """Return the unused bytes; file caches of the host count as unused."""
    if device.type == "cpu" and MEMORY.is_file():
        return int(min(_named(MEMORY, "MemAvailable"), memory_left()))
    return device_bytes(device)


def process_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process uses; on a host, with its libraries."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return _named(STATUS, "VmRSS") if STATUS.is_file() else process_peak_bytes()


def reset_peak_bytes(device: torch.device) -> None:
    """Reset `peak_bytes`; on a system without this, the peak counts from the start."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def return_freed_memory() -> None:
    """Return freed memory to the system; glibc's heap would keep it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes of a device that this process used since `reset_peak_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _named(STATUS, "VmHWM") if STATUS.is_file() else process_peak_bytes()


def process_peak_bytes() -> int:
    """Return the peak bytes of the host that this process has used."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kibibytes on Linux, bytes on macOS
    return peak if sys.platform == "darwin" else peak * 1024


def peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB; on a GPU since the last reset, on a host of the process."""
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
    """Copy a tensor to a device without synchronising.

    CUDA copies asynchronously only from pinned memory; torch keeps it until the copy is done.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


def device_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated: free memory on CUDA, all memory of the host."""
    if device.type == "cuda":
        # memory that torch has reserved but not allocated is free too
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return host_bytes() if device.type == "cpu" else sys.maxsize


def host_bytes() -> int:
    """Return the bytes of memory that this machine has, or this process may use."""
    return int(min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()))


def refuse_bytes(size: int, device: torch.device, content: str, remedy: str) -> None:
    """Refuse an allocation larger than the free memory of CUDA or the whole memory of the host."""
    if size > (room := device_bytes(device)):
        raise InputError(
            f"{content} must fit into the memory of {device}, and needs {size / 2**30:.4g} GiB of "
            f"{room / 2**30:.4g}; {remedy}"
        )


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of this machine in large matrix products, in less than a second."""
    side = 1024 if device.type == "cpu" else 8192
    # does not change the random state
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(side, side, device=device, generator=generator).to(dtype)
    seconds = []
    for _ in range(12):
        synchronise(device)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / statistics.median(seconds)


cached_matmul_rate = cache(matmul_rate)
"""The same FLOP/s, measured once."""
