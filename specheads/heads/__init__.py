"""Trained drafters, one file a kind. The file's name is the kind: there is no registry.

A kind's module has `Config`, `Head(config, width, vocab_size)` and, where its original project
published checkpoints, `read_public(config, tensors)`, which returns None for a layout that is
not its own. See docs/add_a_head.md.
"""

import dataclasses
import importlib
import json
import pickle
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from specheads.base import FrozenBase
from specheads.drafter import Head
from specheads.layout import column_major

WEIGHT_FILES = (
    "model*.safetensors",
    "medusa_lm_head*.safetensors",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.bin",
    "*.pt",
)
"""Where tensors are looked for, the first pattern with a match wins; pickles as weights only."""


def kinds() -> list[str]:
    """Return the kinds of head there are: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _module(kind: Any) -> ModuleType:
    if kind not in kinds():
        raise ValueError(f"head kind must be one of {', '.join(kinds())}; got {kind!r}")
    return importlib.import_module(f"specheads.heads.{kind}")


def configure(settings: Mapping[str, Any]) -> Any:
    """Return the kind's own `Config` for `kind` and its settings; refuse what it does not know.

    Raises:
        ValueError: The kind is unknown, or a setting is unknown to it or unusable.
    """
    values = dict(settings)
    module = _module(values.pop("kind", None))
    known = {field.name for field in dataclasses.fields(module.Config)}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"head {settings['kind']!r} does not know the setting {unknown[0]!r}; it has "
            f"{', '.join(sorted(known))}"
        )
    return module.Config(**values)


def build(settings: Mapping[str, Any], *, width: int, vocab_size: int) -> Head:
    """Make an untrained head.

    Args:
        settings: `kind` and that kind's own settings. Never code: the kind is looked up among
            `kinds()`.
        width: Of the base's final hidden state.
        vocab_size: Rows of the base's vocabulary projection.

    Raises:
        ValueError: As `configure`.
    """
    config = configure(settings)
    return _module(settings["kind"]).Head(config, width=width, vocab_size=vocab_size)


def build_for(settings: Mapping[str, Any], base: FrozenBase, counts: Tensor | None = None) -> Head:
    """Make an untrained head that starts from the base's own tensors, on the base's device.

    Args:
        settings: As in `build`.
        base: The base it is made for.
        counts: How often each token stands in the training text, for a head that drafts the
            most frequent ones only; None takes the first ones.
    """
    head = build(settings, width=base.width, vocab_size=base.vocab_size)
    if counts is not None:
        head.choose_vocabulary(counts)
    # heads learn in float32 whatever the base computes in: small updates vanish in bfloat16
    embedding, projection = base.embedding.float(), base.scaled_projection.float()
    head.to(base.device)
    head.initialise(embedding, head.projection_rows(projection))
    _lend(head, base)
    return head


def load_head(path: str | Path, base: FrozenBase | None = None, *, revision: str = "main") -> Head:
    """Load a trained head: ours, or a public checkpoint as its own project published it.

    Args:
        path: Folder or Hub id. config.json tells whose layout it is.
        base: Lends its embedding and projection to heads that borrow them, and refuses a head
            made for another width or vocabulary.
        revision: Hub revision; ignored for a folder.

    Raises:
        ValueError: No config.json or no weights, an unknown layout, tensors missing, left over
            or of the wrong shape, or a head that does not fit the base.
    """
    folder = _fetch(path, revision)
    if not (folder / "config.json").is_file():
        raise ValueError(f"a head needs a config.json; {folder} has none")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = _read_tensors(folder)
    if "kind" in config:
        sizes = {name: config.pop(name, 0) for name in ("width", "vocab_size")}
        head = build(config, **sizes)
        fill(head, tensors)
    else:
        found = (_read_public(kind, config, tensors) for kind in kinds())
        head = next((head for head in found if head is not None), None)
        if head is None:
            raise ValueError(
                f"{folder} is no checkpoint that one of {', '.join(kinds())} can read: its "
                f"config.json names {config.get('architectures') or config.get('model_type')!r}"
            )
    if base is not None:
        fit(head, base)
    return head.eval()


def fill(head: Head, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a head, name by name; nothing may be missing, left over or misshapen.

    Raises:
        ValueError: Names the first tensor that does not fit.
    """
    wanted = head.state_dict()
    if missing := sorted(set(wanted) - set(tensors)):
        raise ValueError(f"the checkpoint lacks {missing[0]!r}; it is incomplete or another kind's")
    if extra := sorted(set(tensors) - set(wanted)):
        raise ValueError(f"the checkpoint has {extra[0]!r}, which this head does not use")
    for name, value in wanted.items():
        if value.shape != tensors[name].shape:
            raise ValueError(
                f"{name!r} must have shape {tuple(value.shape)}, got {tuple(tensors[name].shape)}"
            )
    head.load_state_dict(dict(tensors))


def fit(head: Head, base: FrozenBase) -> None:
    """Move a head to its base's device and lend it the base's tensors.

    Raises:
        ValueError: The head was made for another width or vocabulary, or more layers.
    """
    for name, ours in (("width", base.width), ("vocab_size", base.vocab_size)):
        theirs = getattr(head, name)
        if ours != theirs:
            raise ValueError(
                f"the head was made for a base of {name} {theirs}, this base has {ours}; "
                "load the base it was trained on"
            )
    head.to(base.device, base.dtype)
    column_major(head)
    _lend(head, base)


def _lend(head: Head, base: FrozenBase) -> None:
    """Show a head its base: the layers it may read and the tensors it may borrow."""
    head.choose_taps(base.num_layers)
    if max(head.taps, default=0) > base.num_layers:
        raise ValueError(
            f"the head reads the base after {max(head.taps)} layers, this base has "
            f"{base.num_layers}; load the base it was trained on, or set other taps"
        )
    head.bind(base.embedding, base.scaled_projection)


def _fetch(path: str | Path, revision: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(
            snapshot_download(
                str(path), revision=revision, allow_patterns=["config.json", *WEIGHT_FILES]
            )
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a head must be a folder or a Hub id that can be reached, got {str(path)!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    for pattern in WEIGHT_FILES:
        files = sorted(folder.glob(pattern))
        if files:
            break
    else:
        raise ValueError(
            f"a head needs weights, as *.safetensors, *.bin or *.pt; {folder} has none"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        else:
            tensors |= _read_pickle(file)
    return tensors


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"a pickled checkpoint may hold tensors only, and {file.name} holds other objects; "
            "convert it to safetensors where you trust it"
        ) from error


def _read_public(kind: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    read = getattr(_module(kind), "read_public", None)
    return None if read is None else read(config, tensors)
