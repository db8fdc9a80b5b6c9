"""Heads in the layouts of serving engines: one module of `layouts/` an engine, none registered.

An engine's module has `ABOUT` and `LAYOUTS`, by kind of head. A layout says what it can hold,
writes it, and names the reader that loads it back for the parity gate (see gate.py): readers
follow the engine's documented formulas and share no code with the heads. The runtime of vLLM's
plug-in is specheads/export/plugins/vllm.py; `layouts/vllm.py` is what it is given. See
docs/export_matrix.md.
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.machine import dtype_name
from specheads.export.readers import Reader

RECORD = "specheads.json"
"""In every export: which head for which base, and what the gate counted. Engines ignore it."""

Settings = Mapping[str, Collection[Any] | None]
"""Which values of each setting can be held, None being all."""


def all_of(*names: str) -> Settings:
    """Return that a depth, and these settings, can be held whatever they are."""
    return dict.fromkeys(("depth", *names))


def drafted_tokens(head: Head) -> int:
    """Return how many tokens an engine is told to draft: as many as the head's tuned tree is deep.

    That of a single row, and one where not to draft was best: whoever serves a head drafts. All of
    the head's levels where it was not tuned.
    """
    return max(head.tuned.best(1, 1).depth, 1) if head.tuned else head.depth


def named_base(base: FrozenBase) -> str:
    """Return a base as a command line names it, with its revision where that is not `main`."""
    return at_revision(base, shlex.quote(base.place))


def at_revision(base: FrozenBase, model: str, option: str = " --revision ") -> str:
    """Return a model of a command line and the revision of the base, where that is not `main`."""
    if base.revision == "main" or base.adapter or Path(base.place).exists():
        return model
    return f"{model}{option}{shlex.quote(base.revision)}"


def stored_dtype(head: Head) -> str:
    """Return how config.json calls the precision that a head is stored in, its `torch_dtype`."""
    return dtype_name(next(head.parameters()).dtype)


@dataclass(frozen=True, slots=True)
class Folder:
    """What an export consists of, before it is written."""

    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, Tensor]
    serve: tuple[str, ...]
    """Command lines that serve it."""
    weights_file: str = "model.safetensors"
    files: dict[str, str] = field(default_factory=dict)
    """Further text files, by name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one engine has one kind of head."""

    write: Callable[[Head, FrozenBase, Path], Folder]
    """Takes the folder's future place too, for command lines."""
    read: Reader
    """Loads it back as the engine would: see readers/."""
    settings: Settings
    """Settings of the kind's `Config`. What is not named must stand at its default, so no option is
    ever left out silently."""
    verified: str
    """How far: by a "run" of the engine, or by reading the "layout" back as documented."""
    note: str
    """What was verified, against which version."""
    objection: Callable[[Head, FrozenBase], str] | None = None
    """Says why this head on this base does not fit, where its settings alone do not tell."""
    limits: str = ""
    """The rule behind `objection`, for people."""
