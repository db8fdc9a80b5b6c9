"""A base whose layers are at a server: its ends equal those of the whole base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specheads.base.ends import ServedBase, absolute_folder
from specheads.base.model import FrozenBase
from specheads.export.layouts._shared import layer_settings
from specheads.heads.load import build_for_base
from tests import tiny


def load_both(folder: Path) -> tuple[FrozenBase, ServedBase]:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": "eager"}
    return FrozenBase.load(folder, **settings), ServedBase.load(folder, **settings)


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        *((name, False) for name in ("llama", "granite", "gemma2", "gemma3", "qwen2", "qwen3_moe")),
        *((name, True) for name in ("llama", "granite", "gemma3")),
    ],
)
def test_ends_equal_those_of_the_whole_base(architecture: str, tied: bool, tmp_path: Path):
    base, served = load_both(tiny.saved(tmp_path / "base", architecture, tie_word_embeddings=tied))
    tokens = torch.arange(3, 43).view(2, 20)
    features = base.read(tokens, (0, 3))
    assert features.aux is not None
    first, last = features.aux.chunk(2, -1)
    assert torch.equal(served.embed(tokens), first)
    assert torch.equal(served.final_norm(last), features.hidden)
    logits = served.projection(features.hidden), base.projection(features.hidden)
    assert torch.allclose(*logits, rtol=1e-6, atol=1e-6 * logits[0].abs().max().item())
    for fact in ("num_layers", "width", "vocab_size", "max_length", "eos_ids", "dtype"):
        assert getattr(served, fact) == getattr(base, fact), fact
    table_size = served.vocab_size * served.width * (1 if tied else 2)
    assert table_size < served.num_parameters < table_size + 3 * served.width
    heads = [build_for_base({"kind": "eagle3", "depth": 2}, model) for model in (served, base)]
    assert heads[0].aux_layers == heads[1].aux_layers
    assert heads[0].matches_fingerprint(heads[1].base_fingerprint)
    assert heads[1].matches_fingerprint(heads[0].base_fingerprint)


def test_ends_come_from_any_shard(tmp_path: Path):
    folder = tiny.saved(tmp_path / "base", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    base, served = load_both(folder)
    assert torch.equal(served.embedding, base.embedding)
    assert torch.equal(served.projection.weight, base.projection.weight)
    assert not any("layers" in name for name, _ in served.model.named_parameters())


@pytest.mark.parametrize(
    ("source", "location"),
    [
        ("models/tiny", "{folder}/models/tiny"),
        ("./models/tiny/", "{folder}/models/tiny"),
        ("models/../models/tiny", "{folder}/models/tiny"),
        ("{folder}/models/tiny", "{folder}/models/tiny"),
        ("link", "{folder}/models/tiny"),
        ("acme/tiny", "acme/tiny"),
        ("", ""),
    ],
)
def test_a_folder_is_named_absolutely_and_a_hub_id_is_not(
    source: str, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path.resolve()
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "models" / "tiny")
    monkeypatch.chdir(folder)
    assert absolute_folder(source.format(folder=folder)) == location.format(folder=folder)


@pytest.mark.parametrize("original", [8, 24, 64, 127, 128])
def test_a_longrope_head_is_exported_with_the_length_that_engines_serve(original: int):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": original,
    }
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    base = tiny.own_base("llama", rope_parameters=rope)
    head = build_for_base({"kind": "eagle3", "depth": 2}, base)
    assert base.max_length == original
    assert layer_settings(head, base)["max_position_embeddings"] == 128
