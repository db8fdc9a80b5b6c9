"""Time the reads of hidden states: by hs-connectors' own client, by ours, and from a folder.

    python scripts/bench_transport.py                 20 samples of 84 MB for each way, in turns

Another process writes each sample before the clock starts. Mooncake's master is a real one, and all
processes are on this machine. Needs the extra specheads[mooncake].
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hs_connectors import mooncake_store  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file

from specheads.commands.serve_features import master_command
from specheads.config.training import FeatureSettings
from specheads.core.files import to_json
from specheads.measure.counts import bootstrap_interval
from specheads.runs.provenance import collect_provenance
from specheads.training.transport import STAGING_BYTES, answers, host_and_port, open_transport

WAYS = ("hs_connectors", "mooncake", "folder")
WARM_UP = 2
"""Turns before the clock counts."""


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description="Time reads of hidden states.")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--master", default="127.0.0.1:50951", help="address of a free port")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (options.tokens, options.layers, options.width)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        master = subprocess.Popen(
            master_command(sys.executable, options.master), stderr=subprocess.DEVNULL
        )
        connection, other_end = get_context("spawn").Pipe()
        writer = get_context("spawn").Process(
            target=write_samples, args=(other_end, options.master, Path(folder), shape)
        )
        try:
            while not answers(*host_and_port(f"//{options.master}")):
                time.sleep(0.05)
            writer.start()
            # a read then ends when the writer does
            other_end.close()
            reads = take_turns(connection, options.master, folder, options.turns)
        finally:
            writer.kill()
            master.kill()
    figures = report(reads) | {"provenance": to_json(collect_provenance())}
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def write_samples(
    connection: Connection, master: str, folder: Path, shape: tuple[int, ...]
) -> None:
    """Write a sample for each name of a way, and send what a server would reply."""
    torch.set_num_threads(1)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"hidden_states": states, "token_ids": torch.arange(len(states))}
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    layout, size = mooncake_store.packed_layout(shapes)
    store = client(master, STAGING_BYTES + 4 * size)
    for number in range(sys.maxsize):
        handle = f"sample-{number}"
        if connection.recv() == "folder":
            save_file(tensors, folder / handle)
            (folder / f"{handle}.lock").touch()
            connection.send({"hidden_states_path": handle})
            continue
        manifest = {
            "handle": handle, "version": mooncake_store.VERSION, "tensors": layout,
            "metadata": {"total_aligned_bytes": size}, "layer_ids": [],
        }  # fmt: skip
        store.put_sample(manifest, tensors)
        connection.send(manifest)


def client(master: str, pool_bytes: int) -> Any:
    """Return hs-connectors' own client."""
    config = mooncake_store.MooncakeStoreConfig(
        local_hostname="127.0.0.1",
        master_server_address=master,
        global_segment_size=pool_bytes,
        local_buffer_size=STAGING_BYTES,
    )
    return mooncake_store.MooncakeHiddenStatesStore(config).setup()


def take_turns(
    connection: Connection, master: str, folder: str, turns: int
) -> dict[str, list[tuple[float, float, int]]]:
    """Return wall seconds, CPU seconds and bytes of each read."""
    store = client(master, 0)

    def read_by_client(manifest: dict[str, Any], *_: Any) -> dict[str, torch.Tensor]:
        tensors = store.get_sample(manifest)
        store.delete_sample(manifest["handle"])
        return tensors

    reads: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    settings = {
        way: FeatureSettings(source="vllm", transport=way, master=master, folder=folder)
        for way in WAYS[1:]
    }
    with (
        closing(open_transport(settings["mooncake"], 1, 1)) as mooncake,
        closing(open_transport(settings["folder"], 1, 1)) as files,
    ):
        read_by = dict(zip(WAYS, (read_by_client, mooncake.receive, files.receive), strict=True))
        for turn in range(WARM_UP + turns):
            # each way is first, second and third equally often
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                connection.send(way)
                reply = connection.recv()
                wall, cpu = time.perf_counter(), time.process_time()
                tensors = read_by[way](reply, "the writer", lambda: False)
                seconds = time.perf_counter() - wall, time.process_time() - cpu
                if turn >= WARM_UP:
                    reads[way].append((*seconds, tensors["hidden_states"].nbytes))
    return reads


def report(reads: dict[str, list[tuple[float, float, int]]]) -> dict[str, Any]:
    """Return GB/s and CPU seconds of each way, and the two ratios with their intervals."""
    walls = {way: [wall for wall, _, _ in rows] for way, rows in reads.items()}
    cpus = {way: [cpu for _, cpu, _ in rows] for way, rows in reads.items()}
    size = reads["mooncake"][0][2]
    figures: dict[str, Any] = {"sample_bytes": size, "turns": len(walls["mooncake"])}
    for way in WAYS:
        figures[f"{way}_gb_per_second"] = size / 1e9 / statistics.median(walls[way])
        figures[f"{way}_cpu_seconds_per_gb"] = statistics.median(cpus[way]) / (size / 1e9)
    for name, seconds, way, other in (
        ("mooncake_over_hs_connectors_gb_per_second", walls, "hs_connectors", "mooncake"),
        ("mooncake_over_folder_cpu_seconds", cpus, "mooncake", "folder"),
    ):
        ratio = sum(seconds[way]) / sum(seconds[other])
        figures[name] = [ratio, *bootstrap_interval(seconds[way], seconds[other])]
    return figures


if __name__ == "__main__":
    main()
