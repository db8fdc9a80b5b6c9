"""Data sets of the Hugging Face Hub, whole or as a stream of rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specheads.config.parts import Source
from specheads.core.errors import InputError
from specheads.data.jsonl import Row, names, text_row
from specheads.data.local import told

SHUFFLED = 1000
"""Rows of a stream that are held, to be taken in another order."""


def load_from_hub(path: str, **choices: Any) -> Any:
    """Call `datasets.load_dataset`; a Hub that cannot be reached is a ValueError of one line."""
    # it takes a while to import, and few commands need it
    import datasets

    with _reachable(path):
        return datasets.load_dataset(path, **choices)


def hub_rows(source: Source, seed: int) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a data set's "train"; where they are bounded it is not loaded whole.

    Of `max_documents` a seed decides which they are, among neighbours; the first ones are taken
    where `streaming` says so.
    """
    if not source.path:
        raise InputError(f"source {source.source!r} needs the id of a dataset as its path")
    most = source.max_documents
    rows = load_from_hub(
        source.path,
        name=source.config or None,
        revision=source.revision,
        split="train",
        data_files=list(source.patterns) or None,
        streaming=most > 0,
    )
    if most and not source.streaming:
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLED)
    with _reachable(source.path):
        for number, row in enumerate(rows.take(most) if most else rows, start=1):
            yield f"row {number} of dataset {source.path}", row


def hub_texts(source: Source, seed: int) -> Iterator[tuple[str, Row]]:
    """Yield the texts of a column of a data set."""
    column = source.column
    for where, row in hub_rows(source, seed):
        if column not in row:
            raise InputError(f"{where} has no column {column!r}; it has {names(row)}")
        yield where, text_row(row, column, where)


@contextmanager
def _reachable(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # the network, the Hub and every format's reader raise errors of their own
        raise InputError(
            f"cannot load {path!r:.80} from the Hub: {told(error)}; check the id and the network, "
            "or pass a local file instead"
        ) from error
