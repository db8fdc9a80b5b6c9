"""Limits of a process below those of its machine: containers, Slurm jobs, ulimit, affinity.

A file of its own without torch: a command reads the number of CPUs before it loads torch.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit() -> float:
    """Return the bytes that this process may use; infinity without a limit."""
    return float(min([_address_space(), *(limit for limit, _ in _memory_groups())]))


def memory_left() -> float:
    """Return the bytes that this process may still allocate; infinity without a limit."""
    pages = Path("/proc/self/statm")
    reserved = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.is_file() else 0
    left = [limit - used for limit, used in _memory_groups()]
    return max(0.0, float(min([_address_space() - reserved, *left])))


def num_cpus() -> int:
    """Return the CPUs that this process may use: those of its affinity, within its quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [float(count or 1)]
    for folder in _group_folders("cpu"):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
            quotas += [quota / period] if quota > 0 else []
    return max(1, ceil(min(quotas)))


def _address_space() -> float:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def _memory_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of each cgroup with a limit; files in its cache are not used."""
    for folder in _group_folders("memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # a group without a limit has the text `max`
            with suppress(OSError, ValueError):
                stat = (folder / "memory.stat").read_text().splitlines()
                counts = dict(line.split() for line in stat)
                used_bytes = int((folder / used).read_text()) - int(counts.get(cached, 0))
                yield int((folder / limit).read_text()), used_bytes


def _group_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups, version 1 or 2, up to the root."""
    with suppress(OSError, ValueError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = CGROUPS / controllers if controllers else CGROUPS
                # a container sees its own group at the root, whatever its path is
                for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                    if folder.is_relative_to(root):
                        yield folder
