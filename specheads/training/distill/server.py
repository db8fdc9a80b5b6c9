"""HTTP requests to a completions server, with timeouts and retries."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from math import isfinite
from threading import Thread
from typing import Any, TypeVar

import httpx2

from specheads.core.errors import InputError, first_line

Read = TypeVar("Read")

PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that are retried."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 300.0
"""Wait before the second attempt, doubled for each further one, and its maximum."""


class PassingError(Exception):
    """An attempt failed, and a retry may succeed."""

    def __init__(self, what: str, wait_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.wait_seconds = wait_seconds
        """Wait that the server requested."""


class Server:
    """URL, API key, timeout and retries of a server.

    Raises:
        ValueError: The URL is invalid, or the key is not printable ASCII.
    """

    def __init__(self, url: str, key_env: str, timeout_seconds: float, retries: int) -> None:
        self.url, self.key_env, self._key = _address(url), key_env, _key(key_env)
        self.timeout_seconds, self.retries = timeout_seconds, retries
        # a URL may contain a password, or a token in its query
        self.shown = str(self.url.copy_with(username=None, password=None, query=None))

    @contextmanager
    def connected(
        self, connections: int
    ) -> Iterator[tuple[httpx2.AsyncClient, asyncio.AbstractEventLoop]]:
        """Yield a client and its event loop in a separate thread; close both at the end.

        Requests and retries continue while the caller is busy, and a notebook's own event loop is
        not used.
        """
        client = self._client(connections)
        loop = asyncio.new_event_loop()
        thread = Thread(target=loop.run_forever, name="requests", daemon=True)
        thread.start()
        try:
            yield client, loop
        finally:
            asyncio.run_coroutine_threadsafe(_let_go(client), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _client(self, connections: int) -> httpx2.AsyncClient:
        try:
            return httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                limits=httpx2.Limits(max_connections=connections),
                timeout=None,
            )
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            raise InputError(
                f"the proxy in the environment must be valid, but {first_line(error)}; unset "
                "ALL_PROXY, HTTP_PROXY and HTTPS_PROXY, or add the server to NO_PROXY"
            ) from error

    async def answer(
        self,
        client: httpx2.AsyncClient,
        path: str,
        request: dict[str, Any],
        read: Callable[[Any], Read],
    ) -> Read:
        """Return `read(reply)` for a request; retry with exponential backoff.

        Raises:
            ValueError: The server refuses the request, all attempts failed, or `read` raises one. A
                `PassingError` of `read` is a failed attempt.
        """
        for attempt in count():
            try:
                return read(await self._post(client, path, request))
            except PassingError as error:
                if attempt == self.retries:
                    raise InputError(
                        f"a server must answer within {attempt + 1} attempts, but {self.shown} did "
                        f"not: {error}; fix the server and run the command again to resume, or "
                        "raise retries or timeout_seconds"
                    ) from error
                await asyncio.sleep(_wait_seconds(attempt, error.wait_seconds))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, client: httpx2.AsyncClient, path: str, request: dict[str, Any]) -> Any:
        limit, url = self.timeout_seconds, self.url.copy_with(path=self.url.path + path)
        try:
            # for the whole answer: a server may send the first bytes and then stall
            async with asyncio.timeout(limit):
                reply = await client.post(url, json=request)
            if reply.status_code == 200:
                return reply.json()
        except TimeoutError as error:
            raise PassingError(f"no answer within {limit:g} seconds") from error
        except (httpx2.TransportError, httpx2.DecodingError, ValueError, RecursionError) as error:
            what = f"{type(error).__name__} {self.quote(str(error))}"
            raise PassingError(f"no complete answer, {what}") from error
        what = f"status {reply.status_code}, {self.quote(reply.text)}"
        if reply.status_code in PASSING:
            raise PassingError(what, _seconds(reply.headers.get("Retry-After", "")))
        raise InputError(
            f"a server must accept the request, but {self.shown} refused it: {what}; "
            f"{self._remedy(reply.status_code)}"
        )

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            variable = self.key_env or "of api_key_env"
            return f"set the environment variable {variable} to the server's key"
        if 300 <= status < 400 or status in (404, 405):
            return "give its url up to /v1, and set served_as to the model's name at the server"
        return "lower max_length to its context, or remove sampling settings it does not support"

    def quote(self, text: str) -> str:
        """Return a server's message as one short line without the key."""
        text = text.replace(self._key, "***") if self._key else text
        return f"{' '.join(text.split()) or 'no message':.200}"


async def _let_go(client: httpx2.AsyncClient) -> None:
    """Cancel every request and close the connections, which stops the server."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.aclose()


def _address(url: str) -> httpx2.URL:
    try:
        address = httpx2.URL(url.rstrip("/"))
    except httpx2.InvalidURL:
        address = httpx2.URL("")
    known = address.scheme in ("http", "https") and address.host
    if not known or (address.port or 0) >= 2**16:
        # do not print a password or a token
        given = url.rpartition("@")[2].partition("?")[0]
        raise InputError(
            "a server's url must begin with http:// or https:// and name a host, got "
            f"{given!r:.80}; give one such as http://127.0.0.1:8000/v1"
        )
    return address


def _key(variable: str) -> str:
    """Return the key in an environment variable; no message may contain it."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if not key.isascii() or not key.isprintable():
        raise InputError(
            f"an API key must be printable ASCII, but the one in {variable} is not; set it again"
        )
    return key


def _wait_seconds(attempt: int, wished: float) -> float:
    """Return the wait after an attempt (from zero), at least `wished` seconds, with jitter."""
    own = FIRST_WAIT_SECONDS * 2**attempt * random.uniform(0.5, 1.0)
    return min(wished + own, LONGEST_WAIT_SECONDS)


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header (a number or a date); zero if invalid."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return max(seconds, 0.0) if isfinite(seconds) else 0.0
