"""Provenance of a result: command, versions, commit, machine."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specheads.core.machine import matrix_instructions, processor_name

PACKAGES = ("specheads", "torch", "transformers", "accelerate", "peft", "datasets", "safetensors")
PACKAGE = Path(__file__).resolve().parents[1]
"""The package; its recipes are in a checkout next to it, in a wheel in its folder `_data`."""
ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|\\\\|file:)")
INSIDE = re.compile(r"(?<![^\[,:'\"=])/(?!/)[^\],'\"]+")
"""An absolute path in a list, such as [/a/b,/c]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The machine."""

    machine: str = "unknown"
    processor: str = "unknown"
    cores: int | None = None
    threads: int | None = None
    gpu: str | None = None
    instructions: list[str] = field(default_factory=list)
    """Matrix instructions of the processor, newest last; empty in older results."""

    def __str__(self) -> str:
        """Return the GPU, or the processor, its threads and its newest instructions."""
        words = [self.processor, f"{self.threads or '?'} threads", *self.instructions[-1:]]
        return self.gpu or ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Provenance of a result, without secrets and absolute paths."""

    command: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    """The `commit` of specheads, and whether the checkout is `dirty`: has other changes."""
    hardware: Hardware = field(default_factory=Hardware)


def collect_provenance() -> Provenance:
    """Return the provenance of this process."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return Provenance(
        command=[Path(sys.argv[0]).name, *map(shorten_paths, sys.argv[1:])],
        versions={"python": platform.python_version()} | versions,
        git=_git(),
        hardware=Hardware(
            machine=platform.machine(),
            processor=processor_name(),
            cores=os.cpu_count(),
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            instructions=matrix_instructions(),
        ),
    )


def shorten_paths(text: str) -> str:
    """Return a text with paths relative to the checkout or the working folder.

    Other absolute paths are cut to their last part.
    """
    return cut_absolute_paths(text, (Path.cwd(), PACKAGE / "_data", PACKAGE.parent))


def cut_absolute_paths(value: Any, roots: Sequence[Path] = ()) -> Any:
    """Return a JSON value with absolute paths cut to their last part, also in `key=path`.

    A path below one of the roots becomes relative to it.
    """
    if isinstance(value, Mapping):
        return {name: cut_absolute_paths(inner, roots) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [cut_absolute_paths(inner, roots) for inner in value]
    if not isinstance(value, str):
        return value
    if ABSOLUTE.match(value):
        return _cut(value, roots)
    key, equals, path = value.partition("=")
    if equals and ABSOLUTE.match(path):
        return key + equals + _cut(path, roots)
    return INSIDE.sub(lambda match: _cut(match[0], roots), value)


def _cut(path: str, roots: Sequence[Path]) -> str:
    for root in roots:
        if Path(path).is_relative_to(root) and Path(path) != root:
            return Path(path).relative_to(root).as_posix()
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _git() -> dict[str, Any] | None:
    """Return the state of our own checkout; None if the package is not in one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(PACKAGE.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != PACKAGE.parent:
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
