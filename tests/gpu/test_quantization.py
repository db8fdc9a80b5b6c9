"""A base in 8 or 4 bits, quantised by bitsandbytes."""

from importlib.util import find_spec

import pytest
import torch

from specheads.base.loading import quantisation
from specheads.base.model import FrozenBase
from specheads.config import data_dir
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.load import build_for
from tests import tiny

pytestmark = pytest.mark.gpu

SHIPPED = data_dir("recipes") / "tiny_code" / "base"


@pytest.fixture
def library(device: torch.device) -> None:
    if device.type != "cuda" or not find_spec("bitsandbytes"):
        pytest.skip("needs CUDA and bitsandbytes")


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.usefixtures("library")
def test_a_quantised_base_is_smaller_and_mostly_chooses_the_same_tokens(
    bits: str, device: torch.device
) -> None:
    plain = FrozenBase.load(SHIPPED, dtype="bfloat16", device=str(device))
    small = FrozenBase.load(SHIPPED, dtype="bfloat16", device=str(device), quantization=bits)
    assert small.model.get_memory_footprint() < plain.model.get_memory_footprint()
    tokens = torch.arange(2, 60, device=device)[None]
    ours, theirs = (base.model(tokens).logits.argmax(-1) for base in (small, plain))
    assert (ours == theirs).float().mean() > 0.5
    assert small.fingerprint != plain.fingerprint


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.usefixtures("library")
def test_a_head_drafts_for_a_quantised_base(bits: str, device: torch.device) -> None:
    base = FrozenBase.load(SHIPPED, dtype="bfloat16", device=str(device), quantization=bits)
    head = build_for({"kind": "mlp_speculator", "depth": 3}, base).to(base.dtype).eval()
    out = generate(base, head, [[11, 300, 42, 7]], max_new_tokens=12, tree=policies.chain(3))
    assert len(out.tokens[0]) == 12


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_quantisation_is_refused_where_the_device_cannot_compute_it(
    bits: str, device: torch.device
) -> None:
    del device
    with pytest.raises(ValueError, match="needs CUDA and bitsandbytes"):
        quantisation(bits, tiny.CPU, torch.float32)
