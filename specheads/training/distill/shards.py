"""Self-distilled text on disk: finished shards, and journals of unfinished ones.

Shard k has the texts with numbers from k * size to (k + 1) * size - 1, independent of the process
and the order of generation. See docs/distill.md.
"""

import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError
from specheads.core.files import SCRATCH, naming_full_disk, sole_writer, sweep, write_atomic
from specheads.data.documents import Documents
from specheads.training.distill.engine import Answer
from specheads.training.distill.texts import FinishedText, Piece


class Journal:
    """File of JSON lines with a checksum each.

    A row is in the operating system's buffers when `append` returns, so killing the process after
    that loses nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return all complete rows; empty without a file.

        Raises:
            ValueError: A complete line does not match its checksum.
        """
        return [_row(self.path, line) for line in self._lines()]

    def append(self, row: dict[str, Any]) -> None:
        """Add a row."""
        with naming_full_disk(self.path):
            if self._file is None:
                whole = sum(len(line) + 1 for line in self._lines())
                self._file = self.path.open("ab", buffering=0)
                self._file.truncate(whole)
            body = json.dumps(row, separators=(",", ":"))
            self._file.write(f'{{"crc":{zlib.crc32(body.encode())},"row":{body}}}\n'.encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Remove the file if it exists."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else []


def _row(path: Path, line: bytes) -> dict[str, Any]:
    try:
        kept = json.loads(line)
        body = json.dumps(kept["row"], separators=(",", ":"))
        holds = zlib.crc32(body.encode()) == kept["crc"]
    except (ValueError, RecursionError, KeyError, TypeError):
        holds, kept = False, {}
    if not holds:
        raise damaged(path)
    return kept["row"]


def damaged(file: Path) -> InputError:
    """Return the error for a damaged file of generated text."""
    # each answer has its own seed, so the text generated again is the same
    return InputError(
        f"self-distilled text must match its checksums, but {file} is damaged or missing; remove "
        f"{file.parent} to generate the same text again"
    )


MARK = "fingerprint.json"
"""File with everything that determines the text of a folder."""
CLAIM_LOCK = ".lock-claim"

NUMBERED = re.compile(r"(?:shard|open)-(?P<shard>\d+)\.(?:parquet|jsonl)")
EARLIER = ("progress-*.json", "shard-*-*.parquet")
"""File names of earlier versions."""

SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "tokens": pa.list_(pa.int32()),
        "counted": pa.list_(pa.uint8()),
        "turns": pa.int32(),
    }
)
FAULTS = b"faults"
"""Key of a shard's metadata: faults of texts that were dropped or end early."""


def is_claimed(folder: Path, claim: dict[str, Any]) -> bool:
    """Return whether the folder is claimed for this text; raise if it has another one."""
    if found := [name for name in EARLIER if any(folder.glob(name))]:
        raise InputError(
            f"self-distilled text must have this version's layout, but {folder} has {found[0]} of "
            "an earlier version; remove it or choose another folder"
        )
    mark = folder / MARK
    if not mark.is_file():
        return False
    before, now = _read(mark), json.loads(json.dumps(claim))
    for name in now:
        if before.get(name) != now[name]:
            raise InputError(
                "self-distilled text needs the base, data and settings that generated it: "
                f"{folder} was generated with {name} {before.get(name)}, got {now[name]}; remove "
                "it or choose another folder"
            )
    return True


def claim_folder(folder: Path, claim: dict[str, Any]) -> None:
    """Claim a folder for a text; raise if it has another one."""
    # the processes of a run start together: under the lock, a scratch file is a leftover
    with sole_writer(folder, CLAIM_LOCK, wait=lambda _: None):
        for names in (MARK, "report.*"):
            sweep(folder, names)
        if not is_claimed(folder, claim):
            write_atomic(folder / MARK, json.dumps(claim, indent=1, sort_keys=True) + "\n")


def is_complete(folder: Path, size: int, total: int) -> bool:
    """Return whether the folder has all shards and no journal, without checking checksums."""
    sealed = _sealed(folder)
    return not any(folder.glob("open-*")) and all(
        max(sealed.get(shard, {"": 0}).values()) >= end and _shard_file(folder, shard).is_file()
        for shard, end in _ends(size, total)
    )


class Shards:
    """The shards of one process: every `world_size`-th shard of a folder.

    Existing files are verified. Scratch files of killed processes are removed.

    Args:
        folder: Folder of all processes' shards.
        size: Texts per shard, including dropped ones.
        total: Texts of all processes.
        rank: Number of this process.
        world_size: Number of processes; it may differ between calls.

    Raises:
        ValueError: A file is damaged.
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
        self._kept: dict[int, dict[int, FinishedText]] = {}
        self._answers: dict[int, list[Answer]] = {}
        self._journals: dict[int, Journal] = {}
        self.num_done = 0
        """Finished texts of this process, including dropped ones."""
        sealed = _sealed(folder)
        for shard in list(self._ends):
            self._load(shard, sealed.get(shard, {}))

    @property
    def num_texts(self) -> int:
        """Texts of this process, including finished ones."""
        return sum(end - shard * self._size for shard, end in self._ends.items())

    def missing(self) -> Iterator[int]:
        """Yield the numbers of this process's unfinished texts, in order."""
        for shard, end in self._ends.items():
            if shard in self._kept:
                done = set(self._kept[shard])
                yield from (one for one in range(shard * self._size, end) if one not in done)

    def answers(self, number: int) -> list[Answer]:
        """Return and forget the stored answers of a text, in order of turns."""
        return self._answers.pop(number, [])

    def note(self, answer: Answer) -> None:
        """Store an answer in the journal, in case the process is killed."""
        row = {"number": answer.number, "tokens": answer.tokens, "finish": answer.finish}
        self._journals[answer.number // self._size].append(row)

    def finish(self, text: FinishedText) -> None:
        """Add a finished text; write its shard if it was the last missing text."""
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
        """Close all files."""
        for journal in (self._seals, *self._journals.values()):
            journal.close()

    def _load(self, shard: int, seals: dict[str, int]) -> None:
        """Read the files of a shard of this process."""
        journal, file = Journal(self.folder / f"open-{shard:05d}.jsonl"), None
        first, end = shard * self._size, self._ends[shard]
        # the seal is written before the shard: the process may be killed between the two
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
    """Return the texts of a folder with numbers below `num_samples`, except dropped ones.

    Raises:
        ValueError: Texts are missing or damaged, or all were dropped.
    """
    pieces = [table for table, _ in read_shards(folder, num_samples)]
    table = pa.concat_tables(pieces)
    if not table.num_rows:
        raise InputError(
            f"training needs text, but all {num_samples} texts in {folder} were dropped; see its "
            "report.md, and change the prompts or distill.drop"
        )
    return Documents(table.select(["tokens", "counted"]).rename_columns(["tokens", "loss_mask"]))


def read_shards(folder: Path, num_samples: int) -> Iterator[tuple[pa.Table, dict[int, str]]]:
    """Yield the rows of each shard with numbers below `num_samples`, and the faults by number."""
    size, sealed = int(_read(folder / MARK).get("shard_size", 1)), _sealed(folder)
    for shard, end in _ends(size, num_samples):
        seals = sealed.get(shard, {})
        if not seals or max(seals.values()) < end:
            raise InputError(
                f"self-distilled text must be complete, but {folder} lacks some of {num_samples} "
                "texts; run the command that started it again"
            )
        file, _ = _verified(folder, shard, seals)
        table = pq.read_table(io.BytesIO(file))
        faults = {int(number): fault for number, fault in _faults(table).items()}
        below = sum(number < end for number in table["number"].to_pylist())
        yield table.slice(0, below), {one: faults[one] for one in faults if one < end}


def _ends(size: int, total: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each shard and the end of its texts (exclusive)."""
    for first in range(0, total, size):
        yield first // size, min(first + size, total)


def _shard_file(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def _sealed(folder: Path) -> dict[int, dict[str, int]]:
    """Return the valid checksums of each shard, each with the end of its texts (exclusive).

    A shard has several after `num_samples` was raised.
    """
    out: dict[int, dict[str, int]] = {}
    for file in sorted(folder.glob("sealed-*.jsonl")):
        for row in Journal(file).read():
            out.setdefault(row["shard"], {})[row["sha256"]] = row["end"]
    return out


def _verified(folder: Path, shard: int, seals: dict[str, int]) -> tuple[bytes, int]:
    """Return a shard's verified content, and the end of its texts (exclusive)."""
    file = _shard_file(folder, shard)
    content = file.read_bytes() if file.is_file() else b""
    if (checksum := _sha256(content)) not in seals:
        raise damaged(file)
    return content, seals[checksum]


def _shard(texts: list[FinishedText]) -> bytes:
    rows = [{"number": text.number} | asdict(one) for text in texts for one in text.pieces]
    columns = [[row[name] for row in rows] for name in SCHEMA.names]
    faults = {str(text.number): text.fault for text in texts if text.fault}
    schema = SCHEMA.with_metadata({FAULTS: json.dumps(faults).encode()})
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), content)
    return content.getvalue()


def _texts(shard: bytes) -> list[FinishedText]:
    """Return the texts of a shard, including dropped ones."""
    table = pq.read_table(io.BytesIO(shard))
    faults = {int(number): fault for number, fault in _faults(table).items()}
    pieces: dict[int, list[Piece]] = {number: [] for number in faults}
    for row in table.to_pylist():
        pieces.setdefault(row.pop("number"), []).append(Piece(**row))
    return [FinishedText(number, found, faults.get(number, "")) for number, found in pieces.items()]


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
