"""Servers in processes of their own."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

VLLM = {
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of vLLM in tests."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(
    command: Sequence[str], url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server, wait until it answers at `url`, and stop it at the end."""
    import httpx2

    with log.open("wb") as out:
        server = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=out, stderr=out
        )
    try:
        while True:
            assert server.poll() is None, log.read_text()[-5000:]
            try:
                httpx2.get(url, trust_env=False).raise_for_status()
                break
            except httpx2.HTTPError:
                time.sleep(0.1)
        yield server
    finally:
        server.terminate()
        server.wait()
