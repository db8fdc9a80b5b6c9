"""Fingerprints differ for fine-tuned bases, and are equal for all loads of the same weights."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.base.fingerprint import base_fingerprint, config_fingerprint
from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.heads.load import build_for_base, load_head
from tests import tiny

REFUSAL = r"a head fits the weights it was trained on: those are [\da-f-]{33}, this base has"


def trainable() -> PreTrainedModel:
    model = deepcopy(tiny.base(dtype=torch.float32).model)
    return model.requires_grad_(True)


def of(model: PreTrainedModel) -> str:
    base = FrozenBase(model)
    return base_fingerprint(model, base.embedding, base.projection.weight)


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    head = build_for_base(
        {"kind": "mlp_speculator", "inner_dim": 8}, tiny.base(dtype=torch.float32)
    )
    head.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def sibling() -> FrozenBase:
    """The base after one step of AdamW at a small rate."""
    model = trainable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.arange(20)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return FrozenBase(model)


@pytest.mark.parametrize("architecture", ["llama", "granite", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_fingerprint_ignores_the_dtype(architecture, dtype):
    # bfloat16 is rounded from float32, as on loading a checkpoint
    float_base = tiny.base(architecture, dtype=torch.float32)
    dtype_base = tiny.base(architecture, dtype=dtype)
    assert of(float_base.model) == of(dtype_base.model)
    assert float_base.fingerprint != FrozenBase(deepcopy(float_base.model).bfloat16()).fingerprint


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"rms_norm_eps": 0.1}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, False),
        ({"hidden_act": "gelu"}, False),
        ({"max_position_embeddings": 64}, False),
        ({"attn_implementation": "eager", "dtype": "bfloat16"}, True),
        ({"name_or_path": "elsewhere", "transformers_version": "9", "eos_token_id": 3}, True),
    ],
)
def test_the_fingerprint_of_a_config_has_what_changes_the_base(change, is_same):
    fingerprint = config_fingerprint(tiny.config(**change))
    assert (fingerprint == config_fingerprint(tiny.config())) == is_same


def test_a_head_accepts_its_base_in_every_dtype_and_after_saving(head_folder, tmp_path):
    tiny.base(dtype=torch.float32).model.save_pretrained(tmp_path / "again")
    for dtype in ("float32", "bfloat16", "float64"):
        base = FrozenBase(AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype))
        assert load_head(head_folder, base).base_fingerprint == of(base.model)


def test_a_fine_tuned_base_is_refused_unless_forced(head_folder, sibling):
    with pytest.raises(ValueError, match=REFUSAL):
        load_head(head_folder, sibling)
    assert load_head(head_folder, sibling, force=True).base_fingerprint != of(sibling.model)


def test_a_merged_adapter_changes_the_fingerprint_but_not_the_tables(head_folder, tmp_path):
    model = trainable()
    before, embedding = of(model), model.get_input_embeddings().weight
    adapter = Adapter(model, target_modules=["q_proj"], rank=2)
    for parameter in adapter.parameters:
        nn.init.normal_(parameter, std=0.02)
    adapter.save(tmp_path / "adapter")
    adapter.remove()
    base = FrozenBase(model)
    assert of(model) == before
    base.merge(tmp_path / "adapter")
    with pytest.raises(ValueError, match=REFUSAL):
        load_head(head_folder, base)
    assert of(model).partition("-")[0] == before.partition("-")[0]
    assert model.get_input_embeddings().weight is embedding
