"""Paths that a user names: where they lead, before anything is read or written there."""

import os
import re
from pathlib import Path

from specheads.core.errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What the Hugging Face Hub calls a model or a data set: USER/NAME."""


def local_path(path: str | Path) -> Path:
    """Return a path of this machine, ~ expanded; nothing need be there yet.

    Raises:
        ValueError: No disk can hold it, or it may not be looked at.
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
    """Return a folder in which files can be made, resolved; it need not be there yet.

    Raises:
        ValueError: It is a file or below one, its name is too long, or nothing may be written.
    """
    place = local_path(path)
    try:
        place = place.resolve()
        # what is not whole yet stands there by a longer name
        reason = "its name is too long" if len(os.fsencode(place.name)) > 240 else ""
        nearest = next(one for one in (place, *place.parents) if one.exists())
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"a folder to write to is needed, got {str(path)!r:.80}: {error}"
        ) from error
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"nothing may be written in {nearest}"
    if reason:
        raise InputError(
            f"a folder to write to is needed, got {str(path)!r:.80}: {reason}; name another"
        )
    return place


def cache_folder() -> Path:
    """Return where lies what can be made again: SPECHEADS_CACHE, or specheads in the user's cache.

    The latter is XDG_CACHE_HOME, or ~/.cache; nothing need be there yet.
    """
    own, general = os.environ.get("SPECHEADS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return local_path(own or Path(general or "~/.cache") / "specheads").absolute()
