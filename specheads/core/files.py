"""Paths, atomic writes, locks on folders, untrusted JSON files, and dataclasses as JSON."""

import errno
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from specheads.core.errors import InputError, causes, first_line

T = TypeVar("T")
SCRATCH = re.compile(r"\.(?P<name>.+)\.(?:[0-9a-f]{8}|(?P<old>old))")
"""Names of files that are incomplete or being replaced."""
LOCK = ".lock"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that atomically becomes `target` at the end of the context.

    An existing folder at `target` is replaced. See `remove_incomplete` about killed processes.
    """
    with naming_full_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch, old = _scratch(target), target.parent / f".{target.name}.old"
        scratch.mkdir()
        try:
            yield scratch
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            scratch.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically."""
    with naming_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch(path)
        try:
            scratch.write_bytes(content.encode() if isinstance(content, str) else content)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def remove_incomplete(folder: Path, names: str = "*") -> None:
    """Remove incomplete files of killed processes, and restore the ones that they set aside.

    Only the writer of a folder may call this. `names` is a glob of the files that it writes.
    """
    for file in list(folder.glob(f".{names}.*")):
        if not (match := SCRATCH.fullmatch(file.name)):
            continue
        if match["old"] and not (folder / match["name"]).exists():
            file.rename(folder / match["name"])
        elif file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()


def is_lock_or_incomplete(name: str) -> bool:
    """Return whether a file of this name is a lock or incomplete."""
    return name == LOCK or SCRATCH.fullmatch(name) is not None


@contextmanager
def sole_writer(
    folder: Path,
    lock: str = LOCK,
    *,
    wait: Callable[[str], object] | None = None,
    remedy: str = "name another",
) -> Iterator[None]:
    """Lock a folder against other writers in this context; the folder is created if needed.

    If another process has the lock, `wait` is called with a description of it before waiting, or a
    ValueError is raised if it is None or the folder is not writable. A created folder that stays
    empty is removed. The lock ends with its process.
    """
    try:
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        file_lock = FileLock(folder / lock)
        while not file_lock.is_locked:
            folder.mkdir(parents=True, exist_ok=True)
            # another process may create the folder and remove it again
            with suppress(FileNotFoundError):
                _acquire(file_lock, folder / lock, wait)
        # on a file system without locks, the content of the file belongs to filelock
        if isinstance(file_lock, FileLock):
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            (folder / lock).write_text(json.dumps(holder))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(
            f"the folder must be writable, and {folder} is not ({error.strerror}); {remedy}"
        ) from error
    try:
        yield
    finally:
        (folder / lock).unlink(missing_ok=True)
        file_lock.release()
        with suppress(OSError):
            for path in new_folders:
                path.rmdir()


def write_once(
    folder: Path, write: Callable[[Path], object], wait: Callable[[str], object] = lambda _: None
) -> None:
    """Write a folder of a cache unless it exists; one process writes it, and others wait."""
    if folder.is_dir():
        return
    remedy = "set SPECHEADS_CACHE to another"
    with sole_writer(folder.parent, f".{folder.name}.lock", wait=wait, remedy=remedy):
        # another process may have written it while this one waited for the lock
        if not folder.is_dir():
            remove_incomplete(folder.parent, folder.name)
            with atomic_folder(folder) as scratch:
                write(scratch)


def _acquire(file_lock: Any, path: Path, wait: Callable[[str], object] | None) -> None:
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        holder = path.read_text(errors="replace").strip() if path.is_file() else ""
        if wait is None:
            raise InputError(
                f"one process at a time may write {path.parent}, and another does "
                f"({holder or 'it just started'}); wait for it, stop it, or choose another folder"
            ) from None
        wait(holder)
        file_lock.acquire()


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raise an OSError that names the path if the disk is full, whatever the library raised."""
    try:
        yield
    except Exception as error:
        for cause in causes(error):
            # safetensors raises no OSError, and torch wraps it
            if getattr(cause, "errno", None) == errno.ENOSPC or "(os error 28)" in str(cause):
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                raise full from error
        raise


def _scratch(target: Path) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"


MAX_SETTINGS_BYTES = 2**20
"""Largest config.json read; the largest public ones have some kilobytes."""


def read_json(file: Path) -> dict[str, Any]:
    """Return a small JSON object from an untrusted folder, or refuse the file."""
    refuse_outside(file)
    try:
        size = file.stat().st_size
        value = json.loads(file.read_bytes()) if size <= MAX_SETTINGS_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file} is not readable JSON: {first_line(error)}; fix it, or download it again"
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            f"{file} must be a JSON object, got a {type(value).__name__} in {size} bytes (of "
            f"at most {MAX_SETTINGS_BYTES} bytes); keep only settings, or download it again"
        )
    return value


def refuse_outside(file: Path, folder: Path | None = None) -> None:
    """Refuse a symbolic link out of the folder, except within the cache of the Hub.

    `folder` is the file's own by default.
    """
    folder, real = (folder or file.parent).resolve(), file.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise InputError(
            f"a checkpoint's files must be in its own folder, {file} links to {real}; copy it"
        )


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Name of a model or data set on the Hugging Face Hub: USER/NAME."""


def local_path(path: str | Path) -> Path:
    """Return a path with ~ expanded, which need not exist; refuse one that cannot be read."""
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    # no home folder, or an unknown ~user
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and Path(path).parts[0] == "~":
            raise InputError(
                f"~ needs a home folder, got {str(path)!r:.80} and none; set HOME, or give the "
                "whole path (SPECHEADS_CACHE is that of the cache)"
            ) from error
        raise InputError(
            f"a path must be one that this machine can read, got {str(path)!r:.80}: "
            f"{getattr(error, 'strerror', None) or error}; name another"
        ) from error
    return expanded


def nearest_existing(path: Path) -> Path:
    """Return the path itself if it exists, else its nearest folder that does."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def writable_folder(path: str | Path) -> Path:
    """Return the resolved path of a folder, which need not exist; refuse one that is unwritable."""
    folder, reason = local_path(path), ""
    try:
        folder = folder.resolve()
        parent = nearest_existing(folder)
        # incomplete files have longer names
        if len(os.fsencode(folder.name)) > 240:
            reason = "its name is too long"
        elif not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            reason = f"{parent} is {'not writable' if parent.is_dir() else 'a file'}"
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise InputError(
            f"a folder to write to is needed, got {str(path)!r:.80}: {reason}; name another"
        )
    return folder


def cache_folder() -> Path:
    """Return the cache folder: SPECHEADS_CACHE, or `specheads` in XDG_CACHE_HOME or ~/.cache."""
    configured, user_cache = os.environ.get("SPECHEADS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return local_path(configured or Path(user_cache or "~/.cache") / "specheads").absolute()


# --- JSON --------------------------------------------------------------------------------------


def as_json(value: Any) -> str:
    """Return plain values as the text of a JSON file, with sorted keys."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def to_json(value: Any) -> Any:
    """Return the JSON value of a dataclass, with the names of its fields as keys."""
    return _adapter(type(value)).dump_python(value, mode="json", by_alias=True)


def dumps(value: Any) -> str:
    """Return a dataclass as the text of a JSON file."""
    return json.dumps(to_json(value), indent=1) + "\n"


def from_json(kind: type[T], value: Any, source: str = "the JSON object") -> T:
    """Return the dataclass of a JSON value of the file `source`; unknown keys are ignored.

    A ValueError is raised if a value is missing or has the wrong type.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"])) or "the whole"
        value = "nothing" if wrong["type"] == "missing" else f"{wrong['input']!r:.40}"
        raise InputError(
            f"{source} must have a valid value of {name} ({wrong['msg']}), got {value}; "
            "measure again"
        ) from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)
