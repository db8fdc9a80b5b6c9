"""Sources of the base's features: the base in this process, files, or a vLLM server.

Training, validation and the losses know only `FeatureSource`. See docs/scale.md.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load, save
from torch import Tensor

from specheads.base.ends import BaseEnds
from specheads.base.fingerprint import config_fingerprint
from specheads.base.model import FrozenBase
from specheads.config.commands import Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.features import Features
from specheads.core.files import writable_folder, write_atomic
from specheads.data.packing import TokenBatch
from specheads.runs.directory import RunDirectory
from specheads.training.schedule import row_tokens

FETCHED_BATCHES = 2
"""Batches whose features are fetched in advance: one ready, and one in preparation."""


@dataclass(frozen=True, slots=True)
class FeatureLedger:
    """What the requests of a source took since its start."""

    waited_seconds: float
    """Of the training, for features."""
    read_seconds: float
    """Of all threads, to read features."""
    read_bytes: int
    pool_bytes: int
    """Size of the features that are asked for and not used yet."""


class FeatureSource(ABC):
    """Gives the features of batches, without gradients."""

    can_fail: bool = False
    """Whether features may be lost in the middle of a run, as those of servers."""
    halted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run is asked to stop, so that it waits no longer."""

    def begin(self, run: RunDirectory, rank: int) -> None:
        """Take the name of a run, which is open now, and the number of this process in it."""
        del run, rank

    @abstractmethod
    def features(self, batch: TokenBatch) -> Features:
        """Return the features of a batch, on the base's device."""

    def ahead(self, batch: TokenBatch) -> None:
        """Start to fetch the features of a batch that is needed soon. Another thread may call."""
        del batch

    def drop(self) -> None:
        """Forget what was fetched ahead."""
        return

    def ledger(self) -> FeatureLedger | None:
        """Return what its requests took; None if features are computed here."""
        return None

    def close(self) -> None:
        """Release what the source uses outside this process."""
        return


class LocalBase(FeatureSource):
    """The base in this process, whole or sharded."""

    def __init__(self, base: FrozenBase, aux_layers: tuple[int, ...]) -> None:
        self.base, self.aux_layers = base, aux_layers

    def features(self, batch: TokenBatch) -> Features:
        """Return the features of a batch by a forward of the base."""
        return self.base.read(batch.tokens, self.aux_layers, batch.document_ids)


# --- files -------------------------------------------------------------------------------------


class FeatureCache(FeatureSource):
    """Computes the features of each batch once for all runs that share the folder.

    The key of a batch is its tokens and documents. The key of a folder is everything else that
    affects the features: weights, dtype, device type, attention and layers. Features are the same
    bit for bit. A file begins with the hash of the rest; a damaged one is reported and recomputed.
    """

    def __init__(
        self,
        folder: Path,
        base: FrozenBase,
        aux_layers: tuple[int, ...],
        announce: Callable[[str], object],
    ) -> None:
        self.base, self.aux_layers, self.announce = base, aux_layers, announce
        key = [
            base.fingerprint, config_fingerprint(base.model.config), str(base.dtype),
            base.device.type,
            base.config._attn_implementation, list(aux_layers),
        ]  # fmt: skip
        self.folder = folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def features(self, batch: TokenBatch) -> Features:
        """Return the features of a batch, from disk if they are there."""
        key = hashlib.sha256(json.dumps(list(batch.tokens.shape)).encode())
        for tensor in (batch.tokens, batch.document_ids):
            key.update(b"" if tensor is None else tensor.cpu().numpy().tobytes())
        file = self.folder / f"{key.hexdigest()[:32]}.safetensors"
        states = self._read_file(file) if file.is_file() else None
        if states is None:
            features = self.base.read(batch.tokens, self.aux_layers, batch.document_ids)
            states = {"hidden": features.hidden}
            if features.aux is not None:
                states["aux"] = features.aux
            copies = {name: state.detach().cpu().contiguous() for name, state in states.items()}
            content = save(copies)
            write_atomic(file, hashlib.sha256(content).digest() + content)
        states = {name: state.to(self.base.device) for name, state in states.items()}
        return Features(states["hidden"], states.get("aux"), batch.tokens, batch.document_ids)

    def _read_file(self, file: Path) -> dict[str, Tensor] | None:
        content = file.read_bytes()
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() == content[:size]:
            return load(content[size:])
        self.announce(f"{file} is damaged and will be recomputed")
        return None


def feature_cache(
    settings: Train,
    base: FrozenBase,
    aux_layers: tuple[int, ...],
    announce: Callable[[str], object],
) -> FeatureCache:
    """Return the feature cache of a run; refuse one that may exceed its size."""
    phases, features = settings.schedule.phases, settings.features
    if joint := [name for name, phase in phases.items() if phase.joint]:
        raise InputError(
            f"a feature cache needs a frozen base, but phase {joint[0]!r} trains the base; set "
            "features=local"
        )
    lengths = [row_tokens(phase, settings.data, base.max_length) for phase in phases.values()]
    positions = settings.validation.rows * lengths[0] + sum(
        phase.steps * phase.batch_size * length
        for phase, length in zip(phases.values(), lengths, strict=True)
    )
    size = positions * base.width * (1 + len(aux_layers)) * base.dtype.itemsize / 2**30
    if size > features.max_gib:
        raise InputError(
            f"features.max_gib must cover the whole cache: this one takes up to {size:.2f} GiB, "
            f"but features.max_gib={features.max_gib:g}; raise it, or set features=local"
        )
    folder = writable_folder(features.folder or "runs/features")
    return FeatureCache(folder, base, aux_layers, announce)


# --- servers -----------------------------------------------------------------------------------


def features_of(
    states: Float[Tensor, "batch time layer width"],
    layers: Sequence[int],
    aux_layers: Sequence[int],
    base: BaseEnds,
    batch: TokenBatch,
) -> Features:
    """Return the features in a server's states of these layers, of which the last is the base's."""
    columns = [states[:, :, layers.index(layer)] for layer in aux_layers]
    aux = torch.cat(columns, -1) if columns else None
    return Features(base.final_norm(states[:, :, -1]), aux, batch.tokens, batch.document_ids)


def server_token_bytes(layers: Sequence[int], width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a token in a server's file: its states and its id."""
    return len(layers) * width * dtype.itemsize + torch.int64.itemsize


def server_layers(head: Head, base: BaseEnds) -> list[int]:
    """Return the layers whose states a server gives for a head, in vLLM's numbers.

    k is the state after k layers: 0 is the embedding, by which each answer is checked, and
    `num_layers` is the last state before the final norm. A head that leaves its `aux_layers` open
    chooses them.
    """
    head.choose_aux_layers(base.num_layers)
    # vLLM 0.32 fails to give the embedding of a base with MLA
    embedding = () if hasattr(base.config, "kv_lora_rank") else (0,)
    return sorted({*embedding, *head.aux_layers, base.num_layers})
