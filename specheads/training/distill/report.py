"""Report on self-distilled text: kept and dropped texts, lengths and samples."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specheads.core.errors import printable
from specheads.core.files import write_atomic
from specheads.training.distill.shards import read_shards

NUM_BINS = 10
NUM_SAMPLES = 5
BAR = 40
"""Characters of the longest bar of the histogram."""

SHOWN = 1200
"""Maximum characters of a sample."""


@dataclass(frozen=True, slots=True)
class Report:
    """Statistics of a folder of self-distilled text."""

    asked: int
    """Requested texts."""
    kept: int
    dropped: dict[str, int]
    """Texts without a kept answer, by the fault of the first answer."""
    cut: dict[str, int]
    """FinishedText texts that end early, by the fault of the next answer."""
    turns: int
    """FinishedText answers."""
    tokens: int
    """Generated tokens of the kept texts."""
    read_tokens: int
    """Prompt tokens of the kept texts."""
    tokens_per_second: float | None
    """Generated tokens per second of the last call that generated text; None if not known."""
    lengths: list[tuple[int, int, int]]
    """Histogram of generated tokens: lower bound, upper bound (exclusive), texts."""
    samples: list[tuple[int, str]]
    """Number and text of some samples, spread over the folder."""


def report_of(
    folder: Path,
    num_samples: int,
    decode: Callable[[list[int]], str],
    tokens_per_second: float | None = None,
) -> Report:
    """Return the report on the texts of a folder."""
    dropped, cut = Counter[str](), Counter[str]()
    kept: set[int] = set()
    written: list[int] = []
    shown: list[tuple[int, str]] = []
    turns = read_tokens = 0
    every = max(1, num_samples // NUM_SAMPLES)
    for table, faults in read_shards(folder, num_samples):
        numbers = table["number"].to_pylist()
        kept |= set(numbers)
        for number, fault in faults.items():
            (cut if number in kept else dropped)[fault] += 1
        turns += sum(table["turns"].to_pylist())
        for row, number in enumerate(numbers):
            counted = np.asarray(table["counted"][row].values)
            written.append(int(counted.sum()))
            read_tokens += len(counted) - written[-1]
            if len(shown) < NUM_SAMPLES and number >= len(shown) * every:
                shown.append((number, decode(table["tokens"][row].as_py())))
    return Report(
        asked=num_samples,
        kept=len(kept),
        dropped=dict(dropped.most_common()),
        cut=dict(cut.most_common()),
        turns=turns,
        tokens=sum(written),
        read_tokens=read_tokens,
        tokens_per_second=tokens_per_second,
        lengths=_histogram(written),
        samples=[(number, _cut(printable(text))) for number, text in shown],
    )


def write_report(folder: Path, report: Report) -> None:
    """Write report.json and report.md into a folder."""
    write_atomic(folder / "report.json", json.dumps(asdict(report), indent=1) + "\n")
    write_atomic(folder / "report.md", as_markdown(report))


def as_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    speed = report.tokens_per_second
    lines = [
        "# Self-distilled text",
        "",
        f"- requested: {report.asked:,} texts",
        f"- kept: {report.kept:,} texts with {report.turns:,} answers",
        f"- dropped: {_counts(report.dropped)}",
        f"- truncated: {_counts(report.cut)}",
        f"- tokens: {report.tokens:,} generated, {report.read_tokens:,} of prompts",
        f"- speed: {f'{speed:,.0f} tokens/s' if speed else 'not measured'}",
        "",
        "## Generated tokens per text",
        "",
        "```",
        *_bars(report.lengths),
        "```",
        "",
        "## Samples",
    ]
    for number, text in report.samples:
        lines += ["", f"Text {number}:", "", "~~~~", text.replace("~~~~", "~~~"), "~~~~"]
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, int]) -> str:
    found = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    return f"{sum(counts.values()):,} ({found})" if found else "none"


def _histogram(lengths: list[int]) -> list[tuple[int, int, int]]:
    if not lengths:
        return []
    top = max(lengths) + 1
    width = -(-top // NUM_BINS)
    counts = Counter(length // width for length in lengths)
    bins = range(min(lengths) // width, -(-top // width))
    return [(one * width, (one + 1) * width, counts[one]) for one in bins]


def _bars(lengths: list[tuple[int, int, int]]) -> list[str]:
    most = max((count for _, _, count in lengths), default=1)
    wide = len(str(lengths[-1][1])) if lengths else 1
    return [
        f"{first:>{wide}}-{end - 1:<{wide}} {'#' * round(BAR * count / most):{BAR}} {count:,}"
        for first, end, count in lengths
    ]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
