"""Paths that a user names: where they lead, before anything is read or written there."""

from pathlib import Path

from specheads.core.errors import InputError


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
