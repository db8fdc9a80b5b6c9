"""Completions server on the loopback: real HTTP, scripted faults, and counters."""

import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

VOCAB = 61
PASSING = ("stall", "429", "500", "half", "reset")
"""Faults that a retry can fix."""


def continuation(prompt: list[int], count: int) -> list[int]:
    """Return the tokens of this server's model."""
    return [(sum(prompt) + 7 * place) % VOCAB for place in range(count)]


def completion(request: dict[str, Any]) -> dict[str, Any]:
    tokens = continuation(request["prompt"], request["max_tokens"])
    return {"choices": [{"text": "", "finish_reason": "length", "token_ids": tokens}]}


@dataclass
class Completions:
    """State of the server; `fault` is called with the prompt and the attempt."""

    fault: Callable[[list[int], int], str | None] = lambda _prompt, _attempt: None
    reply: Callable[[dict[str, Any]], Any] = completion
    seconds: float = 0.0
    """Seconds per answer."""
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    now: int = 0
    peak: int = 0
    lock: Any = field(default_factory=Lock)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Completions

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        state, request = self.state, json.loads(body)
        with state.lock:
            attempt = state.asked[tuple(request["prompt"])]
            state.asked[tuple(request["prompt"])] += 1
            state.requests.append(request)
            state.keys.append(self.headers.get("Authorization"))
            state.now += 1
            state.peak = max(state.peak, state.now)
        try:
            time.sleep(state.seconds)
            self.answer(request, state.fault(request["prompt"], attempt))
        finally:
            with state.lock:
                state.now -= 1

    def answer(self, request: dict[str, Any], fault: str | None) -> None:
        whole = json.dumps(self.state.reply(request)).encode()
        if fault is None:
            self.send(200, whole)
        elif fault == "garbage":
            self.send(200, b"{]" + whole)
        elif fault.isdigit():
            said = f"no, not with {self.headers.get('Authorization')}\nand not now"
            self.send(int(fault), said.encode())
        else:
            self.break_off(whole, fault)

    def send(self, status: int, body: bytes, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def break_off(self, whole: bytes, fault: str) -> None:
        self.close_connection = True
        if fault == "stall":
            # until the client closes the connection
            with suppress(OSError):
                self.connection.recv(1)
        elif fault == "reset":
            # closing then sends a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.send(200, whole, missing=9)

    def log_message(self, format: str, *_: Any) -> None:
        """Be quiet."""


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are what this is for."""


@contextmanager
def serving(state: Completions) -> Iterator[Completions]:
    """Serve until the block ends."""
    server = Listener(("127.0.0.1", 0), type("Bound", (Handler,), {"state": state}))
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
