"""Requests to a server that stalls, fails and closes: each sent until it is wholly answered."""

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
"""Statuses that may be others when the same is asked again."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 300.0
"""Before the second attempt, doubled before each further one; and the most before any."""


class PassingError(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, what: str, wait_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.wait_seconds = wait_seconds
        """What the server asked to wait."""


class Server:
    """Where requests go, with what key, how long they are waited for and how often repeated.

    Raises:
        ValueError: The address is none, or the key is none that a request can carry.
    """

    def __init__(self, url: str, key_env: str, timeout_seconds: float, retries: int) -> None:
        self.url, self.key_env, self._key = _address(url), key_env, _key(key_env)
        self.timeout_seconds, self.retries = timeout_seconds, retries
        # an address may carry a password, or a token in its query
        self.shown = str(self.url.copy_with(username=None, password=None, query=None))

    @contextmanager
    def connected(
        self, connections: int
    ) -> Iterator[tuple[httpx2.AsyncClient, asyncio.AbstractEventLoop]]:
        """Give a client and the loop it lives in, in a thread of its own; then let go of all.

        Waits and retries go on there while the caller is busy, and a notebook's own loop is let be.
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
                f"a proxy that the environment names must be of use, and {first_line(error)}; "
                "unset ALL_PROXY, HTTP_PROXY and HTTPS_PROXY, or name the server in NO_PROXY"
            ) from error

    async def answer(
        self,
        client: httpx2.AsyncClient,
        path: str,
        request: dict[str, Any],
        read: Callable[[Any], Read],
    ) -> Read:
        """Return what `read` makes of the reply to a request, waiting longer between attempts.

        Raises:
            ValueError: The server refuses it, or did not answer in all attempts; or `read` raises
                one. A `PassingError` of `read` is an attempt that failed.
        """
        for attempt in count():
            try:
                return read(await self._post(client, path, request))
            except PassingError as error:
                if attempt == self.retries:
                    raise InputError(
                        f"a server must answer within {attempt + 1} attempts, and {self.shown} did "
                        f"not: {error}; see to it and start again, which goes on where this "
                        "stopped, or raise retries or timeout_seconds"
                    ) from error
                await asyncio.sleep(_wait_seconds(attempt, error.wait_seconds))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, client: httpx2.AsyncClient, path: str, request: dict[str, Any]) -> Any:
        limit, url = self.timeout_seconds, self.url.copy_with(path=self.url.path + path)
        try:
            # for all of the answer: a server may send its first bytes at once and then stall
            async with asyncio.timeout(limit):
                reply = await client.post(url, json=request)
            if reply.status_code == 200:
                return reply.json()
        except TimeoutError as error:
            raise PassingError(f"no answer within {limit:g} seconds") from error
        except (httpx2.TransportError, httpx2.DecodingError, ValueError, RecursionError) as error:
            what = f"{type(error).__name__} {self.told(str(error))}"
            raise PassingError(f"no whole answer, {what}") from error
        what = f"status {reply.status_code}, {self.told(reply.text)}"
        if reply.status_code in PASSING:
            raise PassingError(what, _seconds(reply.headers.get("Retry-After", "")))
        raise InputError(
            f"a server must take what it is asked, and {self.shown} refused: {what}; "
            f"{self._remedy(reply.status_code)}"
        )

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            variable = self.key_env or "that api_key_env names"
            return f"put its key into the environment variable {variable}"
        if 300 <= status < 400 or status in (404, 405):
            return "give its url up to /v1, and the model the name that the server has for it"
        return "lower max_length to its context, or leave out the sampling that it does not know"

    def told(self, text: str) -> str:
        """Return what a server said, in one short line and without the key."""
        text = text.replace(self._key, "***") if self._key else text
        return f"{' '.join(text.split()) or 'without a word':.200}"


async def _let_go(client: httpx2.AsyncClient) -> None:
    """End every request; the server sees its connection close, and stops writing."""
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
        # a password may stand before the host, and a token after the path
        given = url.rpartition("@")[2].partition("?")[0]
        raise InputError(
            "a server's url must begin with http:// or https:// and name a host, got "
            f"{given!r:.80}; give one such as http://127.0.0.1:8000/v1"
        )
    return address


def _key(variable: str) -> str:
    """Return the key in an environment variable; its value is told to nobody but the server."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if not key.isascii() or not key.isprintable():
        raise InputError(
            f"a key must be of printable ASCII, and the one in {variable} is not; set it anew"
        )
    return key


def _wait_seconds(attempt: int, wished: float) -> float:
    """Return how long to wait after an attempt, the first being zero: at least as wished.

    Requests that failed together do not come back together.
    """
    own = FIRST_WAIT_SECONDS * 2**attempt * random.uniform(0.5, 1.0)
    return min(wished + own, LONGEST_WAIT_SECONDS)


def _seconds(retry_after: str) -> float:
    """Return a Retry-After header, seconds or a date, in seconds from now; zero for neither."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return max(seconds, 0.0) if isfinite(seconds) else 0.0
