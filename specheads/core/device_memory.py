"""How much memory is free, and how much this process holds and has held at most."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from specheads.core.bounds import device_bytes

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


def _named(file: Path, name: str) -> int:
    lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
