"""A base is quantised on CUDA by the installed library, or refused before loading."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from specheads.base import loading
from specheads.base.loading import quantisation
from tests import tiny
from tests.base.test_loading import refused
from tests.base.test_model import SHIPPED

CUDA = torch.device("cuda")


def have(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Simulate that only these quantisation libraries are installed."""
    monkeypatch.setattr(
        loading,
        "find_spec",
        lambda name: ModuleSpec(name, None) if name in names else None,
    )


@pytest.mark.parametrize("how", ["8bit", "4bit"])
def test_quantisation_without_cuda_is_refused_before_loading(how, monkeypatch):
    monkeypatch.setattr(loading, "located", lambda _: pytest.fail("it was looked for"))
    told = refused("package:absent_one", quantization=how)
    assert f"a base can be quantised on CUDA only, got quantization={how} on cpu" in told


def test_a_missing_quantisation_library_is_named(monkeypatch):
    have(monkeypatch)
    with pytest.raises(ValueError, match="needs bitsandbytes or torchao, and neither is installed"):
        quantisation("4bit", CUDA, torch.bfloat16)


def test_an_unknown_quantisation_is_refused():
    assert "quantization must be one of none, 8bit, 4bit" in refused(SHIPPED, quantization="2bit")
    assert quantisation("none", torch.device("cpu"), torch.float32) is None


def test_bitsandbytes_is_preferred_and_computes_in_the_dtype_of_the_base(monkeypatch):
    have(monkeypatch, "bitsandbytes", "torchao")
    monkeypatch.setattr(BitsAndBytesConfig, "post_init", lambda _: None)
    four = quantisation("4bit", CUDA, torch.bfloat16)
    assert (four.load_in_4bit, four.load_in_8bit, four.bnb_4bit_quant_type) == (True, False, "nf4")
    assert four.bnb_4bit_compute_dtype is torch.bfloat16
    eight = quantisation("8bit", CUDA, torch.bfloat16)
    assert (eight.load_in_4bit, eight.load_in_8bit) == (False, True)


@pytest.mark.parametrize(("how", "kind"), [("8bit", "Int8"), ("4bit", "Int4")])
def test_torchao_is_used_if_only_it_is_installed(how, kind, monkeypatch):
    have(monkeypatch, "torchao")
    library: Any = ModuleType("torchao.quantization")
    library.Int8WeightOnlyConfig, library.Int4WeightOnlyConfig = lambda: "Int8", lambda: "Int4"
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", library)
    monkeypatch.setattr(TorchAoConfig, "post_init", lambda _: None)
    assert quantisation(how, CUDA, torch.bfloat16).quant_type == kind


def test_quantisation_is_passed_to_transformers_with_the_device(
    monkeypatch,
):
    asked, wanted = {}, SimpleNamespace()
    loaded = AutoModelForCausalLM.from_config(tiny.config())
    monkeypatch.setattr(loaded, "to", lambda _: pytest.fail("a quantised base cannot be moved"))

    def read(_: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
        asked.update(settings)
        return loaded, {"mismatched_keys": [], "missing_keys": [], "unexpected_keys": []}

    monkeypatch.setattr(loading, "quantisation", lambda *_: wanted)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    model, _ = loading.load_model(
        str(SHIPPED),
        revision="main",
        dtype="float32",
        device="cpu",
        attention="sdpa",
        quantization="8bit",
    )
    assert model is loaded
    assert asked["quantization_config"] is wanted
    assert asked["device_map"] == {"": torch.device("cpu")}
