"""Limits of containers, Slurm jobs and ulimit, as files of cgroup versions 1 and 2."""

import resource
from pathlib import Path

import pytest

from specheads.core import limits

GIB = 2**30
V2 = {"memory.current": f"{GIB}", "memory.stat": f"anon 1\ninactive_file {GIB // 2}"}
V1 = {"memory.usage_in_bytes": f"{GIB}", "memory.stat": "cache 7\ntotal_inactive_file 0"}
MEMORY = {
    "Slurm step below the job's limit": (
        "0::/system.slice/job_7/step_0",
        {"system.slice/job_7": V2 | {"memory.max": f"{3 * GIB}"}},
        (3 * GIB, 2.5 * GIB),
    ),
    "smallest of two levels": (
        "0::/a/b",
        {"a": V2 | {"memory.max": f"{4 * GIB}"}, "a/b": V2 | {"memory.max": f"{2 * GIB}"}},
        (2 * GIB, 1.5 * GIB),
    ),
    "v2 without a limit": ("0::/", {"": V2 | {"memory.max": "max"}}, (None, None)),
    "v1 of docker, whose path is the host's": (
        "9:cpu,cpuacct:/docker/f00\n5:memory:/docker/f00\n0::/",
        {"memory": V1 | {"memory.limit_in_bytes": f"{2 * GIB}"}},
        (2 * GIB, GIB),
    ),
    "v1 of Slurm": (
        "4:memory:/slurm/uid_0/job_1",
        {"memory/slurm/uid_0/job_1": V1 | {"memory.limit_in_bytes": f"{5 * GIB}"}},
        (5 * GIB, 4 * GIB),
    ),
    "used up": ("0::/", {"": V2 | {"memory.max": f"{GIB // 4}"}}, (GIB // 4, 0)),
    "no cgroups": ("", {}, (None, None)),
}
CPUS = {
    "half a CPU": ("0::/x", {"x": {"cpu.max": "50000 100000"}}, 1),
    "v2 without a quota": ("0::/x", {"x": {"cpu.max": "max 100000"}}, 64),
    "quota of the parent": ("0::/x/y", {"x": {"cpu.max": "350000 100000"}}, 4),
    "v1": (
        "3:cpu,cpuacct:/x",
        {"cpu,cpuacct/x": {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}},
        2,
    ),
    "v1 without a quota": (
        "3:cpu:/x",
        {"cpu/x": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}},
        64,
    ),
}


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(membership: str, groups: dict[str, dict[str, str]]) -> None:
        (tmp_path / "membership").write_text(membership)
        for group, files in groups.items():
            folder = tmp_path / "cgroup" / group
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).write_text(content + "\n")
        monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "membership")

    return write


@pytest.mark.parametrize("case", MEMORY)
def test_memory_is_limited_by_the_smallest_group(case: str, cgroups):
    membership, groups, sizes = MEMORY[case]
    cgroups(membership, groups)
    expected = tuple(float("inf") if size is None else size for size in sizes)
    assert (limits.memory_limit(), limits.memory_left()) == expected


@pytest.mark.parametrize("case", CPUS)
def test_cpus_are_limited_by_the_quota(case: str, cgroups, monkeypatch: pytest.MonkeyPatch):
    membership, groups, count = CPUS[case]
    cgroups(membership, groups)
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(64)))
    assert limits.num_cpus() == count


def test_cpus_are_those_of_the_affinity(cgroups, monkeypatch: pytest.MonkeyPatch):
    cgroups("", {})
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert limits.num_cpus() == 3


def test_address_space_is_limited_by_ulimit(cgroups, monkeypatch: pytest.MonkeyPatch):
    cgroups("", {})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**50, 2**50))
    assert limits.memory_limit() == 2**50
    assert 0 < limits.memory_left() < 2**50
