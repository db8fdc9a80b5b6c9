"""Completions server on the loopback: real HTTP, scripted faults, and counters."""

import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from tests.servers import Handler, Listener

VOCAB = 61
PASSING = ("stall", "429", "500", "half", "reset")
"""Faults that a retry can fix."""


def continuation(prompt: list[int], count: int) -> list[int]:
    """Return the tokens of this server's model."""
    return [(sum(prompt) + 7 * index) % VOCAB for index in range(count)]


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
    attempts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Requests of each prompt."""
    num_open: int = 0
    peak: int = 0
    lock: Any = field(default_factory=Lock)


def answer(state: Completions, handler: Handler, request: dict[str, Any]) -> None:
    with state.lock:
        attempt = state.attempts[tuple(request["prompt"])]
        state.attempts[tuple(request["prompt"])] += 1
        state.requests.append(request)
        state.keys.append(handler.headers.get("Authorization"))
        state.num_open += 1
        state.peak = max(state.peak, state.num_open)
    try:
        time.sleep(state.seconds)
        _answer(state, handler, request, state.fault(request["prompt"], attempt))
    finally:
        with state.lock:
            state.num_open -= 1


def _answer(state: Completions, handler: Handler, request: Any, fault: str | None) -> None:
    content = json.dumps(state.reply(request)).encode()
    if fault is None:
        handler.reply(200, content)
    elif fault == "garbage":
        handler.reply(200, b"{]" + content)
    elif fault.isdigit():
        message = f"no, not with {handler.headers.get('Authorization')}\nand not now"
        handler.reply(int(fault), message.encode())
    elif fault == "half":
        handler.reply(200, content, missing=9)
    elif fault == "stall":
        # until the client closes the connection
        with suppress(OSError):
            handler.connection.recv(1)
    else:
        # closing then sends a reset
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()
    handler.close_connection = True


@contextmanager
def serving(state: Completions) -> Iterator[Completions]:
    """Serve until the block ends."""
    server = Listener(0, post=lambda handler, body: answer(state, handler, body))
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.stop()
