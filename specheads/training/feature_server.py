"""Features from vLLM servers: the base runs there, and only its two ends are in this process.

A request has the tokens of one document. The server writes the states of its layers into a file of
a shared folder, and holds a lock next to it until the file is complete. Files are deleted after
use. `specheads serve-features` starts such a server. See docs/scale.md.
"""

import fcntl
import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from json import JSONDecodeError
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
from openai import APIError, APIStatusError, Omit, OpenAI
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config.training import FeatureSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.features import Features
from specheads.core.files import read_json, writable_folder, write_atomic
from specheads.core.machine import to_device
from specheads.data.packing import TokenBatch
from specheads.runs.directory import RunDirectory
from specheads.training.distill.openai import (
    KEY_VARIABLE,
    REMEDIES,
    key_in,
    quoted,
    refuse,
    shown_url,
)
from specheads.training.features import (
    FeatureSource,
    features_of,
    server_layers,
    server_token_bytes,
)

SERVE = "start it with the command that `specheads serve-features` prints for this head"
TRANSIENT = (404, 408, 409, 429)
"""Status codes, next to those of 500 and above, after which the request is sent again. A server
that was started again under another name gives the first one."""
PROBE = 16
"""Tokens of the text by which a server is checked."""
TOLERANCE = 2.0**-6
"""Largest relative difference of two roundings to bfloat16."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds between two attempts."""
LAST_SWEEP_SECONDS = 5.0
"""Longest wait at the end for files of abandoned requests."""

Document = tuple[int, int, np.ndarray]
"""Row, first position and tokens of a document."""


@dataclass
class _Server:
    """One server."""

    shown: str
    client: OpenAI
    model: str = ""
    """Its name for the base."""
    is_checked: bool = False
    """Whether it answered as expected, and no request failed since then."""
    failure: str = ""
    """What went wrong last."""
    lock: Lock = field(default_factory=Lock)


class VllmServer(FeatureSource):
    """Requests features from servers, up to some batches ahead; the base has no layers here.

    `longest` is the number of tokens of the longest row; `announce` is called with lines for
    people.

    Raises:
        InputError: A server, its model, its layers or the folder cannot be used.
    """

    can_fail = True

    def __init__(
        self,
        settings: FeatureSettings,
        base: FrozenBase,
        head: Head,
        longest: int,
        announce: Callable[[str], object],
    ) -> None:
        if not settings.url or not settings.folder:
            raise InputError(
                "features.source=vllm needs the servers and their folder, got features.url="
                f"{settings.url} and features.folder={settings.folder!r}; set both as `specheads "
                "serve-features` prints them"
            )
        self.settings, self.base, self.announce = settings, base, announce
        self.layers, self.longest = server_layers(head, base.num_layers), longest
        self.aux_layers = head.aux_layers
        size = longest * server_token_bytes(self.layers, base.width, base.dtype)
        if size > settings.max_gib * 2**30:
            raise InputError(
                f"features.max_gib must hold the states of a row of {longest} tokens, "
                f"{size / 2**30:.3f} GiB, got {settings.max_gib:g}; raise it"
            )
        self.folder = writable_folder(settings.folder)
        self.waited_seconds: float = 0.0
        self.name = uuid.uuid4().hex[:12]
        """Part of the names of this process's files."""
        self._key = key_in(KEY_VARIABLE)
        self._headers: dict[str, Any] = {} if self._key else {"Authorization": Omit()}
        # with an empty key the client would look into the environment; a failed server is checked
        # before it is asked again
        limits = {"timeout": settings.timeout_seconds, "max_retries": 0}
        self._servers = [
            _Server(shown_url(url), OpenAI(base_url=url, api_key=self._key or "none", **limits))
            for url in settings.url
        ]
        self._turn, self._closing = count(), Event()
        self._ends = Lock()
        """A forward of the base's ends belongs to one thread."""
        self._reference: Tensor | None = None
        """States of the probe at the start."""
        self._active: set[str] = set()
        self._ready: dict[bytes, Future[Tensor]] = {}
        # each worker has at most one file
        workers = settings.concurrency * len(self._servers)
        workers = min(workers, int(settings.max_gib * 2**30) // size)
        self._pool = ThreadPoolExecutor(workers, "features")
        try:
            for server in self._servers:
                self._refuse_unusable(server)
        except BaseException:
            self.close()
            raise

    def begin(self, run: RunDirectory, rank: int) -> None:
        """Name files after the run, and remove those of its killed processes.

        The states of the probe are kept in the run, which resumes with the same ones only.
        Paths may be the same on several machines, so the time of its start is part of the name.
        """
        start = read_json(run.provenance)["start"]
        own = hashlib.sha256(f"{run.path.resolve()} {start}".encode()).hexdigest()[:12]
        self.name = f"{own}-{rank}"
        self._sweep()
        file, now = run.path / "states.safetensors", self._reference
        assert now is not None
        if file.is_file():
            before = load(file.read_bytes())["states"].to(now.device)
            self._refuse_other_states(before, now, self._servers[0].shown)
        elif not rank:
            write_atomic(file, save({"states": now.contiguous().cpu()}))

    def ahead(self, batch: TokenBatch) -> None:
        """Send the requests of a batch."""
        for _, _, tokens in _documents(batch):
            if (key := tokens.tobytes()) not in self._ready:
                self._ready[key] = self._pool.submit(self._fetch, tokens.tolist())

    def drop(self) -> None:
        """Forget the batches that were fetched ahead."""
        for key in list(self._ready):
            self._ready.pop(key).cancel()

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> Features:
        """Return the features of a batch.

        Features after the last label of a document are zero: no loss depends on them.

        Raises:
            InputError: A server gives wrong states, or fails for `patience_seconds`, or until the
                run is asked to stop.
        """
        self.ahead(batch)
        shape = (*batch.tokens.shape, len(self.layers), self.base.width)
        states = torch.zeros(shape, dtype=self.base.dtype)
        began = time.perf_counter()
        for row, first, tokens in _documents(batch):
            # a text that is twice in a batch is requested twice
            wanted = self._ready.pop(tokens.tobytes(), None)
            wanted = wanted or self._pool.submit(self._fetch, tokens.tolist())
            # the main thread reacts to a signal between two waits
            while not wait([wanted], 0.5).done:
                pass
            states[row, first : first + len(tokens)] = wanted.result()
        self.waited_seconds += time.perf_counter() - began
        states = to_device(states, self.base.device)
        with self._ends:
            return features_of(states, self.layers, self.aux_layers, self.base, batch)

    def close(self) -> None:
        """Stop the requests and remove their files."""
        self._closing.set()
        self.drop()
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers:
            server.client.close()
        until = time.monotonic() + LAST_SWEEP_SECONDS
        while self._sweep() and time.monotonic() < until:
            time.sleep(0.05)

    def _fetch(self, tokens: list[int]) -> Tensor:
        """Return the states of a document; ask again while this may help, and other servers."""
        began, turn = time.monotonic(), next(self._turn)
        for attempt in count():
            server = self._servers[(turn + attempt) % len(self._servers)]
            try:
                self._check_again(server)
                return self._ask(server, tokens)[0]
            except ConnectionError as error:
                gone = "" if self.folder.is_dir() else f"features.folder={self.folder} is gone"
                server.failure = gone or str(error)
                if server.is_checked:
                    self.announce(f"{server.failure}; asking again")
                server.is_checked = False
                patience = self.settings.patience_seconds
                over = self._closing.is_set() or self.halted()
                if over or time.monotonic() - began > patience:
                    rule = f"answer within features.patience_seconds={patience:g}"
                    again = "start it again, and run the same command to resume"
                    refuse(rule, server.failure, again)
                self._sweep()
                self._closing.wait(min(FIRST_PAUSE * 2 ** min(attempt, 9), LONGEST_PAUSE))
        raise AssertionError

    def _check_again(self, server: _Server) -> None:
        """Check a server after a failed request; another server may be asked in the meantime."""
        if server.is_checked:
            return
        if not server.lock.acquire(blocking=False):
            raise ConnectionError(server.failure)
        try:
            self._refuse_unusable(server)
        finally:
            server.lock.release()

    def _ask(self, server: _Server, tokens: list[int]) -> tuple[Tensor, int]:
        """Return the states of a text, and the token that the server writes after it.

        Raises:
            ConnectionError: The server failed, which may pass.
        """
        request = f"{self.name}-{uuid.uuid4().hex[:12]}"
        self._active.add(request)
        try:
            reply = self._call(
                server,
                lambda: server.client.completions.create(
                    model=server.model,
                    prompt=tokens,
                    max_tokens=1,
                    temperature=0.0,
                    extra_headers=self._headers | {"X-Request-Id": request},
                    # servers take defaults from the model
                    extra_body={"return_token_ids": True, "repetition_penalty": 1.0},
                ),
            )
            try:
                (choice,) = reply.choices
                (written,), file = choice.token_ids, reply.kv_transfer_params["hidden_states_path"]
                file = self.folder / Path(file).name
            except (AttributeError, KeyError, TypeError, ValueError):
                refuse("write hidden states into a file", f"{server.shown} wrote none", SERVE)
            # a file that is not whole stays until a sweep finds its lock free
            found = self._load(server, file)
            _remove(file)
        finally:
            self._active.discard(request)
        return self._checked(server, tokens, found), written

    def _call(self, server: _Server, send: Callable[[], Any]) -> Any:
        """Return a server's reply; raise ConnectionError if the same request may succeed later."""
        try:
            return send()
        except (APIError, JSONDecodeError) as error:
            status = error.status_code if isinstance(error, APIStatusError) else 500
            what = str(error.__cause__ or error) or type(error).__name__
            what = f"{server.shown} failed ({quoted(what, self._key)})"
            if status >= 500 or status in TRANSIENT:
                raise ConnectionError(what) from None
            remedy = REMEDIES[status] if status in (401, 403) else SERVE
            refuse("answer each request", what, remedy)

    def _load(self, server: _Server, file: Path) -> dict[str, Tensor]:
        """Return the content of a file as soon as its lock is free."""
        until = time.monotonic() + self.settings.timeout_seconds
        try:
            with _lock_of(file).open("rb") as held:
                while not _locked(held, fcntl.LOCK_SH):
                    if time.monotonic() > until:
                        raise ConnectionError(f"{server.shown} did not finish {file}")
                    time.sleep(0.002)
                # a copy: the file is deleted before the states are used
                return load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            if isinstance(error, ConnectionError):
                raise
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise ConnectionError(
                f"the file {file.name} of {server.shown} is not whole in features.folder="
                f"{self.folder}, which has {free / 2**30:.2f} GiB free ({first_line(error):.80})"
            ) from None

    @torch.no_grad()
    def _checked(self, server: _Server, tokens: list[int], found: dict[str, Tensor]) -> Tensor:
        """Return the states in a file; refuse those of other tokens, layers or another model."""
        if not {"hidden_states", "token_ids"} <= found.keys():
            what = f"{server.shown} wrote {', '.join(found)}"
            refuse("write hidden_states and token_ids", what, SERVE)
        states, read = found["hidden_states"], found["token_ids"].tolist()
        ids = found["layer_ids"].tolist() if "layer_ids" in found else self.layers
        shape = (len(tokens), len(self.layers), self.base.width)
        if read != tokens or ids != self.layers or states.shape != shape:
            given = f"{ids} in states of {tuple(states.shape)}, or read other tokens"
            rule = f"give this head's layers {self.layers} in states of {shape} numbers"
            refuse(rule, f"{server.shown} gives {given}", SERVE)
        first = states[:, 0].to(self.base.device, self.base.dtype)
        with self._ends:
            embedded = self.base.embedded(torch.tensor([tokens]))[0]
        if not ((first - embedded).abs() <= TOLERANCE * embedded.abs() + 1e-6).all():
            why = f"its model is not {self.base.name}, or its states belong to other positions"
            rule = "give the embedding of the same token as layer 0"
            refuse(rule, f"{server.shown} does not: {why}", SERVE)
        return states

    def _refuse_unusable(self, server: _Server) -> None:
        """Refuse a server with another model, other layers, another folder or a short context.

        Raises:
            ConnectionError: It failed after the start of the run.
        """
        is_start = self._reference is None
        try:
            (model, *_) = self._call(
                server, lambda: server.client.models.list(extra_headers=self._headers).data
            )
            server.model, context = model.id, getattr(model, "max_model_len", None)
            tokens = [(17 * number + 5) % self.base.vocab_size for number in range(PROBE)]
            states, written = self._ask(server, tokens)
        except ConnectionError as error:
            if not is_start:
                raise
            refuse("be ready", str(error), f"{SERVE}, and give its address up to /v1")
        if context is not None and context < self.longest:
            what = f"{server.shown} has a context of {context}"
            remedy = f"lower sequence_length, or start it with --max-model-len {self.longest}"
            refuse(f"read {self.longest} tokens, the longest row", what, remedy)
        states = states.to(self.base.device, self.base.dtype)
        with self._ends, torch.no_grad():
            logits = self.base.projection(self.base.final_norm(states[-1:, -1]))[0].float()
        if not logits.max() - logits[written] <= TOLERANCE * logits.abs().max():
            what = f"{server.shown} writes {written}, and {self.base.name} {int(logits.argmax())}"
            why = f"it runs other weights, or its last layer is not {self.layers[-1]}"
            refuse("write the token of the base's last state", f"{what}: {why}", SERVE)
        if self._reference is None:
            self._reference = states
        self._refuse_other_states(self._reference, states, server.shown)
        server.is_checked = True

    def _refuse_other_states(self, before: Tensor, now: Tensor, shown: str) -> None:
        if before.shape == now.shape:
            change = (now - before).float().norm(dim=-1) / before.float().norm(dim=-1)
            if change.mean(0).max() <= 4 * TOLERANCE:
                return
        rule = "have the weights and layers of the start of this run"
        again = "start it as before, and run the same command to resume"
        refuse(rule, f"{shown} gives other states", again)

    def _sweep(self) -> bool:
        """Remove files of abandoned requests; return whether a server still writes one."""
        busy, oldest = False, time.time() - self.settings.timeout_seconds
        # safetensors writes such a file first, and a server that was killed leaves it
        for file in self.folder.glob(".tmp*"):
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < oldest:
                    file.unlink()
        for file in self.folder.glob(f"*{self.name}-*.safetensors*"):
            file = file.with_name(file.name.removesuffix(".lock"))
            if any(request in file.name for request in list(self._active)):
                continue
            try:
                with _lock_of(file).open("rb") as held:
                    if not _locked(held, fcntl.LOCK_EX):
                        busy = True
                        continue
            except FileNotFoundError:
                pass
            _remove(file)
        return busy


def _documents(batch: TokenBatch) -> Iterator[Document]:
    """Yield each document, up to the token before its last label.

    Later states have no effect: the last label is predicted from the position before it.
    """
    tokens, labels = batch.tokens.cpu().numpy(), batch.loss_mask.cpu().numpy()
    ids = np.zeros_like(tokens) if batch.document_ids is None else batch.document_ids.cpu().numpy()
    for row in range(len(tokens)):
        bounds = [0, *(np.flatnonzero(np.diff(ids[row])) + 1).tolist(), tokens.shape[1]]
        for first, end in pairwise(bounds):
            last = int(labels[row, first:end].nonzero()[0].max(initial=0))
            if last:
                yield row, first, np.ascontiguousarray(tokens[row, first : first + last])


def _lock_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def _locked(held: Any, kind: int) -> bool:
    """Return whether a lock was free and is ours now."""
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    _lock_of(file).unlink(missing_ok=True)
