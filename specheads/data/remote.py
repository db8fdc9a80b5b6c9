"""Files in object stores and on the Hub: s3://, gs://, hf:// and other protocols of fsspec.

They are copied into the cache, because Parquet and the readers of text need local files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any

from specheads.core.errors import InputError, one_line
from specheads.core.files import cache_folder, sole_writer, writable_folder, write_once


def local_copy(path: str | Path, patterns: Sequence[str] = ()) -> Path:
    """Return a path, or that of the copy of what is at an address: a file, a folder or a glob.

    The path changes if a file changed. `patterns` choose among the files of a folder.
    """
    address = str(path)
    if "://" not in address:
        return Path(path)
    with _naming_store(address):
        store, root, files = _list_files(address, patterns)
        if not files:
            raise FileNotFoundError("no such file is there")

        def download(scratch: Path) -> None:
            copies = [str(scratch / name) for name in files]
            store.get(list(files.values()), copies)
            for file in copies:
                # the date is part of a source's identity
                os.utime(file, (0, 0))

        versions = {name: store.ukey(file) for name, file in files.items()}
        copy = _cached(json.dumps([address, versions], sort_keys=True))
        write_once(copy, download)
    names = "**/*" if has_magic(root) else next(iter(files)) if root in files.values() else ""
    return copy / names


@contextmanager
def output_folder(path: str | Path, uploads: bool) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a local folder for an output, and a function that uploads what is new in it.

    An address has a folder in the cache. What is at the address is downloaded first. One process of
    each machine `uploads`.
    """
    address, uploaded = str(path), set[Any]()
    if "://" not in address:
        yield writable_folder(path), lambda: None
        return
    folder = _cached(address)
    with _naming_store(address), sole_writer(folder, ".lock-store", wait=lambda _: None):
        store, root, files = _list_files(address)
        for name, file in files.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != store.size(file):
                store.get_file(file, str(folder / name))
            uploaded.add(_version(folder / name))
    # the lock removes a folder that stays empty
    folder.mkdir(parents=True, exist_ok=True)

    def upload() -> None:
        with _naming_store(address):
            # the name of a lock or of an incomplete file begins with a point
            for file in folder.glob("[!.]*") if uploads else ():
                if (version := _version(file)) not in uploaded:
                    store.put_file(str(file), f"{root}/{file.name}")
                    uploaded.add(version)

    try:
        yield folder, upload
    finally:
        upload()


def _cached(identity: str) -> Path:
    return cache_folder() / "stores" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def _version(file: Path) -> tuple[Any, ...]:
    return file.name, file.stat().st_size, file.stat().st_mtime_ns


def _list_files(address: str, patterns: Sequence[str] = ()) -> tuple[Any, str, dict[str, str]]:
    """Return a store, the path in it, and the files there by their names below its folder."""
    # slow to import, and few commands need it
    from fsspec.core import url_to_fs

    store, root = url_to_fs(address)
    is_folder = not has_magic(root) and not store.isfile(root)
    globs = [f"{root}/{pattern}" for pattern in patterns if is_folder] or [root]
    files = {
        file for path in globs for file in (store.glob if has_magic(path) else store.find)(path)
    }
    folder = PurePosixPath(root)
    while has_magic(str(folder)) or files == {str(folder)}:
        folder = folder.parent
    names = {str(PurePosixPath(file).relative_to(folder)): file for file in sorted(files)}
    return store, root, names


@contextmanager
def _naming_store(address: str) -> Iterator[None]:
    try:
        yield
    # each store has its own errors, and some of them no common class
    except Exception as error:
        raise InputError(
            f"this machine must be able to use an address, got {address!r:.200}: "
            f"{one_line(error):.200}; check it, its credentials and its package (s3fs, gcsfs)"
        ) from error
