"""A real vLLM server that `specheads serve-features run=true` starts, for tests marked `vllm`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
"""Interpreter of the environment with vLLM: `make vllm` sets it."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def features_server(
    base: Path | str, folder: Path, log: Path, *overrides: str, port: int = 0, **environment: str
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a server in float32, wait until it answers, and stop it at the end.

    Yields its address and its process.
    """
    address = f"http://127.0.0.1:{port or free_port()}/v1"
    command = [
        *(sys.executable, "-m", "specheads", "serve-features", "run=true", f"url={address}"),
        *(f"base={base}", "base.dtype=float32", f"folder={folder}", f"python={VLLM_PYTHON}"),
        *("options=--enforce-eager --max-num-seqs 8", *overrides),
    ]
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, env=os.environ | QUIET | environment, stdout=out, stderr=out
        )
    try:
        while True:
            assert server.poll() is None, log.read_text()[-5000:]
            try:
                httpx2.get(address.replace("/v1", "/health"), trust_env=False).raise_for_status()
                break
            except httpx2.HTTPError:
                time.sleep(0.5)
        yield address, server
    finally:
        server.terminate()
        server.wait()
