"""How long the command line takes to say its first and last word: medians of ten starts.

    python scripts/bench_start.py

Commands take turns, each in a new process; the machine should have nothing else to do.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

COMMANDS: dict[str, Sequence[str]] = {
    "--help": ["--help"],
    "train": ["train"],
    "train --help": ["train", "--help"],
    "train recipe=smoke seed=-1": ["train", "recipe=smoke", "seed=-1"],
}


def seconds(arguments: Sequence[str], folder: str) -> float:
    """Return how long one start takes, from the first process to the last."""
    root = str(Path(__file__).resolve().parents[1])
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "specheads", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        check=False,
    )
    return time.perf_counter() - began


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=10, help="starts of each command")
    starts = parser.parse_args().starts
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(starts):
            for name, arguments in COMMANDS.items():
                taken[name].append(seconds(arguments, folder))
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(models, platform.processor())
    print(f"{starts} starts each, {os.cpu_count()} cores of {processor}\n")
    print("| specheads ... | median | fastest | slowest |\n|---|---|---|---|")
    for name, times in taken.items():
        middle = statistics.median(times)
        print(f"| `{name}` | {middle:.2f} s | {min(times):.2f} s | {max(times):.2f} s |")


if __name__ == "__main__":
    main()
