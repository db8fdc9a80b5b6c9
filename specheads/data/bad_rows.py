"""Rows that cannot be used: locate their errors, and report them together."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from specheads.core.errors import InputError

MAX_SHOWN = 5
"""Rows shown for each reason, and reasons shown, if rows cannot be used."""

MAX_FILES = 3
"""Files named for each reason, if files are left out."""


@contextmanager
def locate_errors(location: str) -> Iterator[None]:
    """Name the row in the errors of a block."""
    try:
        yield
    except InputError as error:
        error.where = location
        raise


def join_keys(keys: Iterable[str]) -> str:
    """Return the keys of a row in one line of at most 100 characters, for messages."""
    return f"{' '.join(', '.join(keys).split()) or 'no key':.100}"


def name_files(reasons: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return a phrase with the count and the first files of each reason."""
    return [
        f"{len(paths):,} {reason} ({', '.join(map(str, paths[:MAX_FILES]))}"
        f"{', ...' if len(paths) > MAX_FILES else ''})"
        for reason, paths in reasons.items()
    ]


class BadRows:
    """Collects rows that cannot be used, to report them together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._errors: defaultdict[str, list[InputError]] = defaultdict(list)
        """The first errors of each rule."""
        self.skipped_files: defaultdict[str, list[Path]] = defaultdict(list)
        """Files that are left out, by reason."""
        self.num_blank = 0
        """Rows whose text is null or blank."""

    @property
    def counts(self) -> dict[str, int]:
        """Rows that cannot be used, by rule, the most common first."""
        return dict(self._counts.most_common())

    def add(self, error: InputError) -> None:
        """Count a row, and keep the first errors of each rule; raise an error of no row."""
        if not error.fault:
            raise error
        self._counts[error.rule] += 1
        if self._counts[error.rule] <= MAX_SHOWN:
            self._errors[error.rule].append(error)

    def report(self, source: str, choice: str) -> None:
        """Raise with all bad rows of a source if the choice is "stop", or warn if it is "drop".

        Files that are left out are a warning.
        """
        if self.skipped_files:
            phrases = "; ".join(name_files(self.skipped_files))
            warnings.warn(f"files of {source} are left out: {phrases}", stacklevel=2)
        if not self._counts:
            return
        common = self._counts.most_common(MAX_SHOWN)
        reasons = [
            f"{rule} ({count:,}: {_locations(self._errors[rule])})" for rule, count in common
        ]
        if num_more := len(self._counts) - len(common):
            reasons.append(f"and {num_more} more reasons")
        total = self._counts.total()
        rows = "1 row" if total == 1 else f"{total:,} rows"
        line = f"{rows} of {source} cannot be used: {'; '.join(reasons)}"
        if choice == "drop":
            warnings.warn(f"{line}; they are left out", stacklevel=2)
            return
        raise InputError(
            f"{line}; fix or remove them, or leave them out with data.bad_rows=drop",
            self._errors[common[0][0]][0].details,
        )


def _locations(errors: list[InputError]) -> str:
    """Return the locations of rows, the first with its fault; name a file once."""
    phrases, last_file = [], ""
    for error in errors:
        position, _, file = error.where.partition(" of ")
        location = position if file == last_file else error.where
        phrases.append(location if phrases else f"{location} {error.fault}")
        last_file = file
    return ", ".join(phrases)
