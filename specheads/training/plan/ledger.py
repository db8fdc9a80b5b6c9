"""Peak bytes of torch tensors in a step, by part: on a real device or on the meta device."""

import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KEYS = "keys and values"
WHO = (
    ("specheads/training/losses", "loss"),
    ("specheads/training/depth_loss", "loss"),
    ("specheads/heads/", "activations of the head"),
    ("specheads/base/cache", KEYS),
    ("specheads/base/", "activations of the base"),
    ("specheads/decoding/", "decoding"),
    ("torch/optim/", "optimizer's own work"),
    ("specheads/training/optimizers", "optimizer's own work"),
)
"""Parts by file: the first entry that is in the call stack of an allocation."""

OTHERS = "backward and others"


class Ledger(TorchDispatchMode):
    """Tracks the storages that are alive inside the context.

    On the meta device tensors have no content: a mask selects `rows` elements, and values are one.
    """

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self._held: dict[int, _Held] = {}
        self._now = self._most = 0
        self._at_most: list[_Held] = []

    def belongs(self, tensor: Tensor, part: str) -> None:
        """Assign a tensor to a part, also in the peak."""
        if held := self._held.get(_key(tensor)):
            held.part = part

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each part at the peak."""
        found: Counter[str] = Counter()
        for held in self._at_most:
            found[held.part] += held.bytes
        return dict(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record new storages in its result."""
        del types
        given = _stored((args, kwargs))
        is_meta = bool(given) and given[0].is_meta
        if is_meta and func is torch.ops.aten.nonzero.default:
            rows = min(self.rows, given[0].numel())
            out = torch.empty((rows, given[0].ndim), dtype=torch.long, device="meta")
        elif is_meta and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if given[0].is_floating_point() else 1
        else:
            out = func(*args, **(kwargs or {}))
        # views and in-place results share a storage with the arguments
        known = {_key(one) for one in given}
        for one in _stored(out):
            if (key := _key(one)) not in known and key not in self._held:
                self._note(one)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        for key in [key for key, held in self._held.items() if held.storage.expired()]:
            self._now -= self._held.pop(key).bytes
        held = _Held(StorageWeakRef(storage), storage.nbytes(), _who(sys._getframe(2)))
        self._held[_key(tensor)] = held
        self._now += held.bytes
        if self._now > self._most:
            self._most, self._at_most = self._now, list(self._held.values())


class FusedAttention(TorchFunctionMode):
    """Makes attention on the meta device allocate as the fused kernels do.

    Otherwise it would use the math kernel, which stores the whole attention matrix.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function."""
        del types
        is_attention = func is F.scaled_dot_product_attention and args[0].is_meta
        return (_fused if is_attention else func)(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    bias = None
    if attn_mask is not None:
        # kernels add it as a bias
        bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    learns = torch.is_grad_enabled() and query.requires_grad
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]


@dataclass(slots=True)
class _Held:
    """A storage that is alive, or was alive at the peak."""

    storage: StorageWeakRef
    bytes: int
    part: str


def _stored(values: Any) -> list[Tensor]:
    """Return the tensors among some values that have a torch storage."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [one for one in tensors if torch._C._has_storage(one)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _who(frame: FrameType | None) -> str:
    """Return the part of the running code."""
    found = len(WHO)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        found = next((at for at, (file, _) in enumerate(WHO[:found]) if file in name), found)
        frame = frame.f_back
    return WHO[found][1] if found < len(WHO) else OTHERS
