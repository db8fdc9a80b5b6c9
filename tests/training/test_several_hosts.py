"""Servers and trainers on hosts of their own: network namespaces, so as root (`make vllm`)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specheads.runs.trackers import read_metrics
from tests.export.features_server import VLLM_PYTHON
from tests.servers import VLLM, served
from tests.training.test_feature_server_vllm import BASE, HEADS, RECIPE

pytestmark = pytest.mark.vllm

NETWORK = "10.99.7"
BRIDGE = "specheads-br"


def ip(words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words.split()], check=check, capture_output=not check)


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, str]]:
    """Make namespaces that reach each other over a bridge; yield the address of each."""
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    ip(f"link add {BRIDGE} type bridge")
    try:
        ip(f"addr add {NETWORK}.254/24 dev {BRIDGE}")
        ip(f"link set {BRIDGE} up")
        for name, address in addresses.items():
            ip(f"netns add {name}")
            ip(f"link add sh-{name} type veth peer name eth0 netns {name}")
            ip(f"link set sh-{name} master {BRIDGE} up")
            ip(f"-n {name} addr add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        yield addresses
    finally:
        for name in names:
            ip(f"netns del {name}", check=False)
        ip(f"link del {BRIDGE}", check=False)


def training(
    host: str, rank: int, num_hosts: int, first: str, words: list[str], environment: dict[str, str]
) -> "subprocess.Popen[str]":
    """Start the trainer of a host, one of several that train together."""
    command = [
        *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(num_hosts), "--node-rank", str(rank), "--nproc-per-node", "1"),
        *("--master-addr", first, "--master-port", "29500", "-m", "specheads", "train"),
        *(f"base.model={BASE}", "base.device=cpu", *words),
    ]
    variables = environment | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_trainers_and_a_server_on_three_hosts_train_as_one_trainer(tmp_path: Path):
    with hosts("states", "first", "second") as addresses:
        url = f"http://{addresses['states']}:8000"
        store = [
            "features.transport=mooncake",
            f"features.master={addresses['states']}:50051",
            f"features.url=[{url}/v1]",
        ]
        words = [*RECIPE, *HEADS["redrafter"], "features=vllm", "base.dtype=float32", *store]
        # requests that share a batch, or a cached prefix, change the order of sums
        alone = "options=--enforce-eager --max-num-seqs 1 --no-enable-prefix-caching"
        server = [
            *("ip", "netns", "exec", "states", sys.executable, "-m", "specheads"),
            *("serve-features", "run=true", f"url={url}/v1", f"python={VLLM_PYTHON}", alone),
            *(f"base={BASE}", *words),
        ]
        environment = VLLM | {"NO_PROXY": f"127.0.0.1,{addresses['states']}"}
        with served(server, f"{url}/health", tmp_path / "log", environment):
            for run, machines in (("one", ["first"]), ("two", ["first", "second"])):
                settings = [*words, f"run_dir={tmp_path / run}"]
                trainers = [
                    training(name, rank, len(machines), addresses["first"], settings, environment)
                    for rank, name in enumerate(machines)
                ]
                for trainer in trainers:
                    output, _ = trainer.communicate()
                    assert trainer.returncode == 0, output[-3000:]
    one, two = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("one", "two"))
    assert len(one) == len(two)
    for expected, row in zip(one, two, strict=True):
        for name in expected:
            if name.startswith(("loss", "validation/loss")):
                assert row[name] == pytest.approx(expected[name], rel=1e-6), (row["step"], name)
