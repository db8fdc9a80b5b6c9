"""How weights lie in memory: values stay bit for bit, products of a few rows get faster.

See docs/tree_verification.md and recipes/LOG.md for what was measured.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.machine import computes_bfloat16, processor
from specheads.core.opaque import opaque

PACKED_FOR = 256
"""Rows that packs are made for: the best of 1, 16 and 256 from 1 to 512 rows."""

LEAST, MOST = 2**15, 2**32
"""Elements from which on a matrix is worth a pack, and bytes of matrices from which on a second
copy of them would be too much."""


# no NamedTuple: torch 2.11 cannot compile one that holds functions while tests check its types
@dataclass(frozen=True, slots=True)
class Library:
    """How a library packs a matrix, and multiplies by (pack, matrix, rows, bias)."""

    pack: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class _Pack(NamedTuple):
    """A packed matrix; `source` keeps the address from becoming another matrix's."""

    library: Library
    matrix: Tensor
    source: Tensor
    version: int


def _multiply_by_mkl(pack: Tensor, matrix: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    count = rows.numel() // rows.shape[-1]
    return torch.ops.mkl._mkl_linear(rows, pack, matrix, bias, count)


def _multiply_by_onednn(pack: Tensor, matrix: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    del matrix
    return torch.ops.mkldnn._linear_pointwise(rows, pack, bias, "none", [], "")


MKL = Library(
    lambda matrix: torch.ops.mkl._mkl_reorder_linear_weight(matrix, PACKED_FOR), _multiply_by_mkl
)
ONEDNN = Library(
    lambda matrix: torch.ops.mkldnn._reorder_linear_weight(matrix, PACKED_FOR), _multiply_by_onednn
)


def _libraries() -> dict[torch.dtype, Library]:
    found = dict[torch.dtype, Library]()
    if "Intel" in processor() and torch.backends.mkl.is_available():
        found[torch.float32] = MKL
    if torch.backends.mkldnn.is_available():
        if "AMD" in processor():
            found[torch.float32] = ONEDNN
        if computes_bfloat16():
            found[torch.bfloat16] = ONEDNN
    return found


PACKED_BY = _libraries()
"""By dtype what packs its matrices, on processors of the makes where that was measured to pay."""

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
    torch are slow at that when the matrix lies row by row, as checkpoints have it. Large ones get
    a second copy where a library packs them well (`PACKED_BY`): by MKL in float32 on Intel's
    processors, by oneDNN in float32 on AMD's and in bfloat16 where the processor computes it. All
    others are stored column by column. Shapes, values and tying are as before, so nothing else has
    to know.

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
    packed = [layer for layer in layers if _packable(layer)]
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
    """Give matrices of `PACKED_BY` a second, packed copy; return what takes it away."""
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    weights = {layer.weight for layer in layers}
    for weight in weights:
        source, address = weight.detach(), weight.data_ptr()
        library = PACKED_BY[weight.dtype]
        if _pack_of(weight) is None:
            packed = library.pack(source)
            _PACKS[address] = _Pack(library, packed, source, weight._version)
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
        return (_opaque if weight.dtype in PACKED_BY else F.linear)(rows, weight, bias)
    return _product(rows, weight, bias)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    pack = _pack_of(weight)
    if pack is None or rows.dtype != weight.dtype or not rows.numel():
        return F.linear(rows, weight, bias)
    return pack.library.multiply(pack.matrix, pack.source, rows, bias)


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
        layer.weight.dtype in PACKED_BY
        and layer.weight.numel() >= LEAST
        and not layer.weight.is_inference()
    )
