"""Self-distilled text on disk: one Parquet file for each block of texts. See docs/distill.md."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specheads.core.errors import InputError
from specheads.core.files import write_atomic
from specheads.data.documents import Documents

MARK = "fingerprint.json"
"""File with everything that determines the text of a folder."""

SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "turns": pa.int32(),
        "fault": pa.string(),
    }
)
"""One row per piece of a text; a dropped text has one row without tokens."""


def refuse_other_text(folder: Path, claim: dict[str, Any]) -> None:
    """Raise if a folder has text that something else determines than `claim`."""
    mark = folder / MARK
    if not mark.is_file():
        return
    try:
        before = dict(json.loads(mark.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise _damaged(mark, folder) from None
    for name, value in json.loads(json.dumps(claim)).items():
        # folders of earlier versions have no base_config
        if before.get(name, value if name == "base_config" else None) != value:
            raise InputError(
                "self-distilled text needs the base, data and settings that generated it: "
                f"{folder} was generated with {name} {before.get(name)}, got {value}; use the "
                "same settings, or choose another folder"
            )


def claim_folder(folder: Path, claim: dict[str, Any]) -> None:
    """Write what determines the text of a folder; processes of one run write the same."""
    write_atomic(folder / MARK, json.dumps(claim, indent=1, sort_keys=True) + "\n")


def missing_blocks(folder: Path, size: int, total: int) -> dict[int, range]:
    """Return the numbers of the texts of each block without a complete shard.

    Block k has the texts from k * size to (k + 1) * size - 1, independent of the processes.
    """
    blocks = {
        first // size: range(first, min(first + size, total)) for first in range(0, total, size)
    }
    return {
        block: numbers
        for block, numbers in blocks.items()
        if not (file := _shard_file(folder, block)).is_file() or _last(file) < numbers[-1]
    }


def write_shard(folder: Path, block: int, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a block's texts atomically."""
    content = io.BytesIO()
    rows = sorted(rows, key=lambda row: row["number"])
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), content, write_page_checksum=True)
    write_atomic(_shard_file(folder, block), content.getvalue())


def read_shards(folder: Path, num_samples: int) -> pa.Table:
    """Return the rows of the texts with numbers below `num_samples`, including dropped texts.

    Raises:
        ValueError: Texts are missing or damaged.
    """
    files = sorted(folder.glob("shard-*.parquet"), key=lambda file: int(file.stem[6:]))
    table = pa.concat_tables([SCHEMA.empty_table(), *map(_read, files)])
    table = table.filter(pc.field("number") < num_samples)
    if (found := len(table["number"].unique())) < num_samples:
        raise InputError(
            f"self-distilled text must be complete, but {folder} has {found} of {num_samples} "
            "texts; run the command that started it again"
        )
    return table


def read_text(folder: Path, num_samples: int) -> Documents:
    """Return the texts of a folder with numbers below `num_samples`, except dropped ones.

    Raises:
        ValueError: Texts are missing or damaged, or all were dropped.
    """
    table = read_shards(folder, num_samples).filter(pc.field("turns") > 0)
    if not table.num_rows:
        raise InputError(
            f"training needs text, but all {num_samples} texts in {folder} were dropped; see its "
            "report.md, and change the prompts or distill.drop"
        )
    return Documents(table.select(["tokens", "loss_mask"]))


def _shard_file(folder: Path, block: int) -> Path:
    return folder / f"shard-{block:05d}.parquet"


def _last(file: Path) -> int:
    """Return the number of the last text in a shard."""
    return _read(file, ["number"])["number"][-1].as_py()


def _read(file: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as shard:
            if shard.schema_arrow == SCHEMA and shard.metadata.num_rows:
                return shard.read(columns)
    except (pa.ArrowException, OSError):
        pass
    raise _damaged(file, file)


def _damaged(file: Path, remove: Path) -> InputError:
    # each answer has its own seed, so the text generated again is the same
    return InputError(
        f"self-distilled text must match its checksums, but {file} is damaged; remove {remove} and "
        "run the command again to generate the same text"
    )
