"""Measure how fast a corpus becomes documents, what memory that takes, and that it is done once.

python scripts/bench_tokenise.py --data CORPUS.parquet --tokenizer FOLDER
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from specheads.config import Data
from specheads.data import encode
from specheads.data.sources import SPLITS, read_all
from specheads.data.tokenise import tokenised
from specheads.runs.progress import progress

CONSOLE = Console(highlight=False, soft_wrap=True)


def main() -> None:
    """Print megabytes a second, the most memory held, and what a second start costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="file, folder or glob")
    parser.add_argument("--source", default="parquet", help="how it is read (default: parquet)")
    parser.add_argument("--column", default="text", help="column that holds the text")
    parser.add_argument("--tokenizer", required=True, help="folder or Hub id")
    parser.add_argument("--plain", action="store_true", help="leave the fast tokenizer out")
    options = parser.parse_args()
    if options.plain:
        encode.fastokens = None
    corpus = Data(source=options.source, path=options.data, column=options.column)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=False)
    size = sum(len(row["text"].encode()) for _, _, row in read_all(corpus)) / 1e6
    before = peak_gib()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPECHEADS_CACHE"] = folder
        wall, processor = measure(corpus, tokenizer)
        CONSOLE.print(
            f"{size:.0f} MB in {wall:.1f} s: {size / wall:.1f} MB/s; {processor:.1f} s of "
            f"processor time, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        CONSOLE.print(f"most memory {peak_gib():.2f} GiB, {before:.2f} before tokenising")
        kept = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        CONSOLE.print(f"tokens {kept / 1e6:.0f} MB")
        shards = {file: file.stat().st_mtime_ns for file in Path(folder).rglob("*.arrow")}
        wall, _ = measure(corpus, tokenizer)
        again = shards != {file: file.stat().st_mtime_ns for file in Path(folder).rglob("*.arrow")}
        CONSOLE.print(f"second start {wall:.2f} s, tokenised again: {'yes' if again else 'no'}")


def measure(corpus: Data, tokenizer: Any) -> tuple[float, float]:
    """Return the seconds, and those of the processor, that all splits of a corpus take."""
    wall, processor = time.perf_counter(), time.process_time()
    with progress(shown=sys.stderr.isatty(), transient=True) as bar:
        for split in SPLITS:
            tokenised(corpus, split, tokenizer, bar=bar)
    return time.perf_counter() - wall, time.process_time() - processor


def peak_gib() -> float:
    """Return the most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
