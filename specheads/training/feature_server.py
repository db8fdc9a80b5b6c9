"""Features from vLLM servers: the base runs there, and only its two ends are in this process.

A request has the tokens of one document. The states of its layers come through a transport, such as
a shared folder, and are deleted after use. `specheads serve-features` starts such a server. See
docs/scale.md.
"""

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from json import JSONDecodeError
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
from openai import APIError, APIStatusError, DefaultHttpxClient, Omit, OpenAI
from safetensors.torch import load, save
from torch import Tensor

from specheads.base.ends import ServedBase
from specheads.config.training import FeatureSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.features import Features
from specheads.core.files import read_json, write_atomic
from specheads.core.machine import to_device
from specheads.data.packing import TokenBatch
from specheads.runs.directory import RunDirectory
from specheads.training.distill.openai import (
    KEY_VARIABLE,
    REMEDIES,
    client_options,
    http_client,
    proxy_note,
    public_address,
    quote_message,
    read_api_key,
    refuse_server,
)
from specheads.training.features import (
    FeatureLedger,
    FeatureSource,
    features_of,
    server_layers,
    server_token_bytes,
)
from specheads.training.transport import START_SERVER, open_transport

RETRIED_STATUSES = (404, 408, 409, 429)
"""Status codes, next to those of 500 and above, after which the request is sent again. A server
that was started again under another name gives the first one."""
PROBE_TOKENS = 16
"""Tokens of the text by which a server is checked."""
TOLERANCE = 2.0**-6
"""Largest relative difference of two roundings to bfloat16."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 10.0
"""Pause between two attempts."""
LAST_SWEEP_SECONDS = 5.0
"""Longest wait at the end for files of abandoned requests."""


@dataclass(frozen=True, slots=True)
class DocumentInRow:
    """A document of a batch, up to the token before its last label."""

    row: int
    start: int
    """First position in the row."""
    tokens: np.ndarray


@dataclass
class ServerState:
    """One server."""

    address: str
    """Without passwords."""
    client: OpenAI
    model: str = ""
    """Its name for the base."""
    is_checked: bool = False
    """Whether it answered as expected, and no request failed since then."""
    failure: str = ""
    """What went wrong last."""
    num_faults: int = 0
    """How often it was lost."""
    next_check: float = 0.0
    """Time before which it is asked again only if no other server answers."""
    lock: Lock = field(default_factory=Lock)


class VllmServer(FeatureSource):
    """Requests features from servers, some batches ahead; the base has no layers here.

    `max_row_tokens` is the number of tokens of the longest row; `announce` is called with lines for
    people.

    Raises:
        InputError: A server, its model, its layers or the folder cannot be used.
    """

    can_fail = True

    def __init__(
        self,
        settings: FeatureSettings,
        base: ServedBase,
        head: Head,
        max_row_tokens: int,
        announce: Callable[[str], object],
    ) -> None:
        if not settings.url or (settings.transport == "folder" and not settings.folder):
            raise InputError(
                "features.source=vllm needs the servers and their folder, got features.url="
                f"{settings.url} and features.folder={settings.folder!r}; set both as `specheads "
                "serve-features` prints them"
            )
        self.settings, self.base, self.announce = settings, base, announce
        self.layers, self.max_row_tokens = server_layers(head, base), max_row_tokens
        self.aux_layers = head.aux_layers
        self._token_bytes = server_token_bytes(self.layers, base.width, base.dtype)
        file_bytes = max_row_tokens * self._token_bytes
        self.transport = open_transport(settings, max_row_tokens, file_bytes)
        self._waited_seconds, self._read_seconds, self._read_bytes = 0.0, 0.0, 0
        self.name = uuid.uuid4().hex[:12]
        """Beginning of the ids of this process's requests."""
        self._key = read_api_key(KEY_VARIABLE)
        self._headers: dict[str, Any] = {} if self._key else {"Authorization": Omit()}
        # a failed server is checked before it is asked again
        options = client_options(self._key, settings.timeout_seconds, retries=0)
        self._servers = list[ServerState]()
        for url in settings.url:
            address, http = public_address(url), http_client(url, DefaultHttpxClient)
            client = OpenAI(base_url=url, http_client=http, **options)
            self._servers.append(ServerState(address, client))
        self._request_numbers, self._closing = count(), Event()
        self._base_lock, self._lock = Lock(), Lock()
        """A forward of the base's ends, and a change of shared numbers, belong to one thread."""
        self._probe_states: Tensor | None = None
        """States of the probe at the start."""
        self._open_requests: set[str] = set()
        self._states_by_tokens: dict[bytes, Future[Tensor]] = {}
        # each worker has at most one file
        num_workers = settings.concurrency * len(self._servers)
        num_workers = min(num_workers, int(settings.max_gib * 2**30) // file_bytes)
        self._pool = ThreadPoolExecutor(num_workers, "features")
        try:
            for server in self._servers:
                with suppress(ConnectionError):
                    self._recheck_server(server)
            if self._probe_states is None:
                remedy = f"{START_SERVER}, and give its address up to /v1"
                refuse_server("be ready", self._servers[0].failure, remedy)
        except BaseException:
            self.close()
            raise
        for server in self._servers:
            if not server.is_checked:
                announce(f"{server.failure}; it is used as soon as it answers")

    def begin(self, run: RunDirectory, rank: int) -> None:
        """Name requests after the run, and remove the states of its killed processes.

        The states of the probe are kept in the run, which resumes with the same ones only.
        Paths may be the same on several machines, so the time of its start is part of the name.
        """
        start = read_json(run.provenance)["start"]
        run_id = hashlib.sha256(f"{run.path.resolve()} {start}".encode()).hexdigest()[:12]
        self.name = f"{run_id}-{rank}"
        self._sweep()
        file, states = run.path / "states.safetensors", self._probe_states
        assert states is not None
        if file.is_file():
            saved_states = load(file.read_bytes())["states"].to(states.device)
            self._refuse_changed_states(saved_states, states, self._servers[0].address)
        elif not rank:
            write_atomic(file, save({"states": states.contiguous().cpu()}))

    def ahead(self, batch: TokenBatch) -> None:
        """Send the requests of a batch."""
        for document in _documents(batch):
            if (key := document.tokens.tobytes()) not in self._states_by_tokens:
                self._states_by_tokens[key] = self._submit(document)

    def drop(self) -> None:
        """Forget the batches that were fetched ahead."""
        for key in list(self._states_by_tokens):
            self._states_by_tokens.pop(key).cancel()

    def _submit(self, document: DocumentInRow) -> Future[Tensor]:
        return self._pool.submit(self._fetch_states, document.tokens.tolist())

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
        start_time = time.perf_counter()
        for document in _documents(batch):
            # a text that is twice in a batch is requested twice
            future = self._states_by_tokens.pop(document.tokens.tobytes(), None)
            future = future or self._submit(document)
            # the main thread reacts to a signal between two waits
            while not wait([future], 0.5).done:
                pass
            end = document.start + len(document.tokens)
            states[document.row, document.start : end] = future.result()
        self._waited_seconds += time.perf_counter() - start_time
        states = to_device(states, self.base.device)
        with self._base_lock:
            return features_of(states, self.layers, self.aux_layers, self.base, batch)

    def ledger(self) -> FeatureLedger:
        """Return what all requests took."""
        num_tokens = sum(map(len, list(self._states_by_tokens))) // torch.int64.itemsize
        pool_bytes = num_tokens * self._token_bytes
        return FeatureLedger(self._waited_seconds, self._read_seconds, self._read_bytes, pool_bytes)

    def close(self) -> None:
        """Stop the requests and remove their states."""
        self._closing.set()
        self.drop()
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers:
            server.client.close()
        deadline = time.monotonic() + LAST_SWEEP_SECONDS
        while self._sweep() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.transport.close()

    def _fetch_states(self, tokens: list[int]) -> Tensor:
        """Return the states of a document; retry while this may help, with other servers too."""
        start, number = time.monotonic(), next(self._request_numbers)
        patience = self.settings.patience_seconds
        for attempt in count():
            now = time.monotonic()
            usable = [state for state in self._servers if state.next_check < now] or self._servers
            server = usable[(number + attempt) % len(usable)]
            num_faults = server.num_faults
            try:
                self._recheck_server(server)
                return self._request_states(server, tokens)[0]
            except ConnectionError as error:
                server.failure = failure = self.transport.failure() or str(error)
                with self._lock:
                    # one line for a fault, also if many requests were open
                    is_new = server.is_checked and server.num_faults == num_faults
                    if is_new:
                        server.is_checked = False
                        server.num_faults += 1
                if is_new:
                    self.announce(f"{failure}; asking again for up to {patience:g} seconds")
                is_stopping = self._closing.is_set() or self.halted()
                if is_stopping or time.monotonic() - start > patience:
                    refuse_server(
                        f"answer within features.patience_seconds={patience:g}",
                        failure,
                        "start it again, and run the same command to resume",
                    )
                self._sweep()
                pause_seconds = FIRST_PAUSE_SECONDS * 2 ** min(attempt, 9)
                self._closing.wait(min(pause_seconds, LONGEST_PAUSE_SECONDS))
        raise AssertionError

    def _recheck_server(self, server: ServerState) -> None:
        """Check a server after a failed request; another server may be asked in the meantime."""
        if server.is_checked:
            return
        if not server.lock.acquire(blocking=False):
            raise ConnectionError(server.failure)
        try:
            self._check_server(server)
            if server.failure:
                self.announce(f"{server.address} answers{' again' * bool(server.num_faults)}")
        except ConnectionError as error:
            server.failure = str(error)
            server.next_check = time.monotonic() + LONGEST_PAUSE_SECONDS
            raise
        finally:
            server.lock.release()

    def _request_states(self, server: ServerState, tokens: list[int]) -> tuple[Tensor, int]:
        """Return the states of a text, and the token that the server writes after it.

        Raises:
            ConnectionError: The server failed, which may pass.
        """
        request = f"{self.name}-{uuid.uuid4().hex[:12]}"
        self._open_requests.add(request)
        num_faults, is_probe = server.num_faults, not server.is_checked
        try:
            reply = self._call_server(
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
                (next_token,) = choice.token_ids
                parameters = reply.kv_transfer_params
                _ = parameters[self.transport.key]
            except (AttributeError, KeyError, TypeError, ValueError):
                rule = f"send its states by features.transport={self.settings.transport}"
                refuse_server(rule, f"{server.address} wrote none", START_SERVER)
            start_time = time.perf_counter()
            # the few states of a probe are written at once or never
            end_time = start_time + (LONGEST_PAUSE_SECONDS if is_probe else math.inf)
            tensors = self.transport.receive(
                parameters,
                server.address,
                lambda: server.num_faults != num_faults or time.perf_counter() > end_time,
            )
            with self._lock:
                self._read_seconds += time.perf_counter() - start_time
                self._read_bytes += sum(tensor.nbytes for tensor in tensors.values())
        finally:
            self._open_requests.discard(request)
        return self._check_states(server, tokens, tensors), next_token

    def _call_server(self, server: ServerState, send: Callable[[], Any]) -> Any:
        """Return a server's reply; raise ConnectionError if the same request may succeed later."""
        try:
            return send()
        except (APIError, JSONDecodeError) as error:
            status = error.status_code if isinstance(error, APIStatusError) else 500
            message = str(error.__cause__ or error) or type(error).__name__
            failure = f"{server.address} failed ({quote_message(message, self._key)})"
            failure += proxy_note(server.address)
            if status >= 500 or status in RETRIED_STATUSES:
                raise ConnectionError(failure) from None
            remedy = REMEDIES[status] if status in (401, 403) else START_SERVER
            refuse_server("answer each request", failure, remedy)

    @torch.no_grad()
    def _check_states(
        self, server: ServerState, tokens: list[int], tensors: dict[str, Tensor]
    ) -> Tensor:
        """Return the states in a file; refuse those of other tokens, layers or another model."""
        if not {"hidden_states", "token_ids"} <= tensors.keys():
            failure = f"{server.address} wrote {', '.join(tensors)}"
            refuse_server("write hidden_states and token_ids", failure, START_SERVER)
        states, read_tokens = tensors["hidden_states"], tensors["token_ids"].tolist()
        layers = tensors["layer_ids"].tolist() if "layer_ids" in tensors else self.layers
        shape = (len(tokens), len(self.layers), self.base.width)
        if read_tokens != tokens or layers != self.layers or states.shape != shape:
            refuse_server(
                f"give this head's layers {self.layers} in states of {shape} numbers",
                f"{server.address} gives {layers} in states of {tuple(states.shape)}, or read "
                "other tokens",
                START_SERVER,
            )
        with self._base_lock:
            embedded = self.base.embed(torch.tensor([tokens]))[0]
        error = (states[:, 0].to(self.base.device, self.base.dtype) - embedded).abs()
        if not self.layers[0] and not (error <= TOLERANCE * embedded.abs() + 1e-6).all():
            refuse_server(
                "give the embedding of the same token as layer 0",
                f"{server.address} does not: its model is not {self.base.name}, or its states "
                "belong to other positions",
                START_SERVER,
            )
        return states

    def _check_server(self, server: ServerState) -> None:
        """Refuse a server with another model, other layers, another folder or a short context.

        Raises:
            ConnectionError: It failed.
        """
        (model, *_) = self._call_server(
            server, lambda: server.client.models.list(extra_headers=self._headers).data
        )
        server.model, context = model.id, getattr(model, "max_model_len", None)
        tokens = [(17 * number + 5) % self.base.vocab_size for number in range(PROBE_TOKENS)]
        states, next_token = self._request_states(server, tokens)
        if context is not None and context < self.max_row_tokens:
            refuse_server(
                f"read {self.max_row_tokens} tokens, the longest row",
                f"{server.address} has a context of {context}",
                f"lower sequence_length, or start it with --max-model-len {self.max_row_tokens}",
            )
        states = states.to(self.base.device, self.base.dtype)
        with self._base_lock, torch.no_grad():
            logits = self.base.projection(self.base.final_norm(states[-1:, -1]))[0].float()
        if not logits.max() - logits[next_token] <= TOLERANCE * logits.abs().max():
            refuse_server(
                "write the token of the base's last state",
                f"{server.address} writes {next_token}, and {self.base.name} "
                f"{int(logits.argmax())}: it runs other weights, or its last layer is not "
                f"{self.layers[-1]}",
                START_SERVER,
            )
        if self._probe_states is None:
            self._probe_states = states
        self._refuse_changed_states(self._probe_states, states, server.address)
        server.is_checked = True

    def _refuse_changed_states(self, expected: Tensor, states: Tensor, address: str) -> None:
        if expected.shape == states.shape:
            change = (states - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
            if change.mean(0).max() <= 4 * TOLERANCE:
                return
        refuse_server(
            "have the weights and layers of the start of this run",
            f"{address} gives other states",
            "start it as before, and run the same command to resume",
        )

    def _sweep(self) -> bool:
        """Remove states of abandoned requests; return whether a server still writes some."""
        return self.transport.sweep(self.name, list(self._open_requests))


def _documents(batch: TokenBatch) -> Iterator[DocumentInRow]:
    """Yield each document, up to the token before its last label.

    Later states have no effect: the last label is predicted from the position before it.
    """
    tokens, labels = batch.tokens.cpu().numpy(), batch.loss_mask.cpu().numpy()
    ids = np.zeros_like(tokens) if batch.document_ids is None else batch.document_ids.cpu().numpy()
    for row in range(len(tokens)):
        bounds = [0, *(np.flatnonzero(np.diff(ids[row])) + 1).tolist(), tokens.shape[1]]
        for start, end in pairwise(bounds):
            last_label = int(labels[row, start:end].nonzero()[0].max(initial=0))
            if last_label:
                read_tokens = np.ascontiguousarray(tokens[row, start : start + last_label])
                yield DocumentInRow(row, start, read_tokens)
