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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from json import JSONDecodeError
from pathlib import Path
from threading import Condition, Event, Lock
from typing import Any

import numpy as np
import torch
from openai import APIError, APIStatusError, Omit, OpenAI
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.features import Features
from specheads.core.files import nearest, read_json, writable_folder, write_atomic
from specheads.core.machine import to_device
from specheads.data.packing import TokenBatch
from specheads.runs.directory import RunDirectory
from specheads.training.distill.engines.openai import (
    KEY_VARIABLE,
    REMEDIES,
    key_in,
    quoted,
    shown_url,
)
from specheads.training.features import (
    FeatureSource,
    features_of,
    server_layers,
    server_token_bytes,
)
from specheads.training.settings import FeatureSettings

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

    Args:
        settings: Settings of the servers.
        base: The base without its layers.
        head: The head, whose layers the servers give.
        longest: Tokens of the longest row.
        announce: Called with lines for people.

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
        self.folder = writable_folder(settings.folder)
        self.waited_seconds: float = 0.0
        self.name = uuid.uuid4().hex[:12]
        """Part of the names of this process's files."""
        self._key = key_in(KEY_VARIABLE)
        self._headers: dict[str, Any] = {} if self._key else {"Authorization": Omit()}
        self._servers = [_Server(shown_url(url), self._client(url)) for url in settings.url]
        self._turn, self._closing = count(), Event()
        self._ends = Lock()
        """A forward of the base's ends belongs to one thread."""
        self._reference: Tensor | None = None
        """States of the probe at the start."""
        self._active: set[str] = set()
        self._ready: dict[bytes, Future[Tensor]] = {}
        self._free, self._freed = self._bytes(settings.max_gib), Condition()
        workers = settings.concurrency * len(self._servers)
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
        self._send(list(_documents(batch)))

    def _send(self, documents: Sequence[Document]) -> None:
        for _, _, tokens in documents:
            key = tokens.tobytes()
            if key not in self._ready:
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
        documents = list(_documents(batch))
        self._send(documents)
        shape = (*batch.tokens.shape, len(self.layers), self.base.width)
        states = torch.zeros(shape, dtype=self.base.dtype)
        known = torch.zeros(shape[:2], dtype=torch.bool)
        began = time.perf_counter()
        for row, first, tokens in documents:
            # a text that is twice in a batch is requested twice
            wanted = self._ready.pop(tokens.tobytes(), None)
            # the main thread reacts to a signal between two waits
            while wanted and not wait([wanted], 0.5).done:
                pass
            found = wanted.result() if wanted else self._fetch(tokens.tolist())
            states[row, first : first + len(found)] = found
            known[row, first : first + len(found)] = True
        self.waited_seconds += time.perf_counter() - began
        states, known = (to_device(one, self.base.device) for one in (states, known))
        with self._ends:
            # the others are zeros, as their states are
            embedded = self.base.embedded(batch.tokens) * known[..., None]
            self._refuse_other_embedding(states[:, :, 0], embedded)
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
        size, began, turn = self._bytes_of(len(tokens)), time.monotonic(), next(self._turn)
        with self._room(size):
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
                        raise InputError(
                            f"a server must answer within features.patience_seconds={patience:g}, "
                            f"but {server.failure}; start it again, and run the same command to "
                            "resume"
                        ) from None
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

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Wait until the folder has room for a file."""
        with self._freed:
            self._freed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._freed:
                self._free += size
                self._freed.notify_all()

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
                raise InputError(
                    f"a server must write hidden states into a file, but {server.shown} wrote "
                    f"none; {SERVE}"
                ) from None
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
            raise InputError(f"a server must answer each request, but {what}; {remedy}") from None

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

    def _checked(self, server: _Server, tokens: list[int], found: dict[str, Tensor]) -> Tensor:
        """Return the states in a file; refuse those of other tokens, layers or another model."""
        if not {"hidden_states", "token_ids"} <= found.keys() or found["hidden_states"].ndim != 3:
            raise InputError(
                f"a server must write hidden_states and token_ids, but {server.shown} wrote "
                f"{', '.join(found)}; {SERVE}"
            )
        states, read = found["hidden_states"], found["token_ids"].tolist()
        if read != tokens or len(states) != len(tokens):
            raise InputError(
                f"a server must give a state for each token of the prompt, but {server.shown} gave "
                f"{len(states)} for {len(tokens)} tokens, or read others; {SERVE}"
            )
        ids = found["layer_ids"].tolist() if "layer_ids" in found else None
        if states.shape[1] != len(self.layers) or ids not in (None, self.layers):
            raise InputError(
                f"this head needs the layers {self.layers}, but {server.shown} gives "
                f"{ids or f'{states.shape[1]} layers'}; {SERVE}"
            )
        if states.shape[2] != self.base.width:
            raise InputError(
                f"a server must run {self.base.name}, whose states have {self.base.width} "
                f"numbers, but those of {server.shown} have {states.shape[2]}; {SERVE}"
            )
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
            raise InputError(
                f"a server must be ready, but {error}; {SERVE}, and give its address up to /v1"
            ) from None
        if context is not None and context < self.longest:
            raise InputError(
                f"a server must read {self.longest} tokens, the longest row, but {server.shown} "
                f"has a context of {context}; lower sequence_length, or start it with "
                f"--max-model-len {self.longest}"
            )
        states = states.to(self.base.device, self.base.dtype)
        with self._ends, torch.no_grad():
            embedded = self.base.embedded(torch.tensor([tokens]))[0]
            self._refuse_other_embedding(states[:, 0], embedded, server.shown)
            logits = self.base.projection(self.base.final_norm(states[-1:, -1]))[0].float()
        if not logits.max() - logits[written] <= TOLERANCE * logits.abs().max():
            raise InputError(
                f"norm and projection of the last state must give the server's own token, but "
                f"{server.shown} writes {written}, and {self.base.name} {int(logits.argmax())}: "
                f"it runs other weights, or its last layer is not {self.layers[-1]}; {SERVE}"
            )
        if self._reference is None:
            self._reference = states
        self._refuse_other_states(self._reference, states, server.shown)
        server.is_checked = True

    def _refuse_other_states(self, before: Tensor, now: Tensor, shown: str) -> None:
        if before.shape == now.shape:
            change = (now - before).float().norm(dim=-1) / before.float().norm(dim=-1)
            if change.mean(0).max() <= 4 * TOLERANCE:
                return
        raise InputError(
            f"servers must have the weights and layers of the start of this run, but {shown} gives "
            "other states; start it as before, and run the same command to resume"
        )

    def _refuse_other_embedding(self, states: Tensor, embedded: Tensor, shown: str = "") -> None:
        bound = TOLERANCE * embedded.abs() + 1e-6
        if not ((states - embedded).abs() <= bound).all():
            raise InputError(
                "the first layer of a server must be the base's embedding of the same token, but "
                f"that of {shown or ', '.join(one.shown for one in self._servers)} is not: its "
                f"model is not {self.base.name}, or its states belong to other positions; {SERVE}"
            )

    def _client(self, url: str) -> OpenAI:
        return OpenAI(
            base_url=url,
            # with an empty one the client would look into the environment
            api_key=self._key or "none",
            timeout=self.settings.timeout_seconds,
            # a failed server is checked before it is asked again
            max_retries=0,
        )

    def _bytes_of(self, num_tokens: int) -> int:
        """Return the size of a file."""
        return num_tokens * server_token_bytes(self.layers, self.base.width, self.base.dtype)

    def _bytes(self, gib: float) -> int:
        size, longest = int(gib * 2**30), self._bytes_of(self.longest)
        if longest > size:
            raise InputError(
                f"features.max_gib must hold the states of a row of {self.longest} tokens, "
                f"{longest / 2**30:.3f} GiB, got {gib:g}; raise it"
            )
        if (free := shutil.disk_usage(nearest(self.folder)).free) < size:
            raise InputError(
                f"features.folder must have room for features.max_gib={gib:g}, and {self.folder} "
                f"has {free / 2**30:.2f} GiB free; lower features.max_gib, or free some space"
            )
        return size

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
