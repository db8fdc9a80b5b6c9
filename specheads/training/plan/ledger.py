"""The bytes that torch holds at each moment, by who asked for them; nothing is computed."""

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specheads.training.plan.heap import Heap

BASE, HEAD, GRADIENTS, OPTIMIZER = "base weights", "head weights", "gradients", "optimizer state"
HOLES = "freed, and kept by malloc"
UPDATE = "optimizer's own work"
WHO = (
    ("specheads/training/losses/", "loss"),
    ("specheads/heads/", "activations of the head"),
    ("specheads/base/cache", "keys and values"),
    ("specheads/base/paged", "keys and values"),
    ("specheads/base/", "activations of the base"),
    ("specheads/decoding/", "decoding"),
    ("specheads/training/muon", UPDATE),
    ("torch/optim/", UPDATE),
)
"""Parts, by the files that ask for memory: the first of these that is being run decides."""

OTHERS = "backward and others"


class _Held:
    """A storage that is alive."""

    __slots__ = ("block", "bytes", "part", "storage")

    def __init__(self, size: int, part: str, storage: Any, block: tuple[int, int]) -> None:
        self.bytes, self.part, self.storage, self.block = size, part, storage, block


class Ledger(TorchDispatchMode):
    """Runs torch without numbers, and keeps account of what would be in memory.

    Within `open` every tensor is a fake one, of a shape and no content: real code runs, in any
    size. What depends on numbers is given `rows` for what a mask selects, and ones for values.
    """

    def __init__(self, heap: Heap | None = None) -> None:
        super().__init__()
        self._heap = heap
        self.rows: int | None = None
        """How many places a mask has; None is all."""
        self._held: dict[int, _Held] = {}
        self._part = ""
        self._now = self._most = self._slack = 0
        self._at_most: list[_Held] = []
        self._is_new = False

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Make what is run in this block fake."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # whoever looks for a tensor by its address finds none
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(self)
            yield self

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Put down what is asked for meanwhile to one part."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def belongs(self, tensor: Tensor, part: str) -> None:
        """Say whose a tensor is, also in the account of the peak."""
        if held := self._held.get(id(tensor.untyped_storage())):
            held.part = part

    def fresh(self) -> None:
        """Forget the holes that were left, as in a process that holds what is held and no more."""
        if self._heap is not None:
            self._heap = Heap()
            for held in self._held.values():
                held.block = self._heap.take(held.bytes)
        self.peak()

    def peak(self) -> dict[str, int]:
        """Return the bytes of each part when all were the most, and count anew from here."""
        self._settle()
        found: Counter[str] = Counter()
        for held in self._at_most:
            found[held.part] += held.bytes
        if self._slack:
            found[HOLES] = self._slack
        self._most, self._at_most = 0, []
        self._grow(0)
        return dict(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; note what is new in what it returns."""
        del types
        if func is torch.ops.aten.nonzero.default:
            mask = args[0]
            rows = mask.numel() if self.rows is None else min(self.rows, mask.numel())
            out = torch.empty((rows, mask.ndim), dtype=torch.long)
        elif func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        elif torch.is_inference_mode_enabled() and _is_made_of_others(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self._note(one)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._held:
            return
        part = self._part or _who(sys._getframe(2))
        # the key is another storage's as soon as this one is gone
        held = weakref.ref(storage, lambda _: self._forget(key))
        size = storage.nbytes()
        block = self._heap.take(size) if self._heap else (-1, size)
        self._held[key] = _Held(size, part, held, block)
        self._grow(size)

    def _grow(self, size: int) -> None:
        self._now += size
        if (taken := self._taken()) >= self._most:
            self._most, self._is_new = taken, True

    def _taken(self) -> int:
        return self._heap.resident if self._heap else self._now

    def _settle(self) -> None:
        """Take down what is held, where it is more than ever: once before any of it goes."""
        if self._is_new:
            self._at_most, self._is_new = list(self._held.values()), False
            self._slack = self._taken() - self._now

    def _forget(self, key: int) -> None:
        self._settle()
        held = self._held.pop(key)
        self._now -= held.bytes
        if self._heap:
            self._heap.give(held.block)


def _is_made_of_others(func: Any) -> bool:
    """Return whether an operation is a row of others; inference mode alone hands on the whole."""
    return func.namespace == "aten" and func._can_decompose()


def _who(frame: FrameType | None) -> str:
    """Return whose code is being run."""
    found = len(WHO)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        found = next((at for at, (file, _) in enumerate(WHO[:found]) if file in name), found)
        frame = frame.f_back
    return WHO[found][1] if found < len(WHO) else OTHERS
