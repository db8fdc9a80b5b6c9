"""Report on self-distilled text: kept and dropped texts, lengths and samples."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specheads.core.errors import printable
from specheads.training.distill.shards import read_shards

NUM_SAMPLES = 5
MAX_CHARACTERS = 1200
"""Maximum characters of a sample."""
QUANTILES = (0, 10, 50, 90, 100)


def report_of(
    folder: Path,
    num_samples: int,
    decode: Callable[[list[int]], str],
    tokens_per_second: float | None = None,
) -> dict[str, Any]:
    """Return the report on the texts of a folder; the speed is None if nothing was generated.

    `dropped` counts texts without a kept answer by the fault of the first answer, `cut` kept texts
    that end early by the fault of the next answer.
    """
    table = read_shards(folder, num_samples)
    kept = table.filter(pc.field("turns") > 0)
    masks = [np.asarray(row.values) for row in kept["loss_mask"]]
    generated = [int(mask.sum()) for mask in masks]
    rows = np.linspace(0, kept.num_rows - 1, min(NUM_SAMPLES, kept.num_rows)).astype(int).tolist()
    shown = kept.take(rows).to_pylist()
    return {
        "requested": num_samples,
        "kept": len(kept["number"].unique()),
        "dropped": _faults(table.filter(pc.field("turns") == 0)),
        "cut": _faults(kept),
        "turns": sum(kept["turns"].to_pylist()),
        "tokens": sum(generated),
        "prompt_tokens": sum(map(len, masks)) - sum(generated),
        "lengths": {f"{one} %": int(np.percentile(generated or [0], one)) for one in QUANTILES},
        "tokens_per_second": tokens_per_second,
        "samples": {row["number"]: printable(decode(row["tokens"])) for row in shown},
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    speed = report["tokens_per_second"]
    lengths = ", ".join(f"{share}: {tokens:,}" for share, tokens in report["lengths"].items())
    lines = [
        "# Self-distilled text",
        "",
        f"- requested: {report['requested']:,} texts",
        f"- kept: {report['kept']:,} texts with {report['turns']:,} answers",
        f"- dropped: {_counts(report['dropped'])}",
        f"- truncated: {_counts(report['cut'])}",
        f"- tokens: {report['tokens']:,} generated, {report['prompt_tokens']:,} of prompts",
        f"- generated tokens per text, quantiles: {lengths}",
        f"- speed: {f'{speed:,.0f} tokens/s' if speed else 'not measured'}",
        "",
        "## Samples",
    ]
    for number, text in report["samples"].items():
        shown = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
        lines += ["", f"Text {number}:", "", "~~~~", shown.replace("~~~~", "~~~"), "~~~~"]
    return "\n".join(lines) + "\n"


def _faults(table: pa.Table) -> dict[str, int]:
    return dict(Counter(fault for fault in table["fault"].to_pylist() if fault).most_common())


def _counts(counts: dict[str, int]) -> str:
    found = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    return f"{sum(counts.values()):,} ({found})" if found else "none"
