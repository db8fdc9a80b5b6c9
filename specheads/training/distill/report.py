"""What came of having the base write: how much was kept, what was dropped and why, and samples."""

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
"""Characters of the longest bar."""

SHOWN = 1200
"""Characters of a sample, at most."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a folder of self-distilled text holds."""

    asked: int
    """Texts asked for."""
    kept: int
    dropped: dict[str, int]
    """Texts of which nothing was kept, by what was wrong with the first answer."""
    cut: dict[str, int]
    """Kept texts that end early, by what was wrong with the answer after."""
    turns: int
    """Answers kept."""
    tokens: int
    """Tokens kept that the base wrote."""
    read_tokens: int
    """Tokens kept that it read."""
    tokens_per_second: float | None
    """Tokens the base wrote a second, when text was last written; None where that is not known."""
    lengths: list[tuple[int, int, int]]
    """Histogram: from so many tokens written, below so many, texts."""
    samples: list[tuple[int, str]]
    """Number and text of some, spread over all."""


def report_of(
    folder: Path,
    num_samples: int,
    decode: Callable[[list[int]], str],
    tokens_per_second: float | None = None,
) -> Report:
    """Read the texts of a folder and return what is to be told of them."""
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
    """Return the report for people."""
    speed = report.tokens_per_second
    lines = [
        "# Text that the base wrote",
        "",
        f"- asked for: {report.asked:,} texts",
        f"- kept: {report.kept:,} texts with {report.turns:,} answers",
        f"- dropped: {_told(report.dropped)}",
        f"- cut short: {_told(report.cut)}",
        f"- tokens: {report.tokens:,} written and {report.read_tokens:,} read",
        f"- speed: {f'{speed:,.0f} tokens/s' if speed else 'not measured'}",
        "",
        "## Tokens written for a text",
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


def _told(counts: dict[str, int]) -> str:
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
