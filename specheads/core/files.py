"""Files that are whole or absent, and folders that one process at a time may write."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specheads.core.errors import InputError, first_line

SCRATCH = re.compile(r"\.(?P<name>.+)\.(?:[0-9a-f]{8}|(?P<old>old))")
"""Names of what is not whole yet, or is being replaced."""

LOCK = ".lock"

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""A file system without locks says one of these."""


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `target` at once, or never.

    A folder that stands at `target` already is replaced. What a killed process leaves, `sweep`
    clears up.
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
    """Write a file that is whole or absent."""
    with naming_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch(path)
        try:
            scratch.write_bytes(content.encode() if isinstance(content, str) else content)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def sweep(folder: Path, names: str = "*") -> None:
    """Remove what killed processes left half-written, and put back what they had set aside.

    Only its writer may do this to a folder; `names` is a glob of the files that are its own.
    """
    for item in list(folder.glob(f".{names}.*")):
        if not (found := SCRATCH.fullmatch(item.name)):
            continue
        if found["old"] and not (folder / found["name"]).exists():
            item.rename(folder / found["name"])
        elif item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()


def is_ours(name: str) -> bool:
    """Return whether a file of this name is a lock, or not whole yet."""
    return name == LOCK or SCRATCH.fullmatch(name) is not None


@contextmanager
def sole_writer(
    folder: Path, lock: str = LOCK, *, wait: Callable[[str], object] | None = None
) -> Iterator[None]:
    """Keep other processes from writing a folder, which is made if need be, while this lasts.

    Where another process holds the lock, `wait` is told who, and then it is waited for.

    A folder that is still empty then goes again. The lock is the system's own and ends with its
    process: the file that a killed one leaves holds nobody up. Over NFS it counts between machines
    where the server keeps locks; a file system that keeps none is written without.

    Raises:
        ValueError: Another process holds the lock and `wait` is None, or nothing can be written.
    """
    try:
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        held = _acquire(folder / lock, wait)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(
            f"a folder that can be written is needed, and {folder} is none ({error.strerror}); "
            "name another"
        ) from error
    try:
        yield
    finally:
        (folder / lock).unlink(missing_ok=True)
        os.close(held)
        with suppress(OSError):
            for one in made:
                one.rmdir()


def _acquire(path: Path, wait: Callable[[str], object] | None) -> int:
    """Return the open file of a lock that is ours now, with our number and machine in it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # a link, in a folder that somebody sent, could lead to any file
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            # a holder that made the folder, and leaves it empty, takes it away
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 1000).decode(errors="replace").strip() or "one that just began"
            if wait is None:
                os.close(file)
                raise InputError(
                    f"one process at a time may write {path.parent}, and another does ({holder}); "
                    "wait for it, stop it, or choose another folder"
                ) from None
            wait(holder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        # its holder may have removed it between our opening and locking it
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                # on a full disk the lock counts without them
                with suppress(OSError):
                    os.truncate(file, 0)
                    about = {"pid": os.getpid(), "host": socket.gethostname()}
                    os.write(file, json.dumps(about).encode())
                return file
        os.close(file)


@contextmanager
def naming_full_disk(place: Path) -> Iterator[None]:
    """Have a full disk told as an OSError that names the place, whoever met it first."""
    try:
        yield
    except Exception as error:
        met: BaseException | None = error
        while met is not None:
            # safetensors knows no OSError; torch raises another error over it
            if getattr(met, "errno", None) == errno.ENOSPC or "(os error 28)" in str(met):
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
                raise full from error
            met = met.__cause__ or met.__context__
        raise


def _scratch(target: Path) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"


MAX_SETTINGS_BYTES = 2**20
"""Largest config.json read; the largest public ones have some kilobytes."""


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
