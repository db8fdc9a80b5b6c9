"""Memory layout of weights for fast products of a few rows; the values do not change.

See docs/tree_verification.md and recipes/LOG.md for what was measured.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.kernels import opaque
from specheads.core.machine import computes_bfloat16, processor_name

PACKED_FOR = 256
"""Number of rows that packs are optimised for: the best of 1, 16 and 256 for 1 to 512 rows."""
MIN_PACKED_ELEMENTS, MAX_PACKED_BYTES = 2**15, 2**32
"""Fewest elements of a matrix that is packed, and most bytes of matrices to store twice."""
MKL, ONEDNN = "mkl", "onednn"
"""Libraries of torch that pack a matrix and multiply by the pack."""


class _Pack(NamedTuple):
    """A packed matrix; `source` keeps the original alive, so its address is not reused."""

    library: str
    matrix: Tensor
    source: Tensor
    version: int


def _pack_matrix(library: str, matrix: Tensor) -> Tensor:
    if library == MKL:
        return torch.ops.mkl._mkl_reorder_linear_weight(matrix, PACKED_FOR)
    return torch.ops.mkldnn._reorder_linear_weight(matrix, PACKED_FOR)


def _packing_libraries() -> dict[torch.dtype, str]:
    libraries = dict[torch.dtype, str]()
    if "Intel" in processor_name() and torch.backends.mkl.is_available():
        libraries[torch.float32] = MKL
    if torch.backends.mkldnn.is_available():
        if "AMD" in processor_name():
            libraries[torch.float32] = ONEDNN
        if computes_bfloat16():
            libraries[torch.bfloat16] = ONEDNN
    return libraries


PACKED_BY = _packing_libraries()
"""Library that packs matrices of each dtype, on CPUs where measurements show a gain."""
_PACKS: dict[int, _Pack] = {}
"""By the address of the matrix, which heads that borrow it share."""


class PackedLinear(nn.Linear):
    """A linear layer that uses the pack of its matrix when no gradients are needed."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the matrix, plus the bias."""
        return product(input, self.weight, self.bias)


def optimise_for_few_rows(module: nn.Module) -> None:
    """Change the layout of all linear layers on a CPU so that products of a few rows are fast.

    Large matrices get a second, packed copy (`PACKED_BY`): by MKL in float32 on Intel CPUs, by
    oneDNN in float32 on AMD CPUs and in bfloat16 where the CPU computes it. All others become
    column-major. Shapes, values and tied weights stay the same. Do not use this for trained
    parameters: a pack is outdated unseen if its matrix is changed through `.data`.
    """
    layers = [
        layer
        for layer in module.modules()
        # sharded weights keep their layout
        if isinstance(layer, nn.Linear)
        and type(layer.weight) is nn.Parameter
        and layer.weight.device.type == "cpu"
    ]
    packed = [layer for layer in layers if _can_pack(layer)]
    if sum(weight.nbytes for weight in {layer.weight for layer in packed}) > MAX_PACKED_BYTES:
        packed = []
    pack(packed)
    column_major([layer for layer in layers if layer not in packed])


def column_major(layers: list[nn.Linear]) -> None:
    """Make matrices column-major."""
    # a tied matrix is one parameter in several layers
    for weight in {layer.weight for layer in layers}:
        weight.data = weight.data.t().contiguous().t()


def pack(layers: list[nn.Linear]) -> None:
    """Add a packed copy of each matrix of `PACKED_BY`."""
    for weight in {layer.weight for layer in layers}:
        source, address = weight.detach(), weight.data_ptr()
        library = PACKED_BY[weight.dtype]
        if _pack_of(weight) is None:
            _PACKS[address] = _Pack(library, _pack_matrix(library, source), source, weight._version)
            weakref.finalize(weight, _PACKS.pop, address, None)
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.__class__ = PackedLinear


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows @ weight.T + bias`, with the matrix's pack if no gradients are needed.

    Rows are (..., width), the matrix (out, width).
    """
    needs_gradients = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    if needs_gradients or weight.device.type != "cpu":
        return F.linear(rows, weight, bias)
    if torch.compiler.is_compiling():
        # the operator looks up the address when the graph runs
        return (_opaque if weight.dtype in PACKED_BY else F.linear)(rows, weight, bias)
    return _product(rows, weight, bias)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    pack = _pack_of(weight)
    if pack is None or rows.dtype != weight.dtype or not rows.numel():
        return F.linear(rows, weight, bias)
    if pack.library == MKL:
        count = rows.numel() // rows.shape[-1]
        return torch.ops.mkl._mkl_linear(rows, pack.matrix, pack.source, bias, count)
    return torch.ops.mkldnn._linear_pointwise(rows, pack.matrix, bias, "none", [], "")


def _empty_product(rows: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


_opaque = opaque("product", _product, _empty_product)


def _pack_of(weight: Tensor) -> _Pack | None:
    """Return the up-to-date pack of this matrix."""
    pack = _PACKS.get(weight.data_ptr())
    if pack is None or pack.version != weight._version:
        return None
    # a slice or the transpose starts at the same address
    layout = weight.shape, weight.stride()
    return pack if layout == (pack.source.shape, pack.source.stride()) else None


def _can_pack(layer: nn.Linear) -> bool:
    # a subclass may compute something else
    return type(layer) in (nn.Linear, PackedLinear) and (
        layer.weight.dtype in PACKED_BY
        and layer.weight.numel() >= MIN_PACKED_ELEMENTS
        and not layer.weight.is_inference()
    )
