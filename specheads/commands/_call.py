"""One call of a command: compose and check its settings, run it, and tell what went wrong."""

import errno
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from specheads.commands import _compose, _help
from specheads.commands._interrupt import INTERRUPTED, interruptible
from specheads.core.errors import InputError, printable

MISTAKES = (InputError, HydraException, OmegaConfBaseException)

NO_ROOM = ("No space left on device", "PytorchStreamWriter failed writing", "Disk quota exceeded")
"""What libraries say of a full disk: not all raise an OSError."""

MOST_DETAILS = 8000
"""Characters shown below an error's line."""

NO_MEMORY = ("out of memory", "can't allocate memory", "Unable to allocate")


def call(name: str, arguments: Sequence[str]) -> None:
    """Run a command; without torch until its settings are known to be good.

    What the user caused leaves one line on standard error and exit code 2, an interrupt 130. What
    we caused leaves one line and exit code 1, and its traceback in a file that the line names.
    """
    settings: list[Any] = []
    try:
        if {"-h", "--help"} & set(arguments):
            sys.stdout.write(_help.settings(name))
            return
        overrides = _compose.lengthen(name, arguments)
        settings = _compose.from_command_line(name, overrides)
        run = import_module(f"specheads.commands.{name}").run
        with interruptible():
            for one in settings:
                run(one, overrides)
    except KeyboardInterrupt:
        told = "an unfinished run goes on with the same command"
        sys.stderr.write(f"interrupted; {told}, a finished one with specheads evaluate run=DIR\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # whoever read our output has enough; Python would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if line := _users(error, settings):
            sys.stderr.write(printable(line + _details(error)))
            sys.exit(2)
        sys.stderr.write(printable(_ours(error)))
        sys.exit(1)


def _users(error: Exception, settings: Sequence[Any]) -> str:
    """Return what the user can mend, in one line; empty where it is nothing of theirs."""
    if isinstance(error, MISTAKES):
        return _compose.message(error)
    chain = list(_chain(error))
    texts = [str(one) for one in chain]
    if any(words in text for text in texts for words in NO_ROOM):
        place, free = _fullest(settings)
        return (
            f"error: the disk is full: {place} lies on one with {free:,} bytes left; make room, "
            "and the same command goes on\n"
        )
    if isinstance(error, MemoryError) or any(word in text for text in texts for word in NO_MEMORY):
        return (
            f"error: memory must hold the work, and ran out: {_line(error)}; lower batch_size, "
            "sequence_length or the tree's nodes, or take a smaller base\n"
        )
    for one in chain:
        if isinstance(one, OSError) and one.filename and one.errno in errno.errorcode:
            return (
                f"error: a file must be there and be ours to use: {one.strerror}, "
                f"{str(one.filename)[:200]!r}; check its name and its rights\n"
            )
    return ""


def _details(error: Exception) -> str:
    """Return what an error shows below its line."""
    told = error.details.rstrip("\n") if isinstance(error, InputError) else ""
    if len(told) > MOST_DETAILS:
        half = MOST_DETAILS // 2
        told = f"{told[:half]}\n[{len(told) - 2 * half:,} characters left out]\n{told[-half:]}"
    return told and f"{told}\n"


def _ours(error: Exception) -> str:
    told = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specheads-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(told)
    except OSError:
        return told
    return (
        f"error: a bug of specheads: {type(error).__name__}: {_line(error)}; its traceback is in "
        f"{file.name}, please report it\n"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: Exception) -> str:
    return (str(error).splitlines() or ["no more is known"])[0][:300]


def _fullest(settings: Sequence[Any]) -> tuple[Path, int]:
    """Return which place that the command writes to has the least room, and its free bytes."""
    said = [getattr(one, name, "") for one in settings for name in ("run_dir", "out", "run")]
    places = [Path(place) for place in (*said, tempfile.gettempdir(), ".") if place]
    # what is not made yet lies on the disk of the folder above
    there = [
        next(one for one in (place, *place.absolute().parents) if one.exists()) for place in places
    ]
    free = [shutil.disk_usage(place).free for place in there]
    least = min(range(len(free)), key=free.__getitem__)
    return there[least].absolute(), free[least]
