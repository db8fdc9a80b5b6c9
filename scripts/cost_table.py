"""Write the table of what a head costs by base and GPU, from shapes and datasheets.

    python scripts/cost_table.py            # docs/scale.md
    python scripts/cost_table.py --check    # exit 1 where the page is not current

Nothing is downloaded: the shapes are those of the named models' config.json. Settings are those of
recipe=chat_8b.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_table import table, with_tables
from transformers import LlamaConfig, Qwen3Config

from specheads.config import compose
from specheads.training.cost import GPUS, CostModel

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
COUNTS = (1, 8, 16)
HEADS: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
LLAMA: dict[str, Any] = {**HEADS, "vocab_size": 128_256}


def llama(width: int, inner: int, layers: int, heads: int, **more: Any) -> LlamaConfig:
    """Return the shape of a Llama 3."""
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    settings: dict[str, Any] = LLAMA | sizes | more
    return LlamaConfig(**settings)


BASES = {
    "1B (Llama 3.2)": llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "8B (Llama 3.1)": llama(4096, 14_336, 32, 32),
    "32B (Qwen 3)": Qwen3Config(
        **HEADS, vocab_size=151_936, hidden_size=5120, intermediate_size=25_600,
        num_hidden_layers=64, num_attention_heads=64, tie_word_embeddings=False,
    ),
    "70B (Llama 3.3)": llama(8192, 28_672, 80, 64),
}  # fmt: skip


def cost_table() -> str:
    """Return the table."""
    rows = []
    for name, config in BASES.items():
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            words = ["recipe=chat_8b", f"base.model={folder}", "data.path=conversations.jsonl"]
            model = CostModel(compose.settings_of("train", [*words, "base.device=cuda"]))
            for gpu in GPUS:
                costs = [model.cost(gpu, count) for count in COUNTS]
                cells = [
                    f"{cost.way}: {cost.text_hours:.1f} + {cost.train_hours:.1f}"
                    if cost.way
                    else "no"
                    for cost in costs
                ]
                rate, peak = costs[1].tokens_per_second, costs[1].peak_bytes / 1e9
                eight = (f"{rate:,.0f}", f"{peak:.0f} GB") if costs[1].way else ("", "")
                disk = f"{model.disk_bytes / 1e9:.0f} GB"
                rows.append((name, gpu.name, *cells, *eight, disk))
    counts = [f"{count} GPU{'s' if count > 1 else ''}" for count in COUNTS]
    return table(("base", "GPU", *counts, "tokens/s of 8", "peak of 8", "disk"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(PAGE, {"cost": cost_table()})
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return int(options.check and before != after)


if __name__ == "__main__":
    sys.exit(main())
