"""What the frozen base says of each batch, kept on disk, so that a second training need not ask.

See docs/train.md.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config import FeatureCache as Settings
from specheads.config import Train
from specheads.core.errors import InputError
from specheads.core.features import Features
from specheads.core.files import write_atomic
from specheads.core.paths import writable_folder
from specheads.data.packing import TokenBatch
from specheads.training.schedule import row_tokens

GIB = 2**30


class FeatureCache:
    """Reads batches with a frozen base, each of them once for all runs that share the folder.

    A batch is known by its tokens and documents, and a folder by what else decides the features:
    weights, precision, kind of device and attention, and the layers read. So the same features come
    back, bit for bit. A file appears whole or not at all; a damaged one is told and made anew.
    """

    def __init__(
        self,
        folder: Path,
        base: FrozenBase,
        aux_layers: tuple[int, ...],
        tell: Callable[[str], object],
    ) -> None:
        self.base, self.aux_layers, self.tell = base, aux_layers, tell
        decisive = [
            base.fingerprint, str(base.dtype), base.device.type,
            base.config._attn_implementation, list(aux_layers),
        ]  # fmt: skip
        self.folder = folder / hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]

    def read(self, batch: TokenBatch) -> Features:
        """Return the features of a batch, from disk where they are there."""
        file = self.folder / f"{_name(batch)}.safetensors"
        found = self._load(file) if file.is_file() else None
        if found is None:
            features = self.base.read(batch.tokens, self.aux_layers, batch.document_ids)
            found = {"hidden": features.hidden}
            if features.aux is not None:
                found["aux"] = features.aux
            kept = {name: value.detach().cpu().contiguous() for name, value in found.items()}
            write_atomic(file, _seal(save(kept)))
        here = {name: value.to(self.base.device) for name, value in found.items()}
        return Features(here["hidden"], here.get("aux"), batch.tokens, batch.document_ids)

    def _load(self, file: Path) -> dict[str, Tensor] | None:
        content = file.read_bytes()
        try:
            if _seal(content[_SEAL:]) == content:
                return load(content[_SEAL:])
        except SafetensorError:
            pass
        self.tell(f"{file} is damaged and is made anew")
        return None


_SEAL = hashlib.sha256().digest_size


def _seal(content: bytes) -> bytes:
    """Put the hash of a file's content before it."""
    return hashlib.sha256(content).digest() + content


def _name(batch: TokenBatch) -> str:
    digest = hashlib.sha256(json.dumps(list(batch.tokens.shape)).encode())
    for part in (batch.tokens, batch.document_ids):
        digest.update(b"" if part is None else part.cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def feature_cache(
    settings: Train,
    base: FrozenBase,
    aux_layers: tuple[int, ...],
    tell: Callable[[str], object],
) -> FeatureCache | None:
    """Return the cache that settings ask for, None without one; it may grow as large as confirmed.

    Raises:
        ValueError: It would be larger than was confirmed or than the disk has room for, or a phase
            trains the base, which then says something else in each step.
    """
    wanted: Settings = settings.feature_cache
    if not wanted.gib:
        return None
    phases = settings.schedule.phases
    if joint := [name for name, phase in phases.items() if phase.joint]:
        raise InputError(
            f"a feature cache keeps what a frozen base says, and phase {joint[0]!r} trains the "
            "base; set feature_cache.gib=0"
        )
    size = cache_bytes(settings, base, len(aux_layers))
    folder = writable_folder(wanted.folder)
    if size > wanted.gib * GIB:
        raise InputError(
            f"a feature cache must be confirmed at its size: this one takes up to {size / GIB:.2f} "
            f"GiB, and feature_cache.gib={wanted.gib:g}; raise it, or set it to 0"
        )
    cache = FeatureCache(folder, base, aux_layers, tell)
    # taken for this run's own: a second training on the same text needs no more room
    there = sum(file.stat().st_size for file in cache.folder.glob("*.safetensors"))
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    if size - there > (free := shutil.disk_usage(nearest).free):
        raise InputError(
            f"a feature cache needs room on its disk: this one takes up to {size / GIB:.2f} GiB, "
            f"and {folder} has {free / GIB:.2f} free; set another feature_cache.folder, or "
            "feature_cache.gib=0"
        )
    return cache


def cache_bytes(settings: Train, base: FrozenBase, num_aux: int) -> int:
    """Return what the features of all rows of a run take."""
    phases = settings.schedule.phases.values()
    data, context = settings.data, base.max_length
    rows = [(phase.steps * phase.batch_size, row_tokens(phase, data, context)) for phase in phases]
    rows.append((settings.validation.rows, rows[0][1]))
    positions = sum(count * length for count, length in rows)
    return positions * base.width * (1 + num_aux) * base.dtype.itemsize
