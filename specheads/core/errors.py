"""Errors of the user's input, as opposed to bugs."""

from collections.abc import Iterator
from operator import index
from typing import Any


class InputError(ValueError):
    """A setting, file or argument is refused, in one line with rule, value and remedy.

    Commands print this line and exit with code 2. Any other error is a bug. Commands print
    `details` below it, for information that needs more than one line.

    For a row of data, `fault` is what the row has, as a phrase ("has 3"), and `line` is the rule
    alone: the same text for all rows that break it. `where` locates the row.
    """

    def __init__(self, line: str, details: str = "", *, fault: str = "") -> None:
        super().__init__(line)
        self.details, self.rule, self.fault, self.where = details, line, fault, "a row"

    def __str__(self) -> str:
        if not self.fault:
            return self.rule
        return f"{self.rule}; {self.where} {self.fault}: fix or remove the row"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def printable(text: str) -> str:
    """Escape control characters: a terminal shows the text and does not execute it."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else f"\\x{ord(character):02x}"
        for character in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened, or the name of its class."""
    return f"{(str(error).splitlines() or [''])[0] or type(error).__name__:.200}"


def one_line(error: BaseException) -> str:
    """Return the whole message of an error on one line, or the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__


def require_integer(value: Any, name: str, minimum: int | None = 0) -> int:
    """Return an integer of Python, numpy or torch as an `int`; refuse anything else."""
    try:
        # Python counts True and boolean tensors as integers
        number = None if "bool" in str(getattr(value, "dtype", type(value))) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {value!r:.80}")
    if minimum is not None and number < minimum:
        raise InputError(f"{name} must be at least {minimum}, got {number}")
    return number
