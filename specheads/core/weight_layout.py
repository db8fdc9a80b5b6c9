"""How weights lie in memory: values stay bit for bit, products of a few rows get faster.

See docs/caches.md and recipes/LOG.md for what was measured.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.opaque import opaque

PACKED_FOR = 256
"""Rows that packs are made for: the best of 1, 16 and 256 from 1 to 512 rows."""

LEAST, MOST = 2**15, 2**32
"""Elements from which on a matrix is worth a pack, and bytes of matrices from which on a second
copy of them would be too much."""


class _Pack(NamedTuple):
    """A matrix as MKL wants it; `source` keeps the address from becoming another matrix's."""

    matrix: Tensor
    source: Tensor
    version: int


def _packs_pay() -> bool:
    file = Path("/proc/cpuinfo")
    intel = file.is_file() and "GenuineIntel" in file.read_text(encoding="utf-8", errors="replace")
    return intel and torch.backends.mkl.is_available()


PACKS_PAY = _packs_pay()
"""Whether MKL is here, on a processor of the make that its packs were measured on."""

_PACKS: dict[int, _Pack] = {}
"""By the address of the matrix, which whoever borrows it has too."""


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by its matrix's pack while nobody learns."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of each row with the matrix, and the bias."""
        return product(input, self.weight, self.bias)


def for_few_rows(module: nn.Module) -> Callable[[], None]:
    """Store the matrices of all linear layers on a CPU so that products of a few rows are fast.

    A decode step multiplies a few rows, one a tree node, by each matrix. The libraries behind
    torch are slow at that when the matrix lies row by row, as checkpoints have it. Large ones of
    float32 on Intel processors get a second copy, packed by MKL; all others are stored column by
    column. Shapes, values and tying are as before, so nothing else has to know.

    Parameters that are trained should stay as they are: a pack that is older than its matrix is
    not used, unless the matrix was written to through `.data`. Returns what undoes it all.
    """
    layers = [
        layer
        for layer in module.modules()
        # what is shared out among processes lies as they need it
        if isinstance(layer, nn.Linear)
        and type(layer.weight) is nn.Parameter
        and layer.weight.device.type == "cpu"
    ]
    packed = [layer for layer in layers if _packable(layer)] if PACKS_PAY else []
    if sum(weight.nbytes for weight in {layer.weight for layer in packed}) > MOST:
        packed = []
    undo = pack(packed), column_major([layer for layer in layers if layer not in packed])

    def undo_both() -> None:
        for one in undo:
            one()

    return undo_both


def column_major(layers: list[nn.Linear]) -> Callable[[], None]:
    """Store matrices column by column; return what stores them as they were stored before."""
    # a tied matrix is one parameter in several places, and is turned once
    before = {layer.weight: layer.weight.stride() for layer in layers}
    for weight in before:
        weight.data = weight.data.t().contiguous().t()

    def undo() -> None:
        for weight, stride in before.items():
            if weight.stride() != stride:
                own = weight.data.new_empty_strided(weight.shape, stride)
                weight.data = own.copy_(weight.data)

    return undo


def pack(layers: list[nn.Linear]) -> Callable[[], None]:
    """Give matrices of float32 on a CPU a second, packed copy; return what takes it away."""
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    weights = {layer.weight for layer in layers}
    for weight in weights:
        source, address = weight.detach(), weight.data_ptr()
        if _pack_of(weight) is None:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(source, PACKED_FOR)
            _PACKS[address] = _Pack(packed, source, weight._version)
            weakref.finalize(weight, _PACKS.pop, address, None)
    for layer in plain:
        layer.__class__ = PackedLinear

    def undo() -> None:
        for weight in weights:
            _PACKS.pop(weight.data_ptr(), None)
        for layer in plain:
            layer.__class__ = nn.Linear

    return undo


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows @ weight.T + bias`, by the matrix's pack where it has one and nobody learns.

    Rows are (..., width), the matrix (out, width).
    """
    learns = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    if learns or weight.device.type != "cpu":
        return F.linear(rows, weight, bias)
    if torch.compiler.is_compiling():
        # an address is looked up when the graph runs
        return (_opaque if PACKS_PAY else F.linear)(rows, weight, bias)
    return _product(rows, weight, bias)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    pack = _pack_of(weight)
    if pack is None or rows.dtype != torch.float32 or not rows.numel():
        return F.linear(rows, weight, bias)
    count = rows.numel() // rows.shape[-1]
    return torch.ops.mkl._mkl_linear(rows, pack.matrix, pack.source, bias, count)


def _shaped(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


_opaque = opaque("product", _product, _shaped)


def _pack_of(weight: Tensor) -> _Pack | None:
    """Return the pack of this very matrix, as it is now."""
    pack = _PACKS.get(weight.data_ptr())
    if pack is None or pack.version != weight._version:
        return None
    # part of it, or its transpose, begins at the same address
    here = weight.shape, weight.stride()
    return pack if here == (pack.source.shape, pack.source.stride()) else None


def _packable(layer: nn.Linear) -> bool:
    # a subclass computes in a way of its own
    return type(layer) in (nn.Linear, PackedLinear) and (
        layer.weight.dtype == torch.float32
        and layer.weight.numel() >= LEAST
        and not layer.weight.is_inference()
    )
