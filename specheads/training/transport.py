"""Transports of hidden states from vLLM servers: files in a shared folder, or a Mooncake store.

A request's id is part of the name of its file or key. See docs/scale.md.
"""

import ctypes
import fcntl
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from specheads.config.training import FeatureSettings
from specheads.core.errors import InputError, first_line
from specheads.core.files import nearest_existing, writable_folder

START_SERVER = "start it with the command that `specheads serve-features` prints for this head"
STAGING_BYTES = 64 << 20
"""Buffer of Mooncake's client, next to those of hs-connectors' threads."""
POLL_SECONDS = 1.0
"""Longest wait for a key before asking whether its server is lost."""
CONNECT_SECONDS = 5.0
"""Longest wait for the answer of a master; the engine would wait for 90."""

Check = Callable[[], bool]


class Transport(ABC):
    """Receives the states of requests, and removes those that nobody reads."""

    key: str
    """Key that a server's reply has only for this transport."""

    def __init__(self, settings: FeatureSettings) -> None:
        self.timeout_seconds = settings.timeout_seconds

    @abstractmethod
    def receive(self, parameters: Any, address: str, is_lost: Check) -> dict[str, Tensor]:
        """Return the tensors to which a server's reply refers, and remove them from their place.

        While they are not there, it asks whether the server is lost.

        Raises:
            ConnectionError: They are late, incomplete or lost; a new request may help.
        """

    @abstractmethod
    def sweep(self, name: str, open_requests: Collection[str]) -> bool:
        """Remove the states of abandoned requests whose ids begin with a name.

        Return whether a server still writes some.
        """

    def failure(self) -> str:
        """Return why the transport cannot work at all; empty if it can."""
        return ""

    def close(self) -> None:
        """Release what the transport uses."""
        return


def open_transport(settings: FeatureSettings, row_tokens: int, row_bytes: int) -> Transport:
    """Return the transport of these settings.

    Raises:
        InputError: It cannot be used, or has no space for the states of the longest row.
    """
    if row_bytes > settings.max_gib * 2**30:
        raise InputError(
            f"features.max_gib must hold the states of a row of {row_tokens} tokens, "
            f"{row_bytes / 2**30:.3f} GiB, got {settings.max_gib:g}; raise it"
        )
    if settings.transport == "mooncake":
        return MooncakeStore(settings)
    return SharedFolder(settings, row_tokens, row_bytes)


# --- a shared folder ---------------------------------------------------------------------------


class SharedFolder(Transport):
    """Files with a lock next to each, which the server holds until the file is complete."""

    key = "hidden_states_path"

    def __init__(self, settings: FeatureSettings, row_tokens: int, row_bytes: int) -> None:
        super().__init__(settings)
        self.folder = writable_folder(settings.folder)
        if row_bytes > (free_bytes := shutil.disk_usage(nearest_existing(self.folder)).free):
            raise InputError(
                f"features.folder must have space for a row of {row_tokens} tokens, "
                f"{row_bytes / 2**30:.3f} GiB, and {self.folder} has {free_bytes / 2**30:.3f}; "
                "name another folder, or give a container a larger /dev/shm (docker --shm-size)"
            )

    def receive(self, parameters: Any, address: str, is_lost: Check) -> dict[str, Tensor]:
        """Return the content of a file as soon as its lock is free, as when its server is lost."""
        del is_lost
        file = self.folder / Path(parameters[self.key]).name
        deadline = time.monotonic() + self.timeout_seconds
        try:
            with _lock_of(file).open("rb") as lock:
                while not _take_lock(lock, fcntl.LOCK_SH):
                    if time.monotonic() > deadline:
                        raise ConnectionError(f"{address} did not finish {file}")
                    time.sleep(0.002)
                # a copy: the file is deleted before the states are used
                tensors = load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            if isinstance(error, ConnectionError):
                raise
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise ConnectionError(
                f"the file {file.name} of {address} is not whole in features.folder="
                f"{self.folder}, which has {free / 2**30:.2f} GiB free ({first_line(error):.80})"
            ) from None
        _remove(file)
        return tensors

    def sweep(self, name: str, open_requests: Collection[str]) -> bool:
        """Remove files of abandoned requests; return whether a server still writes one."""
        is_busy, oldest = False, time.time() - self.timeout_seconds
        # safetensors writes such a file first, and a server that was killed leaves it
        for file in self.folder.glob(".tmp*"):
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < oldest:
                    file.unlink()
        for file in self.folder.glob(f"*{name}-*.safetensors*"):
            file = file.with_name(file.name.removesuffix(".lock"))
            if any(request in file.name for request in open_requests):
                continue
            try:
                with _lock_of(file).open("rb") as lock:
                    if not _take_lock(lock, fcntl.LOCK_EX):
                        is_busy = True
                        continue
            except FileNotFoundError:
                pass
            _remove(file)
        return is_busy

    def failure(self) -> str:
        """Return that the folder is gone, if it is."""
        return "" if self.folder.is_dir() else f"features.folder={self.folder} is gone"


def _lock_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def _take_lock(lock: Any, kind: int) -> bool:
    """Take a lock if it is free; return whether it was."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    _lock_of(file).unlink(missing_ok=True)


# --- a Mooncake store --------------------------------------------------------------------------


class MooncakeStore(Transport):
    """Keys of a Mooncake store, whose memory is at the servers, through hs-connectors' client."""

    key = "layer_ids"

    def __init__(self, settings: FeatureSettings) -> None:
        super().__init__(settings)
        self.master, local_address = settings.master, address_towards(settings.master)
        try:
            import hs_connectors.mooncake_store as store  # pyright: ignore[reportMissingImports]

            _silence_engine()
            config = store.MooncakeStoreConfig(
                local_hostname=local_address,
                master_server_address=self.master,
                protocol=settings.protocol,
                global_segment_size=0,
                local_buffer_size=STAGING_BYTES,
            )
            self.version = store.VERSION
            self.store = store.MooncakeHiddenStatesStore(config).setup()
            # Mooncake's own client: hs-connectors removes one key at a time
            self.engine: Any = self.store._store
        except (ImportError, RuntimeError) as error:
            raise InputError(
                f"features.transport=mooncake with protocol={settings.protocol} needs Mooncake "
                f"here, and it does not start ({first_line(error)}); pip install "
                "'specheads[mooncake]', and on Debian apt-get install libibverbs1 librdmacm1 "
                "libnuma1"
            ) from error

    def receive(self, parameters: Any, address: str, is_lost: Check) -> dict[str, Tensor]:
        """Return the content of a key, and delete it."""
        if (version := parameters.get("version")) != self.version:
            raise InputError(
                f"a server must send manifests of version {self.version}, but {address} sends "
                f"{version}; install the same hs-connectors there and here"
            )
        deadline, tensors = time.monotonic() + self.timeout_seconds, None
        try:
            while tensors is None:
                try:
                    tensors = self.store.get_sample(parameters, timeout=POLL_SECONDS)
                except TimeoutError:
                    if time.monotonic() > deadline or is_lost():
                        raise
            self.store.delete_sample(parameters["handle"])
        except (RuntimeError, TimeoutError) as error:
            raise ConnectionError(
                f"the states of {address} are not in its memory of features.max_gib, which may be "
                f"full ({first_line(error):.120})"
            ) from None
        return tensors | {"layer_ids": torch.tensor(parameters[self.key])}

    def sweep(self, name: str, open_requests: Collection[str]) -> bool:
        """Remove the keys of abandoned requests. A server may write one later."""
        open_ids = "|".join(request.rpartition("-")[2] for request in open_requests)
        self.engine.remove_by_regex(f".*{name}-(?!{open_ids or '-'}).*", True)
        return False

    def failure(self) -> str:
        """Return that the master is gone, if it is."""
        if answers(*host_and_port(f"//{self.master}")):
            return ""
        return f"no mooncake_master answers at features.master={self.master}"

    def close(self) -> None:
        """Leave the store."""
        self.engine.close()


def _silence_engine() -> None:
    """Keep the engine's log off the terminal: each call returns its own status."""
    from mooncake import store  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    with suppress(ValueError):
        library = ctypes.CDLL(store.__file__)
        # glog's level of fatal errors
        ctypes.c_int32.in_dll(library, "_ZN3fLI17FLAGS_minloglevelE").value = 3


def host_and_port(url: str) -> tuple[str, int]:
    """Return the two parts of the address of a server, or of a master after `//`."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise InputError(
        f"a server needs an address with a host and a port, got {url.removeprefix('//')!r:.80}; "
        "give it as http://127.0.0.1:8000/v1, and features.master as 127.0.0.1:50051"
    )


def answers(host: str, port: int) -> bool:
    """Return whether something listens at an address."""
    with suppress(OSError), socket.create_connection((host, port), CONNECT_SECONDS):
        return True
    return False


def address_towards(master: str) -> str:
    """Return the address of this machine on the way to a master, which must answer."""
    try:
        with socket.create_connection(host_and_port(f"//{master}"), CONNECT_SECONDS) as link:
            return link.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"a mooncake_master must answer at features.master={master}, and none does "
            f"({first_line(error)}); start it with the line that `specheads serve-features` prints"
        ) from None
