"""Read checkpoints that somebody else wrote: settings and tensors, and nothing that runs.

A folder from the Hub is untrusted. Nothing in it is executed, no file outside it is read, and
what it claims (sizes, counts, names) is held against what it has before memory is taken for it.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specheads.core.errors import InputError

WEIGHT_FILES = (
    "model*.safetensors",
    "medusa_lm_head*.safetensors",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.bin",
    "*.pt",
)
"""Where tensors are looked for, the first pattern with a match wins; pickles as weights only."""

INDEX_SUFFIX = ".index.json"

MAX_SETTINGS_BYTES = 2**20
"""Largest config.json read; the largest public ones have some kilobytes."""

CODE_KEYS = ("_target_", "auto_map", "custom_pipelines")
"""Settings that name code. They are refused, not passed over: such a folder wants to run it."""

SPECULATORS = ("Eagle3", "PEagle", "DFlash", "DSpark", "MTP")

HARMLESS_CODE = [{"": f"config.{kind}SpeculatorConfig"} for kind in SPECULATORS]
"""The `auto_map` that vllm-project/speculators writes into all its folders: it names a class of
that library, under a key that transformers never looks up."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json.

    Raises:
        ValueError: There is none, or it is no JSON object, or too large or deep, or names code.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"a head needs a config.json; {folder} has none")
    settings = read_json(file)
    for name, value in _settings_within(settings):
        if name in CODE_KEYS and value not in HARMLESS_CODE:
            raise InputError(
                f"a head's config.json may hold settings only, and {file} names code in "
                f"{name!r}; take that out where you trust the rest"
            )
    return settings


def read_json(file: Path) -> dict[str, Any]:
    """Return a small JSON object.

    Raises:
        ValueError: The file lies elsewhere, is too large or too deep, or is no JSON object.
    """
    try:
        refuse_outside(file)
        if (size := file.stat().st_size) > MAX_SETTINGS_BYTES:
            raise InputError(
                f"{file} must be at most {MAX_SETTINGS_BYTES} bytes of settings, it has {size}; "
                "remove what is none"
            )
        value = json.loads(file.read_bytes())
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file} is not readable JSON: {first_line(error)}; mend it, or get it anew"
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{file} must be a JSON object, got a {type(value).__name__}; get it anew")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, shards put together.

    Raises:
        ValueError: There are none; a file lies outside the folder, is damaged, holds other
            objects than tensors, or repeats a name; or an index names files that are not there.
    """
    files = next(filter(None, (_files(folder, pattern) for pattern in WEIGHT_FILES)), None)
    if files is None:
        raise InputError(
            f"a head needs weights, as *.safetensors, *.bin or *.pt; {folder} has none"
        )
    for index in _files(folder, f"*{INDEX_SUFFIX}"):
        _check_index(index)
    tensors: dict[str, Tensor] = {}
    for file in files:
        refuse_outside(file)
        found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
        if twice := sorted(set(found) & set(tensors)):
            raise InputError(f"{twice[0]!r} stands in two files of {folder}; keep one of them")
        tensors |= found
    return tensors


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.is_file())


def _settings_within(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every name and value of nested settings."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield from one.items()
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def refuse_outside(file: Path) -> None:
    """Refuse a link that leads out of the folder, but for those of the Hub's own cache."""
    folder, real = file.parent.resolve(), file.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise InputError(
            f"a checkpoint's files must lie in its own folder, and {file} leads to {real}; put a "
            "copy there where you trust it"
        )


def _check_index(index: Path) -> None:
    shards = read_json(index).get("weight_map")
    names = set(map(str, shards.values())) if isinstance(shards, dict) else {""}
    # compared as names: a path made of one may be too long to ask for
    beside = {file.name for file in index.parent.iterdir() if file.is_file()}
    if strange := sorted(names - beside):
        raise InputError(
            f"an index must name files beside it, and {index} names {strange[0]!r:.80}; complete "
            "the download"
        )


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"{file} is no whole safetensors file: {first_line(error)}; download it again"
        ) from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    _refuse_compressed(file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"a pickled checkpoint may hold tensors only, and {file.name} holds other objects; "
            "convert it to safetensors where you trust it"
        ) from error
    except Exception as error:
        # a damaged pickle can raise whatever there is
        raise InputError(
            f"{file} is no whole checkpoint: {first_line(error)}; download it again"
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"{file} must hold tensors by name, got a {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not _is_whole(value):
            raise InputError(
                f"{file} must hold whole tensors by name, and {name!r} is none; convert it to "
                "safetensors where you trust it"
            )
    return found


def _refuse_compressed(file: Path) -> None:
    """Refuse an archive that unpacks to more than it is: torch compresses nothing."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        held = sum(entry.file_size for entry in archive.infolist())
    if held > file.stat().st_size:
        raise InputError(
            f"{file} unpacks to {held} bytes from {file.stat().st_size}; torch.save compresses "
            "nothing, so something else wrote it"
        )


def _is_whole(value: Any) -> bool:
    """Return whether it is a tensor with memory for each of its elements."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def first_line(error: BaseException) -> str:
    """Return what an error says in one line of some length, or else its name."""
    return f"{(str(error).splitlines() or [''])[0] or type(error).__name__:.200}"
