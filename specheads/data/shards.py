"""Shards of tokenised documents: a folder of files that is whole or absent, mapped when read."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, write_atomic
from specheads.data.documents import Documents
from specheads.data.sources import SPLITS

MARK = "documents.json"
"""Says what a folder of shards holds."""

Document = tuple[np.ndarray, np.ndarray | None]
"""Token ids of a document, and which of them count where not all do."""
Batch = list[tuple[str, Document]]
"""Some documents, each behind its split."""


class EmptySplitError(InputError):
    """A corpus has no document in the split that was asked for."""


def fill(folder: Path, batches: Iterable[Batch], known: dict[str, Any]) -> None:
    """Write documents, each behind its split, and what is known of where they come from."""
    with atomic_folder(folder) as scratch:
        with ExitStack() as held:
            shards = {split: _Shard(scratch / f"{split}.arrow", held) for split in SPLITS}
            for batch in batches:
                for split, shard in shards.items():
                    shard.add([document for found, document in batch if found == split])
        summaries = {split: shard.summary() for split, shard in shards.items()}
        if not any(one["documents"] for one in summaries.values()):
            raise EmptySplitError(
                f"a corpus needs at least one document, {known['source']} {known['path']} has "
                "none; give some"
            )
        write_atomic(scratch / MARK, json.dumps({"splits": summaries, "of": known}, indent=1))


def documents(folder: Path, split: str) -> Documents:
    """Return one split of a folder of shards, mapped into memory.

    Raises:
        ValueError: The split is empty, or the folder is damaged.
    """
    try:
        whole = json.loads((folder / MARK).read_bytes())
        held, known = whole["splits"], whole["of"]
        if number := held[split]["documents"]:
            with pa.memory_map(str(folder / f"{split}.arrow")) as file:
                table = pa.ipc.open_file(file).read_all()
            if len(table) != number:
                raise ValueError(f"{len(table)} documents of {number}")
            return Documents(table, held[split]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise InputError(
            f"tokenised text must be as it was written, and {folder} is damaged; remove it to have "
            "it written again"
        ) from error
    number = sum(one["documents"] for one in held.values())
    raise EmptySplitError(
        f"a corpus needs at least one document in its {split} split, {known['source']} "
        f"{known['path']} has none among {number}; give more documents"
    )


class _Shard:
    """Writes documents to a file, and keeps count of them."""

    def __init__(self, file: Path, held: ExitStack) -> None:
        self._file, self._held, self._writer = file, held, None
        self._digest = hashlib.sha256()
        self.num_documents = self.num_tokens = 0

    def add(self, documents: list[Document]) -> None:
        """Write documents behind those before them, in one batch; none are no batch."""
        if not documents:
            return
        lengths = np.array([len(tokens) for tokens, _ in documents], np.int32)
        ends = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())
        columns = {"tokens": np.concatenate([tokens for tokens, _ in documents])}
        if loss_mask := [one for _, one in documents if one is not None]:
            columns["loss_mask"] = np.concatenate(loss_mask)
        for values in (lengths, *columns.values()):
            self._digest.update(values.tobytes())
        batch = pa.record_batch(
            {name: pa.ListArray.from_arrays(ends, values) for name, values in columns.items()}
        )
        if self._writer is None:
            file = self._held.enter_context(pa.OSFile(str(self._file), "wb"))
            self._writer = self._held.enter_context(pa.ipc.new_file(file, batch.schema))
        self._writer.write_batch(batch)
        self.num_documents += len(documents)
        self.num_tokens += int(lengths.sum())

    def summary(self) -> dict[str, Any]:
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "fingerprint": self._digest.hexdigest()[:32],
        }
