"""A base without its layers: its two ends equal those of the whole base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.heads.load import build_for_base
from tests import tiny


def loaded(folder: Path, **choices: Any) -> FrozenBase:
    return FrozenBase.load(folder, dtype="float32", device="cpu", attention="eager", **choices)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *((name, False) for name in ("llama", "granite", "gemma2", "gemma3", "qwen2", "qwen3_moe")),
        *((name, True) for name in ("llama", "granite", "gemma3")),
    ],
)
def test_ends_equal_those_of_the_whole_base(name: str, tied: bool, tmp_path: Path):
    folder = tiny.saved(tmp_path / "base", name, tie_word_embeddings=tied)
    whole, ends = loaded(folder), loaded(folder, ends_only=True)
    tokens = torch.arange(3, 43).view(2, 20)
    read = whole.read(tokens, (0, 3))
    assert read.aux is not None
    first, last = read.aux.chunk(2, -1)
    assert torch.equal(ends.embedded(tokens), first)
    assert torch.equal(ends.final_norm(last), read.hidden)
    logits = ends.projection(read.hidden), whole.projection(read.hidden)
    assert torch.allclose(*logits, rtol=1e-6, atol=1e-6 * logits[0].abs().max().item())
    for fact in ("num_layers", "width", "vocab_size", "max_length", "eos_ids", "dtype"):
        assert getattr(ends, fact) == getattr(whole, fact), fact
    tables = ends.vocab_size * ends.width * (1 if tied else 2)
    assert tables < ends.num_parameters < tables + 3 * ends.width
    made = [build_for_base({"kind": "eagle3", "depth": 2}, base) for base in (ends, whole)]
    assert made[0].aux_layers == made[1].aux_layers
    assert made[0].matches_fingerprint(made[1].base_fingerprint)
    assert made[1].matches_fingerprint(made[0].base_fingerprint)


def test_ends_come_from_any_shard(tmp_path: Path):
    folder = tiny.saved(tmp_path / "base", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    whole, ends = loaded(folder), loaded(folder, ends_only=True)
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.projection.weight, whole.projection.weight)
    assert not any("layers" in name for name, _ in ends.model.named_parameters())


def test_steps_that_need_layers_are_refused(tmp_path: Path):
    folder = tiny.saved(tmp_path / "base")
    ends = loaded(folder, ends_only=True)
    with pytest.raises(InputError, match=r"source=vllm loads no layer of it; run it with"):
        ends.read(torch.arange(4)[None])
    needs: dict[str, Any]
    for needs in ({"adapter": "mine"}, {"compile": True}, {"exact": True}):
        with pytest.raises(InputError, match="takes no adapter, compile or exact; leave them out"):
            FrozenBase.load(folder, ends_only=True, **needs)
