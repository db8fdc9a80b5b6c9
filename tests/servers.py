"""Servers in processes of their own, and a small HTTP server in a thread."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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


class Handler(BaseHTTPRequestHandler):
    """Gives the JSON of a request to `get` or `post`, and prints nothing."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    get: Any
    post: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
        del format, args

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, status: int, content: bytes | dict[str, Any], missing: int = 0) -> None:
        """Reply with some content; `missing` bytes of it never come."""
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) + missing))
        # no connection outlives the server
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


class Listener(ThreadingHTTPServer):
    """Serves in a thread until `stop`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, **methods: Any) -> None:
        super().__init__(("127.0.0.1", port), type("Bound", (Handler,), methods))
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about clients that are gone."""

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
