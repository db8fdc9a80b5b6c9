"""Matrices get a faster memory layout with equal values."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.cpu import weight_layout
from specheads.core.cpu.weight_layout import (
    PackedLinear,
    column_major,
    optimise_for_few_rows,
    pack,
    product,
)

LIBRARIES = {
    "mkl": (torch.backends.mkl.is_available(), weight_layout.MKL),
    "onednn": (torch.backends.mkldnn.is_available(), weight_layout.ONEDNN),
}


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch) -> str:
    """Pack float32 by each library, independent of this CPU."""
    is_here, library = LIBRARIES[request.param]
    if not is_here:
        pytest.skip(f"torch without {request.param}")
    monkeypatch.setattr(weight_layout, "PACKED_BY", {torch.float32: library})
    return library


@pytest.fixture
def layer(library: str) -> nn.Linear:
    assert weight_layout.PACKED_BY[torch.float32] is library
    torch.manual_seed(0)
    return nn.Linear(256, 256)


def test_column_major_weights_are_equal_bit_for_bit():
    torch.manual_seed(0)
    first, last = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
    model = nn.Sequential(first, nn.ReLU(), last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = torch.randn(4, 5)
    expected = model(rows)
    column_major([first, last])
    assert first.weight.stride() == (1, 7)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(rows), expected)


@pytest.mark.parametrize("rows", [1, 3, 64, 300])
def test_a_packed_layer_gives_the_same_products(layer: nn.Linear, rows: int):
    hidden = torch.randn(2, rows, 256)
    with torch.no_grad():
        expected = layer(hidden)
        pack([layer])
        assert isinstance(layer, PackedLinear)
        torch.testing.assert_close(layer(hidden), expected, rtol=1e-5, atol=1e-5)
        turned = hidden.transpose(0, 1)
        torch.testing.assert_close(layer(turned), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_an_outdated_pack_is_not_used(layer: nn.Linear):
    pack([layer])
    rows = torch.randn(4, 256)
    with torch.no_grad():
        layer.weight.mul_(2)
        # with gradients no pack is used at all
        assert torch.equal(layer(rows), F.linear(rows, layer.weight, layer.bias))


def test_a_packed_layer_trains_like_any_other(layer: nn.Linear):
    plain, rows = copy.deepcopy(layer), torch.randn(4, 256, requires_grad=True)
    pack([layer])
    (expected,) = torch.autograd.grad(plain(rows).square().sum(), rows)
    (gradient,) = torch.autograd.grad(layer(rows).square().sum(), rows)
    assert torch.equal(gradient, expected)
    layer(rows).square().sum().backward()
    assert layer.weight.grad is not None


def test_a_borrowed_matrix_uses_the_pack(layer: nn.Linear, monkeypatch):
    pack([layer])
    rows = torch.randn(4, 256)
    borrowed = layer.weight.detach()
    expected = F.linear(rows, borrowed)
    first_rows = borrowed[:100]
    assert torch.equal(product(rows, first_rows), F.linear(rows, first_rows))
    monkeypatch.setattr(F, "linear", None)
    torch.testing.assert_close(product(rows, borrowed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("library")
def test_only_large_matrices_of_dtypes_that_a_library_packs_are_packed(monkeypatch):
    small, large = nn.Linear(8, 8), nn.Linear(256, 256)
    double = nn.Linear(256, 256, dtype=torch.float64)
    optimise_for_few_rows(nn.ModuleList([small, large, double]))
    assert [type(layer) for layer in (small, large, double)] == [nn.Linear, PackedLinear, nn.Linear]
    assert [layer.weight.stride(0) for layer in (small, large, double)] == [1, 256, 1]
    # too many bytes for a second copy
    large = nn.Linear(256, 256)
    monkeypatch.setattr(weight_layout, "MAX_PACKED_BYTES", 1000)
    optimise_for_few_rows(large)
    assert type(large) is nn.Linear
    assert large.weight.stride(0) == 1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_bfloat16_is_packed_by_onednn_and_stays_within_its_rounding(rows: int, monkeypatch):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN without bfloat16 on this processor")
    monkeypatch.setattr(weight_layout, "PACKED_BY", {torch.bfloat16: weight_layout.ONEDNN})
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    hidden = torch.randn(rows, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        optimise_for_few_rows(layer)
        assert isinstance(layer, PackedLinear)
        exact = F.linear(hidden.double(), layer.weight.double(), layer.bias.double())
        torch.testing.assert_close(layer(hidden).double(), exact, rtol=2**-7, atol=2**-9)
        # another dtype than the matrix's gives the error of F.linear
        with pytest.raises(RuntimeError):
            layer(hidden.float())
