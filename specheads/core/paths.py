"""Checks of paths that a user names, before anything is read or written there."""

import os
import re
from pathlib import Path

from specheads.core.errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Name of a model or data set on the Hugging Face Hub: USER/NAME."""


def local_path(path: str | Path) -> Path:
    """Return a path with ~ expanded; it need not exist.

    Raises:
        ValueError: The path is invalid or not readable.
    """
    try:
        place = Path(path).expanduser()
        place.exists()
    # an unknown ~user is a RuntimeError
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"a path must be one that this machine can read, got {str(path)!r:.80}: "
            f"{getattr(error, 'strerror', None) or error}; name another"
        ) from error
    return place


def writable_folder(path: str | Path) -> Path:
    """Return the resolved path of a writable folder; it need not exist.

    Raises:
        ValueError: It is a file or below one, its name is too long, or it is not writable.
    """
    place = local_path(path)
    try:
        place = place.resolve()
        # incomplete files have longer names
        reason = "its name is too long" if len(os.fsencode(place.name)) > 240 else ""
        nearest = next(one for one in (place, *place.parents) if one.exists())
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"a folder to write to is needed, got {str(path)!r:.80}: {error}"
        ) from error
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"{nearest} is not writable"
    if reason:
        raise InputError(
            f"a folder to write to is needed, got {str(path)!r:.80}: {reason}; name another"
        )
    return place


def cache_folder() -> Path:
    """Return the cache folder: SPECHEADS_CACHE, or `specheads` in XDG_CACHE_HOME or ~/.cache.

    It need not exist.
    """
    own, general = os.environ.get("SPECHEADS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return local_path(own or Path(general or "~/.cache") / "specheads").absolute()
