"""Transports of hidden states: the faults of a Mooncake store, without one and with a real one."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch

from specheads.base.ends import ServedBase
from specheads.base.model import FrozenBase
from specheads.commands.serve_features import master_command
from specheads.config.training import FeatureSettings
from specheads.core.errors import InputError
from specheads.training import transport
from specheads.training.transport import MooncakeStore, open_transport
from tests import tiny
from tests.servers import free_port
from tests.training.in_processes import CLEAN
from tests.training.states_server import StatesServer
from tests.training.test_feature_server import source, trained
from tests.training.test_trainer import assert_equal

MANIFEST = {"handle": "cmpl-run-0-1", "version": 1, "layer_ids": [0, 6]}


def never() -> bool:
    return False


def settings(port: int, **changes: Any) -> FeatureSettings:
    return FeatureSettings(
        source="vllm",
        transport="mooncake",
        master=f"127.0.0.1:{port}",
        max_gib=0.5,
        timeout_seconds=1.0,
        **changes,
    )


def test_missing_extra_names_the_pip_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hs_connectors", None)
    line = r"does not start \(.*hs_connectors.*\); pip install 'specheads\[mooncake\]'"
    with (
        socket.create_server(("127.0.0.1", 0)) as master,
        pytest.raises(InputError, match=line),
    ):
        open_transport(settings(master.getsockname()[1]), 10, 10)


@pytest.mark.parametrize(
    ("master", "line"),
    [
        ("127.0.0.1:PORT", r"at features\.master=127.*, and none does \(.*\); start"),
        ("somewhere", r"with a host and a port, got 'somewhere'; give"),
        ("127.0.0.1:99999", "with a host and a port"),
    ],
)
def test_master_that_cannot_be_used_is_refused(master: str, line: str):
    with pytest.raises(InputError, match=line):
        transport.address_towards(master.replace("PORT", str(free_port())))


class Failing(MooncakeStore):
    """A transport whose client fails."""

    def __init__(self, error: Exception | None = None) -> None:
        def get_sample(*_: Any, **__: Any) -> Any:
            raise error or AssertionError

        self.timeout_seconds, self.version = 1.0, 1
        self.store = SimpleNamespace(get_sample=get_sample)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("producer error: put_from failed with status=-200\nmanifest"),
        TimeoutError("Timed out waiting"),
        RuntimeError("is_exist failed with status=-900"),
    ],
)
def test_fault_that_may_pass_is_one_line(error: Exception):
    line = r"the states of a are not in its memory of features\.max_gib, which may be full \(.+\)$"
    with pytest.raises(ConnectionError, match=line) as failed:
        Failing(error).receive(MANIFEST, "a", lambda: True)
    assert "\n" not in str(failed.value)


def test_manifest_of_another_version_is_refused():
    with pytest.raises(InputError, match="version 1, but a sends 2; install the same hs-connect"):
        Failing().receive(MANIFEST | {"version": 2}, "a", lambda: True)


def free_master_port() -> int:
    """Return a free port before that of the metrics, which may belong to a client's connection."""
    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


@contextmanager
def mooncake_master(port: int, log: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a real master, as `serve-features` starts it."""
    words = [*master_command(sys.executable, f"127.0.0.1:{port}"), *options]
    with log.open("ab") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        while not transport.answers("127.0.0.1", port):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def num_keys(port: int, metric: str = "master_key_count") -> int:
    """Return the number of keys in the store of a master, or another number that it knows."""
    metrics = httpx2.get(f"http://127.0.0.1:{port + 1}/metrics", trust_env=False).text
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{metric} ")]
    return int(line.split()[1])


class Server:
    """The part of a server that puts states into a store, through hs-connectors."""

    def __init__(self, port: int, pool_bytes: int) -> None:
        from hs_connectors import mooncake_store  # pyright: ignore[reportMissingImports]

        config = mooncake_store.MooncakeStoreConfig(
            local_hostname="127.0.0.1",
            master_server_address=f"127.0.0.1:{port}",
            global_segment_size=pool_bytes,
            local_buffer_size=2**20,
        )
        self.module = mooncake_store
        self.store = mooncake_store.MooncakeHiddenStatesStore(config).setup()

    def put(self, handle: str, states: torch.Tensor) -> dict[str, Any]:
        tensors = {"hidden_states": states, "token_ids": torch.arange(len(states))}
        manifest = self.manifest(handle, tensors, [0, 6])
        self.put_tensors(manifest, tensors)
        return manifest

    def manifest(
        self, handle: str, tensors: dict[str, torch.Tensor], layers: list[int]
    ) -> dict[str, Any]:
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
        layout, size = self.module.packed_layout(shapes)
        return {
            "handle": handle, "version": self.module.VERSION, "tensors": layout,
            "metadata": {"total_aligned_bytes": size}, "layer_ids": layers,
        }  # fmt: skip

    def put_tensors(self, manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Put tensors, or the fact that this failed, as hs-connectors' connector does."""
        try:
            self.store.put_sample(manifest, tensors)
        except RuntimeError as error:
            # a full store may refuse this, too
            with suppress(RuntimeError):
                self.store.put_error(manifest, str(error))


@pytest.mark.vllm
def test_real_store_gives_states_once_and_loses_those_of_abandoned_requests(tmp_path: Path):
    port, states = free_master_port(), torch.randn(1000, 4, 500)
    with mooncake_master(port, tmp_path / "log"):
        server = Server(port, 40 * 2**20)
        with closing(open_transport(settings(port), 10, 10)) as trainer:
            tensors = trainer.receive(server.put("cmpl-run-0-0a1-0-x", states), "a", never)
            assert torch.equal(tensors["hidden_states"], states)
            assert tensors["token_ids"].tolist() == list(range(1000))
            assert tensors["layer_ids"].tolist() == [0, 6]
            assert num_keys(port) == 0
            for request in ("run-0-0a1", "run-0-0a2", "run-1-0a1"):
                server.put(f"cmpl-{request}-0-x", states)
            trainer.sweep("run-0", ["run-0-0a2"])
            assert num_keys(port) == 2
            trainer.sweep("run-0", [])
            assert num_keys(port) == 1


def received_again(trainer: Any, server: Server, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return states that come through a store as soon as its clients are back."""
    for number in range(60):
        try:
            return trainer.receive(server.put(f"cmpl-run-1-{number}-0-x", states), "a", never)
        except (ConnectionError, RuntimeError):
            time.sleep(0.5)
    raise AssertionError


@pytest.mark.vllm
def test_wait_for_a_key_ends_when_the_server_is_lost(tmp_path: Path):
    port, asked = free_master_port(), list[bool]()
    with mooncake_master(port, tmp_path / "log"):
        server = Server(port, 40 * 2**20)
        patient = replace(settings(port), timeout_seconds=1000.0)
        with closing(open_transport(patient, 10, 10)) as trainer:
            manifest = server.manifest("cmpl-run-0-1", {"token_ids": torch.arange(3)}, [0, 6])
            with pytest.raises(ConnectionError, match=r"may be full \(Timed out"):
                trainer.receive(manifest, "a", lambda: bool(asked.append(True)) or len(asked) > 1)
    assert len(asked) == 2


@pytest.mark.vllm
def test_full_store_evicted_states_and_a_lost_master_are_told(tmp_path: Path):
    port, states = free_master_port(), torch.randn(1000, 4, 500)
    with mooncake_master(port, tmp_path / "log") as master:
        # room for four
        server = Server(port, 40 * 2**20)
        with closing(open_transport(settings(port), 10, 10)) as trainer:
            manifests = [server.put(f"cmpl-run-0-{number}-0-x", states) for number in range(12)]
            lines = list[str]()
            for manifest in manifests:
                try:
                    trainer.receive(manifest, "a", never)
                except ConnectionError as error:
                    lines.append(str(error))
            assert 0 < len(lines) < len(manifests)
            assert all("its memory of features.max_gib" in line for line in lines)
            manifest = server.put("cmpl-run-0-20-0-x", states)
            master.kill()
            master.wait()
            with pytest.raises(ConnectionError, match="status=-900"):
                trainer.receive(manifest, "a", never)
            line = f"no mooncake_master answers at features.master=127.0.0.1:{port}"
            assert trainer.failure() == line
            with mooncake_master(port, tmp_path / "log"):
                assert not trainer.failure()
                received = received_again(trainer, server, states)
                assert torch.equal(received["hidden_states"], states)


class StoreServer(StatesServer):
    """A server that puts its states into a store."""

    def __init__(self, base: FrozenBase, port: int, master: int) -> None:
        # each thread of a writer has a buffer of 64 MiB
        self.writer, self.threads = Server(master, 2**24), ThreadPoolExecutor(1)
        super().__init__(base, Path(), [0, 3], port)

    def send(
        self, request: str, tensors: dict[str, torch.Tensor], reply: Callable[..., None], fault: str
    ) -> None:
        manifest = self.writer.manifest(request, tensors, self.layers)
        reply(manifest)
        self.threads.submit(self.writer.put_tensors, manifest, tensors)


def serve(folder: Path, port: int, master: int) -> None:
    torch.set_num_threads(1)
    StoreServer(FrozenBase.load(folder, dtype="float32", device="cpu"), port, master)
    Event().wait()


@contextmanager
def states_process(folder: Path, port: int, master: int) -> Iterator[Any]:
    """Run a server in its own process."""
    process = CLEAN.Process(target=serve, args=(folder, port, master))
    process.start()
    try:
        while not transport.answers("127.0.0.1", port):
            assert process.is_alive()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.vllm
@pytest.mark.parametrize("part", ["server", "master"])
def test_server_and_master_that_are_killed_ten_times_cost_no_step(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each kill comes between a reply and its states, while other requests are open."""
    port, master, folder = free_port(), free_master_port(), tiny.saved(tmp_path / "base")
    starts = {
        # the master forgets a lost server in two seconds; a start of vLLM takes longer than its ten
        "master": lambda: mooncake_master(master, tmp_path / "log", "--client_ttl=2"),
        "server": lambda: states_process(folder, port, master),
    }
    receive, handles = MooncakeStore.receive, list[str]()
    lines, kills, restarts = list[str](), list[int](), list[str]()

    def kill_and_receive(
        store: MooncakeStore, manifest: Any, address: str, is_lost: Any
    ) -> dict[str, Any]:
        handles.append(manifest["handle"])
        # what the last kill broke was told, and its end
        is_over = len(lines) % 2 == 0 and len(kills) == len(restarts) < 10
        if is_over and len(handles) % 16 == 0:
            kills.append(len(handles))
            parts[part].kill()
        return receive(store, manifest, address, is_lost)

    def start_again(line: str) -> None:
        lines.append(line)
        if len(restarts) < len(kills):
            restarts.append(line)
            while part == "server" and num_keys(master, "master_total_capacity_bytes"):
                time.sleep(0.05)
            parts[part] = stack.enter_context(starts[part]())

    store = {"transport": "mooncake", "master": f"127.0.0.1:{master}", "timeout_seconds": 5.0}
    ends = ServedBase.load(folder, dtype="float32", device="cpu")
    server: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}/v1", folder=folder)
    heads = list[dict[str, Any]]()
    with ExitStack() as stack:
        parts = {name: stack.enter_context(start()) for name, start in starts.items()}
        for run in ("plain", "killed"):
            with closing(source(server, ends, announce=start_again, **store)) as features:
                heads.append(trained(tmp_path / run, ends, features, steps=40).state_dict())
            monkeypatch.setattr(MooncakeStore, "receive", kill_and_receive)
        assert num_keys(master) == 0
    assert_equal(*heads)
    assert len(restarts) == 10
    waits = [line for line in lines if line.endswith("; asking again for up to 900 seconds")]
    # a server has several connections to a lost master, and finds later that another one is closed
    assert len(waits) == 10 or (part == "master" and len(waits) < 20)
    assert set(restarts) <= set(waits)
    assert sorted(lines) == sorted([*waits, *[f"{server.url} answers again"] * len(waits)])
