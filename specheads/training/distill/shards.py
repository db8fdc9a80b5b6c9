"""Self-distilled text on disk: whole shards, and journals of those that are not whole yet.

Shard k holds the texts with numbers from k * size on, whoever wrote them and in whichever order.
See docs/distill.md.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError
from specheads.core.files import SCRATCH, sole_writer, sweep, write_atomic
from specheads.data.documents import Documents
from specheads.training.distill.engine import Answer
from specheads.training.distill.journal import Journal, damaged
from specheads.training.distill.texts import Kept, Piece

MARK = "fingerprint.json"
"""Names what decided the text of a folder."""
CLAIM_LOCK = ".lock-claim"

NUMBERED = re.compile(r"(?:shard|open)-(?P<shard>\d+)\.(?:parquet|jsonl)")
EARLIER = ("progress-*.json", "shard-*-*.parquet")
"""Names of files that earlier versions wrote."""

SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "tokens": pa.list_(pa.int32()),
        "counted": pa.list_(pa.uint8()),
        "turns": pa.int32(),
    }
)
FAULTS = b"faults"
"""Metadata of a shard: why texts have no row, or ended before they came to their end."""


def is_claimed(folder: Path, claim: dict[str, Any]) -> bool:
    """Return whether the folder holds this text; refuse it where it holds another."""
    if found := [name for name in EARLIER if any(folder.glob(name))]:
        raise InputError(
            f"self-distilled text must be of this version's layout, and {folder} has {found[0]} of "
            "an earlier one; remove it or choose another folder"
        )
    mark = folder / MARK
    if not mark.is_file():
        return False
    before, now = _read(mark), json.loads(json.dumps(claim))
    for name in now:
        if before.get(name) != now[name]:
            raise InputError(
                "self-distilled text is used with the base, the data and the settings that wrote "
                f"it only: {folder} was written with {name} {before.get(name)}, wanted "
                f"{now[name]}; remove it or choose another folder"
            )
    return True


def claim_folder(folder: Path, claim: dict[str, Any]) -> None:
    """Note what decides the text of a folder, unless that is noted; refuse one of other text."""
    # processes of a run begin together: what one is writing is no leftover to another
    with sole_writer(folder, CLAIM_LOCK, wait=lambda _: None):
        for names in (MARK, "report.*"):
            sweep(folder, names)
        if not is_claimed(folder, claim):
            write_atomic(folder / MARK, json.dumps(claim, indent=1, sort_keys=True) + "\n")


def is_complete(folder: Path, size: int, total: int) -> bool:
    """Return whether all texts below a number are in whole shards, and no journal is left.

    Nothing is verified.
    """
    sealed = _sealed(folder)
    return not any(folder.glob("open-*")) and all(
        max(sealed.get(shard, {"": 0}).values()) >= end and _shard_file(folder, shard).is_file()
        for shard, end in _ends(size, total)
    )


class Shards:
    """What one process, of `world_size`, writes of a folder: every `world_size`-th shard.

    What was kept before is verified; what killed processes left half-written is cleared away.

    Args:
        folder: Folder of all processes' shards.
        size: Texts of a shard, those that were dropped included.
        total: Texts asked for, of all processes.
        rank: Number of this process.
        world_size: Number of processes; it may be another one each time.

    Raises:
        ValueError: What was kept is damaged.
    """

    def __init__(
        self, folder: Path, size: int, total: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.folder, self._size = folder, size
        self._ends = {shard: end for shard, end in _ends(size, total) if shard % world_size == rank}
        for item in folder.glob(".*"):
            found = SCRATCH.fullmatch(item.name)
            numbered = NUMBERED.fullmatch(found["name"]) if found else None
            if found and numbered and int(numbered["shard"]) % world_size == rank:
                sweep(folder, found["name"])
        self._seals = Journal(folder / f"sealed-{rank}.jsonl")
        self._kept: dict[int, dict[int, Kept]] = {}
        self._answers: dict[int, list[Answer]] = {}
        self._journals: dict[int, Journal] = {}
        self.num_done = 0
        """Texts of this process that are done, dropped ones included."""
        sealed = _sealed(folder)
        for shard in list(self._ends):
            self._take_up(shard, sealed.get(shard, {}))

    @property
    def num_texts(self) -> int:
        """Texts that this process is to write, those that are done included."""
        return sum(end - shard * self._size for shard, end in self._ends.items())

    def missing(self) -> Iterator[int]:
        """Yield the numbers of this process's texts that are not done, in order."""
        for shard, end in self._ends.items():
            if shard in self._kept:
                done = set(self._kept[shard])
                yield from (one for one in range(shard * self._size, end) if one not in done)

    def answers(self, number: int) -> list[Answer]:
        """Return what the base answered in a text already, first turn first; once."""
        return self._answers.pop(number, [])

    def note(self, answer: Answer) -> None:
        """Keep an answer, should this process be killed before its shard is whole."""
        row = {"number": answer.number, "tokens": answer.tokens, "finish": answer.finish}
        self._journals[answer.number // self._size].append(row)

    def finish(self, text: Kept) -> None:
        """Take a text that is done; write its shard where it was the last one missing."""
        shard = text.number // self._size
        kept = self._kept[shard]
        kept[text.number] = text
        self.num_done += 1
        first, end = shard * self._size, self._ends[shard]
        if len(kept) == end - first:
            content = _shard([kept[number] for number in range(first, end)])
            self._seals.append({"shard": shard, "end": end, "sha256": _sha256(content)})
            write_atomic(_shard_file(self.folder, shard), content)
            self._journals[shard].remove()
            del self._kept[shard], self._journals[shard]

    def close(self) -> None:
        """Let go of all files."""
        for journal in (self._seals, *self._journals.values()):
            journal.close()

    def _take_up(self, shard: int, seals: dict[str, int]) -> None:
        """Read what there is of a shard of this process."""
        journal, file = Journal(self.folder / f"open-{shard:05d}.jsonl"), None
        first, end = shard * self._size, self._ends[shard]
        # its seal is written before it is: a process may have been killed between the two
        if seals and (_shard_file(self.folder, shard).is_file() or not journal.path.is_file()):
            file, sealed_end = _verified(self.folder, shard, seals)
            self.num_done += min(end, sealed_end) - first
            if sealed_end >= end:
                journal.remove()
                return
        self._journals[shard] = journal
        self._kept[shard] = {text.number: text for text in _texts(file)} if file else {}
        for row in journal.read():
            answer = Answer(row["number"], row["tokens"], row["finish"])
            if answer.number not in self._kept[shard]:
                self._answers.setdefault(answer.number, []).append(answer)


def read_text(folder: Path, num_samples: int) -> Documents:
    """Return the texts of a folder with numbers below `num_samples`, but for those dropped.

    Raises:
        ValueError: They are not all there, are damaged, or all were dropped.
    """
    pieces = [table for table, _ in read_shards(folder, num_samples)]
    table = pa.concat_tables(pieces)
    if not table.num_rows:
        raise InputError(
            f"text to learn from is needed, and all {num_samples} texts of {folder} were dropped; "
            "see its report.md, and ask otherwise or drop less"
        )
    return Documents(table.select(["tokens", "counted"]).rename_columns(["tokens", "loss_mask"]))


def read_shards(folder: Path, num_samples: int) -> Iterator[tuple[pa.Table, dict[int, str]]]:
    """Yield the rows of each shard below a number, and the faults of its texts by number."""
    size, sealed = int(_read(folder / MARK).get("shard_size", 1)), _sealed(folder)
    for shard, end in _ends(size, num_samples):
        seals = sealed.get(shard, {})
        if not seals or max(seals.values()) < end:
            raise InputError(
                f"self-distilled text must be whole, and {folder} lacks some of its {num_samples} "
                "texts; write them with the command that began it"
            )
        file, _ = _verified(folder, shard, seals)
        table = pq.read_table(io.BytesIO(file))
        faults = {int(number): fault for number, fault in _faults(table).items()}
        below = sum(number < end for number in table["number"].to_pylist())
        yield table.slice(0, below), {one: faults[one] for one in faults if one < end}


def _ends(size: int, total: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each shard, and the number of the text behind its last."""
    for first in range(0, total, size):
        yield first // size, min(first + size, total)


def _shard_file(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def _sealed(folder: Path) -> dict[int, dict[str, int]]:
    """Return the checksums that each shard may have, each with the number behind its last text.

    There are several where a shard was written anew, since more texts were asked for.
    """
    out: dict[int, dict[str, int]] = {}
    for file in sorted(folder.glob("sealed-*.jsonl")):
        for row in Journal(file).read():
            out.setdefault(row["shard"], {})[row["sha256"]] = row["end"]
    return out


def _verified(folder: Path, shard: int, seals: dict[str, int]) -> tuple[bytes, int]:
    """Return a shard's content, as it was written, and the number behind its last text."""
    file = _shard_file(folder, shard)
    content = file.read_bytes() if file.is_file() else b""
    if (checksum := _sha256(content)) not in seals:
        raise damaged(file)
    return content, seals[checksum]


def _shard(texts: list[Kept]) -> bytes:
    rows = [{"number": text.number} | asdict(one) for text in texts for one in text.pieces]
    columns = [[row[name] for row in rows] for name in SCHEMA.names]
    faults = {str(text.number): text.fault for text in texts if text.fault}
    schema = SCHEMA.with_metadata({FAULTS: json.dumps(faults).encode()})
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), content)
    return content.getvalue()


def _texts(shard: bytes) -> list[Kept]:
    """Return the texts of a shard, those that were dropped too."""
    table = pq.read_table(io.BytesIO(shard))
    faults = {int(number): fault for number, fault in _faults(table).items()}
    pieces: dict[int, list[Piece]] = {number: [] for number in faults}
    for row in table.to_pylist():
        pieces.setdefault(row.pop("number"), []).append(Piece(**row))
    return [Kept(number, found, faults.get(number, "")) for number, found in pieces.items()]


def _faults(table: pa.Table) -> dict[str, str]:
    return json.loads((table.schema.metadata or {}).get(FAULTS, b"{}"))


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise damaged(file)
    return value


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
