"""Medusa: the numbers of its project, and its three kinds of vocabulary projection."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features
from specheads.heads.load import fit, load_head
from tests import tiny
from tests.heads.golden import GOLDEN, close, expected


def legacy(folder: Path) -> Path:
    """Write the stored heads without projections, like the project's legacy class."""
    tensors = load_file(GOLDEN / "medusa_heads" / "medusa_lm_head.safetensors")
    blocks = {name: value for name, value in tensors.items() if ".linear." in name}
    torch.save(blocks, folder / "medusa_lm_head.pt")
    config = (GOLDEN / "medusa_heads" / "config.json").read_text()
    (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_a_public_medusa_gives_its_project_s_logits(dtype: torch.dtype, tolerance: float):
    head = load_head(GOLDEN / "medusa_heads").to(dtype)
    golden = expected("medusa_heads")
    hidden = golden["in.hidden"].to(dtype)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long)
    states = head.states(Features(hidden), tokens)
    for level, state in enumerate(states):
        wanted = golden["out64.logits"][level].to(dtype)
        close(head.logits(state, level), wanted, tolerance)


def test_legacy_heads_use_the_base_s_projection(tmp_path: Path):
    head = load_head(legacy(tmp_path))
    golden = expected("medusa_heads")
    tensors = load_file(GOLDEN / "medusa_heads" / "medusa_lm_head.safetensors")
    features = Features(golden["in.hidden"])
    tokens = torch.zeros(golden["in.hidden"].shape[:2], dtype=torch.long)
    for level in range(head.depth):
        # with the stored projection of a head, that head gives its stored logits
        head.bind(torch.zeros(211, 48), tensors[f"{level}.1.weight"])
        state = list(head.states(features, tokens))[level]
        wanted = golden["out64.logits"][level].float()
        torch.testing.assert_close(head.logits(state, level), wanted, rtol=2e-5, atol=2e-5)
    assert head.vocab_size == 211


def test_legacy_heads_get_the_vocabulary_size_from_their_base(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    base = tiny.base("llama", dtype=torch.float32)
    tensors = {"0.0.linear.weight": torch.ones(32, 32), "0.0.linear.bias": torch.ones(32)}
    save_file(tensors, tmp_path / "theirs" / "medusa_lm_head.safetensors")
    (tmp_path / "theirs" / "config.json").write_text('{"medusa_num_heads": 1}')
    head = load_head(tmp_path / "theirs", base)
    assert head.vocab_size == base.vocab_size
    head.save_pretrained(tmp_path / "ours")
    again = load_head(tmp_path / "ours", base)
    assert torch.equal(again.projection(0)[0], base.projection.weight)
    with pytest.raises(ValueError, match="of vocab_size 61, this base has 67"):
        fit(again, _another_base())


def _another_base() -> FrozenBase:
    config = tiny.config("llama", vocab_size=67)
    return FrozenBase(AutoModelForCausalLM.from_config(config), name="another")
