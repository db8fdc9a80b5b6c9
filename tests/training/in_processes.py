"""Trains a tiny head in several processes: forked by tests, or started by torchrun as a module.

Arguments of the module: a folder, and the rank that gets SIGTERM in the third step.
"""

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from specheads.base.model import FrozenBase
from specheads.config.shared import BaseSettings, TrackerSettings
from specheads.config.training import Phase, Schedule
from specheads.data.packing import PackedText, TokenBatch, slice_evenly
from specheads.data.tokenise import TokenisedDocuments
from specheads.heads.load import build_for_base
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker, read_metrics
from specheads.training import trainer
from specheads.training.log import ValidationSet
from specheads.training.processes import accelerator_of_environment, load_base, row_share
from specheads.training.schedule import ScheduledPhase
from specheads.training.step import StepRunner
from tests import tiny
from tests.packed import counted_in, texts
from tests.servers import free_port

FORK = multiprocessing.get_context("fork")
# fork before computing gradients: torch with CUDA does not support it afterwards
CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(["tests.conftest", "tests.training.in_processes"])

SHARED_OUT: dict[str, dict[str, str]] = {
    "none": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "replicas": {
        **{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
        **{"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
    },
    "tensor": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2",
    },
}  # fmt: skip
"""Variables of the launcher for configurations with a sharded base."""


TIMINGS = ("tokens_per_second", "hours", "data_wait_share", "peak_gib", "mfu")
"""Columns of metrics.jsonl that differ between equal runs."""


class StopError(Exception):
    """Simulates a power cut."""


STEP_FLOPS = 10**6


@contextmanager
def fixed_flops() -> Iterator[None]:
    """Do not count the FLOPs of a step, which takes longer than a tiny training.

    test_plan.py compares the count with real steps, and commands train with it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "count_step_flops", lambda *_: STEP_FLOPS)
        yield


def untimed_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the log of a run without its timings."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: row[name] for name in row if name not in TIMINGS} for row in rows]


def documents() -> TokenisedDocuments:
    """Return documents of different lengths with partial loss masks."""
    sequences = texts(lengths=(9, 22, 6, 15, 12, 7, 31, 18, 5, 26) * 4)
    return TokenisedDocuments(
        pa.table(
            {
                "tokens": pa.array([text.tolist() for text in sequences], pa.list_(pa.int32())),
                "loss_mask": pa.array(
                    [counted_in(text).int().tolist() for text in sequences], pa.list_(pa.uint8())
                ),
            }
        )
    )


@functools.cache
def folder_of_base() -> str:
    """Return the folder of the tiny llama, for processes that load a shard each."""
    folder = tempfile.mkdtemp()
    tiny.base("llama").model.save_pretrained(folder)
    return folder


def joined(shared_out: str) -> tuple[Accelerator, FrozenBase]:
    """Return the accelerator and this process's part of the base in float64."""
    if not shared_out:
        return Accelerator(cpu=True), tiny.base("llama")
    # before the process group exists: in one, transformers writes on the first process only
    folder = folder_of_base()
    os.environ |= SHARED_OUT[shared_out]
    accelerator = accelerator_of_environment("float64")
    return accelerator, load_base(BaseSettings(model=folder, dtype="float64"), accelerator)


def train(
    folder: Path,
    kind: str = "mlp_speculator",
    *,
    shared_out: str = "",
    depth: int = 2,
    drafted: int = 0,
    held_out: int = 0,
    watched: dict[str, Any] | None = None,
    schedule: dict[str, Any] | None = None,
    choices: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Train a head in float64 and log each step."""
    accelerator, base = joined(shared_out)
    torch.manual_seed(0)
    head_settings = {"kind": kind, "depth": depth, "draft_tokens": drafted}
    head = build_for_base(head_settings, base, torch.arange(tiny.VOCAB)).double()
    usual = {"steps": 6, "batch_size": 6, "learning_rate": 1e-2, "scored_share": 0.6}
    phase = Phase(text="corpus", sequence_length=40, **usual | settings)
    rows_of_process = row_share(base.sharding, accelerator)
    rank, world_size = rows_of_process.rank, rows_of_process.world_size
    sizes: dict[str, Any] = {"sequence_length": 40, "batch_size": phase.batch_size}
    text = PackedText(documents(), **sizes, rank=rank, world_size=world_size)
    mine = slice_evenly(range(held_out), rank, world_size)
    rows = [text.batch(mine[at : at + 2]) for at in range(0, len(mine), 2)]
    validation_set = ValidationSet(rows if held_out else None, every=2)
    if watched:
        prompts = [tiny.prompts()[number] for number in slice_evenly(range(3), rank, world_size)]
        validation_set = replace(
            validation_set, prompts=prompts, new_tokens=16, identity="three of 16", **watched
        )
    run = RunDirectory(folder)
    tracker = Tracker(run.metrics, TrackerSettings())
    with fixed_flops():
        trainer.train(
            base,
            head,
            Schedule(phases={"corpus": phase}, **schedule or {}),
            lambda *_: text,
            run,
            tracker if accelerator.is_main_process else None,
            accelerator,
            log_every=1,
            held_out=validation_set if held_out or watched else None,
            **choices or {},
        )
    torch.save(head.state_dict(), folder / f"head-{accelerator.process_index}.pt")


def forked(count: int, act: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call a function in several processes of one run; return the exit codes."""
    ranks = started(count, act, *arguments)
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def started(
    count: int, act: Callable[..., None], *arguments: Any, by: Any = CLEAN
) -> list[BaseProcess]:
    """Call a function in several processes of one run, without waiting.

    Those of `FORK` have the files that are open here.
    """
    folder_of_base()  # made once, and not in each
    port = free_port()
    ranks = [
        by.Process(target=_act_as, args=(rank, count, port, act, arguments))
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    return ranks


def _act_as(rank: int, count: int, port: int, act: Callable[..., None], arguments: Any) -> None:
    if count > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    # caches of earlier tests in this process
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    act(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def at_step(number: int, act: Callable[[], object]) -> None:
    """Call a function on this process before a step, independent of prefetching."""
    runner_class: Any = StepRunner
    step = runner_class.step

    def acting(self: Any, batch: TokenBatch, phase: ScheduledPhase, current_step: int) -> Any:
        if current_step == number:
            act()
        return step(self, batch, phase, current_step)

    runner_class.step = acting


def main(folder: Path, stopped_rank: str) -> None:
    if stopped_rank == os.environ.get("RANK", "0"):
        at_step(2, partial(os.kill, os.getpid(), signal.SIGTERM))
    train(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
