"""Self-distilled text on disk: a Parquet file for each block of texts, and a report on all of them.

See docs/distill.md.
"""

import io
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specheads.core.errors import InputError, printable
from specheads.core.files import write_atomic
from specheads.data.tokenise import TokenisedDocuments

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


REMEDIES = {
    "truncated": "raise new_tokens, or set drop=[loop,empty]",
    "loop": "raise temperature or repetition_penalty, or set drop=[empty,truncated]",
    "empty": "check the base's chat template, or set drop=[loop,truncated]",
    "context": "give shorter conversations",
    "unasked": "give conversations with a user's message",
}
"""What to change if every text has a fault."""


def refuse_other_text(folder: Path, claim: dict[str, Any]) -> None:
    """Raise if a folder has text that something else determines than `claim`."""
    mark = folder / MARK
    if not mark.is_file():
        shards = sorted(folder.glob("shard-*.parquet"))
        others = [file for file in shards if not _is_shard(file)]
        if others := others if shards else [*folder.glob("report.md")]:
            raise InputError(
                f"generated text needs a folder of its own, and {folder} has another "
                f"{others[0].name}; choose another folder"
            )
        return
    try:
        before = dict(json.loads(mark.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise _damaged(mark, folder) from None
    for name, value in json.loads(json.dumps(claim)).items():
        if before.get(name) != value:
            raise InputError(
                "self-distilled text needs the base, data and settings that generated it: "
                f"{folder} was generated with {name} {before.get(name)}, got {value}; use the "
                "same settings, or choose another folder"
            )


def missing_blocks(folder: Path, size: int, total: int) -> dict[int, range]:
    """Return the numbers of the texts of each block without a complete shard.

    Block k has the texts from k * size to (k + 1) * size - 1, independent of the processes.
    """
    missing = dict[int, range]()
    for first in range(0, total, size):
        block, numbers = first // size, range(first, min(first + size, total))
        file = _shard_file(folder, block)
        if not file.is_file() or _last_number(file) < numbers[-1]:
            missing[block] = numbers
    return missing


def write_shard(folder: Path, block: int, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a block's texts atomically."""
    content = io.BytesIO()
    rows = sorted(rows, key=lambda row: row["number"])
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), content, write_page_checksum=True)
    write_atomic(_shard_file(folder, block), content.getvalue())


def read_shards(folder: Path, num_samples: int) -> pa.Table:
    """Return the rows of the texts with numbers below `num_samples`, including dropped texts."""
    files = sorted(folder.glob("shard-*.parquet"), key=lambda file: int(file.stem[6:]))
    table = pa.concat_tables([SCHEMA.empty_table(), *map(_read_shard, files)])
    table = table.filter(pc.field("number") < num_samples)
    if (num_texts := len(table["number"].unique())) < num_samples:
        raise InputError(
            f"self-distilled text must be complete, but {folder} has {num_texts} of {num_samples} "
            "texts; run the command that started it again"
        )
    return table


def read_text(folder: Path, num_samples: int) -> TokenisedDocuments:
    """Return the texts of a folder with numbers below `num_samples`, except dropped ones."""
    table = read_shards(folder, num_samples)
    refuse_all_dropped(folder, num_samples, _count_faults(table.filter(pc.field("turns") == 0)))
    answered = table.filter(pc.field("turns") > 0)
    return TokenisedDocuments(answered.select(["tokens", "loss_mask"]))


def refuse_all_dropped(folder: Path, num_samples: int, dropped: dict[str, int]) -> None:
    """Raise if no text of a folder has an answer; `dropped` counts texts by fault."""
    if sum(dropped.values()) == num_samples:
        counts = ", ".join(f"{fault}: {count:,}" for fault, count in dropped.items())
        raise InputError(
            f"generated text needs answers, but none of {num_samples:,} in {folder} was kept "
            f"(dropped: {counts}); {REMEDIES[next(iter(dropped))]}, and generate the text into "
            "another folder: out=FOLDER, or another name of the run"
        )


def _is_shard(file: Path) -> bool:
    with suppress(pa.ArrowException, OSError):
        return pq.read_schema(file).equals(SCHEMA)
    return False


def _shard_file(folder: Path, block: int) -> Path:
    return folder / f"shard-{block:05d}.parquet"


def _last_number(file: Path) -> int:
    """Return the number of the last text in a shard."""
    return _read_shard(file, ["number"])["number"][-1].as_py()


def _read_shard(file: Path, columns: list[str] | None = None) -> pa.Table:
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


# --- report ------------------------------------------------------------------------------------

NUM_SAMPLES, MAX_CHARACTERS = 5, 1200
"""Samples, and the maximum characters of each."""
QUANTILES = (0, 10, 50, 90, 100)


def report_of(
    folder: Path,
    num_samples: int,
    decode: Callable[[list[int]], str],
    tokens_per_second: float | None = None,
) -> dict[str, Any]:
    """Return the report on the texts of a folder; the speed is None if nothing was generated.

    `dropped` counts texts without a kept answer by the fault of the first answer, `cut` kept texts
    that end early by the fault of the next answer. `lengths` has quantiles of the generated tokens.
    """
    table = read_shards(folder, num_samples)
    answered = table.filter(pc.field("turns") > 0)
    lengths = [sum(mask) for mask in answered["loss_mask"].to_pylist()]
    num_shown = min(NUM_SAMPLES, answered.num_rows)
    samples = answered.take(np.linspace(0, answered.num_rows - 1, num_shown).astype(int))
    return {
        "requested": num_samples,
        "kept": len(answered["number"].unique()),
        "dropped": _count_faults(table.filter(pc.field("turns") == 0)),
        "cut": _count_faults(answered),
        "answers": sum(answered["turns"].to_pylist()),
        "tokens": sum(lengths),
        "lengths": {f"{share} %": int(np.percentile(lengths or [0], share)) for share in QUANTILES},
        "tokens_per_second": tokens_per_second and round(tokens_per_second),
        "samples": {row["number"]: printable(decode(row["tokens"])) for row in samples.to_pylist()},
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = ["# Self-distilled text", ""]
    for name, value in report.items():
        if name != "samples":
            if isinstance(value, dict):
                value = ", ".join(f"{key}: {count:,}" for key, count in value.items())
            lines.append(f"- {name.replace('_', ' ')}: {value or 'none'}")
    lines += ["", "## Samples"]
    for number, text in report["samples"].items():
        text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
        lines += ["", f"Text {number}:", "", "~~~~", text.replace("~~~~", "~~~"), "~~~~"]
    return "\n".join(lines) + "\n"


def _count_faults(table: pa.Table) -> dict[str, int]:
    return dict(Counter(fault for fault in table["fault"].to_pylist() if fault).most_common())
