"""Phase two's text: what the frozen base itself writes, kept in shards and written once.

See docs/two_phases.md.
"""

import hashlib
import io
import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.config import Distill
from specheads.core.errors import InputError
from specheads.core.files import sole_writer, sweep, write_atomic
from specheads.data.documents import Documents
from specheads.data.packing import Text

Write = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, seed) -> the new tokens of each."""

MARK = "fingerprint.json"
"""Names what decided the text of a folder."""


def write_shards(
    folder: Path,
    prompts: Text,
    write: Write,
    settings: Distill,
    identity: dict[str, Any],
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Generator[int, None, None]:
    """Have the base continue corpus prompts; yield how many texts are done, after each shard.

    Every shard is drawn from a seed of its own, so stopping and going on, in this call or in a
    later one, gives the same text as never stopping. Each process writes shards of its own,
    `shard-RANK-NUMBER.parquet`. The first `prompt_tokens` of each row are continued, so rows as
    long as the text to be written spread the prompts over more documents.

    Raises:
        ValueError: The folder holds text that other settings or another `identity` decided: what
            else decides it, by name, see `text_identity`. Or it is damaged, or being written.
    """
    # where the text is kept does not decide what it says
    decisive = {name: value for name, value in asdict(settings).items() if name != "folder"}
    claim = identity | decisive | {"seed": seed}
    wanted = -(-settings.num_samples // world_size)
    if _is_claimed(folder, claim) and _progress(folder, rank)["texts"] >= wanted:
        return
    # one lock a process: those of a run write side by side, a second run finds the same ones held
    with sole_writer(folder, f".lock-{rank}"):
        sweep(folder, "*" if world_size == 1 else f"*-{rank}[-.]*")
        if not _is_claimed(folder, claim):
            write_atomic(folder / MARK, json.dumps(claim, indent=1, sort_keys=True) + "\n")
        done = _progress(folder, rank)
        batches = prompts.batches(done["cursor"])
        while done["texts"] < wanted:
            batch, cursor = next(batches)
            rows = batch.tokens[: wanted - done["texts"], : settings.prompt_tokens].tolist()
            number = len(done["shards"])
            written = write(rows, (seed * 1_000 + rank) * 1_000_000 + number)
            first = done["texts"]
            numbers = range(first * world_size + rank, (first + len(rows)) * world_size, world_size)
            shard = _bytes(_table(rows, written, numbers))
            name = f"shard-{rank}-{number:05d}.parquet"
            write_atomic(folder / name, shard)
            shards = done["shards"] | {name: _sha256(shard)}
            done = {"texts": done["texts"] + len(rows), "shards": shards, "cursor": cursor}
            sealed = done | {"sha256": _sha256(json.dumps(done, sort_keys=True).encode())}
            write_atomic(folder / f"progress-{rank}.json", json.dumps(sealed, indent=1) + "\n")
            yield done["texts"]


def documents(folder: Path) -> Documents:
    """Return the text of a folder, of all ranks, once all of it has shown to be as it was written.

    Only what the base wrote counts.
    """
    ranks = [file.stem.removeprefix("progress-") for file in folder.glob("progress-*.json")]
    shards = {
        name: sum for one in ranks for name, sum in sorted(_progress(folder, one)["shards"].items())
    }
    tables = [pq.read_table(folder / name) for name in sorted(shards)]
    table = pa.concat_tables(tables) if tables else _table([], [], range(0))
    return Documents(table, _sha256(json.dumps(shards, sort_keys=True).encode())[:32])


def _is_claimed(folder: Path, claim: dict[str, Any]) -> bool:
    """Return whether the folder holds this text; refuse it where it holds another."""
    if not (mark := folder / MARK).is_file():
        return False
    before, now = _read(mark), json.loads(json.dumps(claim))
    for name in now:
        # text of earlier versions has one hash of all, and that left the corpus's content out
        if before.get(name) != now[name]:
            raise InputError(
                "self-distilled text is used with the base, the corpus and the settings that wrote "
                f"it only: {folder} was written with {name} {before.get(name)}, wanted "
                f"{now[name]}; remove it or choose another folder"
            )
    return True


def _progress(folder: Path, rank: int | str) -> dict[str, Any]:
    """Return what a process has written, once all of it has shown to be as it was written."""
    file = folder / f"progress-{rank}.json"
    if not file.is_file():
        return {"texts": 0, "shards": {}, "cursor": None}
    done = _read(file)
    if done.pop("sha256", None) != _sha256(json.dumps(done, sort_keys=True).encode()):
        raise _damaged(file)
    for name, expected in done["shards"].items():
        shard = folder / name
        if not shard.is_file() or _sha256(shard.read_bytes()) != expected:
            raise _damaged(shard)
    return done


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _damaged(file)
    return value


def _damaged(file: Path) -> InputError:
    # shards are drawn from seeds of their own, so what is written anew is the same
    return InputError(
        f"self-distilled text must be as it was written, and {file} is damaged or missing; remove "
        f"{file.parent} to have the same text written again"
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _table(prompts: list[list[int]], written: list[list[int]], numbers: Iterable[int]) -> pa.Table:
    texts = list(zip(prompts, written, strict=True))
    return pa.table(
        {
            "number": pa.array(numbers, pa.int64()),
            "tokens": pa.array([row + new for row, new in texts], pa.list_(pa.int32())),
            "counted": pa.array(
                [[0] * len(row) + [1] * len(new) for row, new in texts], pa.list_(pa.uint8())
            ),
        }
    )


def _bytes(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content)
    return content.getvalue()
