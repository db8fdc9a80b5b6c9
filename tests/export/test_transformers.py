"""transformers' own drafting with DFlash and MTP, and a base's copy with a trained MTP module."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation import candidate_generator

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.export.layouts import engine_module
from specheads.export.layouts._shared import VLLM_SERVER
from specheads.export.write import RECORD, CheckText, export_head
from specheads.heads.load import build_for_base, load_head, resume_head
from specheads.measure.offline import guess_ranks
from tests import tiny
from tests.export.trained import train_head

NEW_TOKENS = 40
DEPTH = 3
SHAPE = {"attention_heads": 4, "key_value_heads": 2, "head_dim": 8, "inner_dim": 48}
MELLUM: dict[str, Any] = {
    "mlp_layer_types": ["dense"] * 3,
    "num_mtp_layers": 1,
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["dense"],
}
pytestmark = pytest.mark.skipif(
    not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"),
    reason="transformers before 5.23 drafts neither with DFlash nor with MTP",
)


def check_texts(base: FrozenBase) -> list[CheckText]:
    """Return prompts and the base's text, with tokens for a last draft beyond the limit."""
    prompts, limit = tiny.prompts(), NEW_TOKENS + DEPTH + 1
    out = generate(base, None, prompts, max_new_tokens=limit, stop_at_eos=False)
    return list(zip(prompts, out.tokens, strict=True))


def accepted_counts(
    base: FrozenBase, head: Head, prompt: list[int], text: list[int], depth: int
) -> Any:
    """Return the numbers of tokens accepted in the steps of a chain."""
    ranks, counts, position = guess_ranks(base, head, prompt, text, width=1), [], 0
    while position + 1 < NEW_TOKENS:
        num_right = int((ranks[position, :depth] == 0).cumprod(0).sum())
        counts.append(min(num_right, NEW_TOKENS - position - 2))
        position += counts[-1] + 1
    return counts


@pytest.fixture
def decode_with_counts(monkeypatch) -> Callable[..., Any]:
    """Return a function that decodes with transformers, and gives tokens and accepted counts."""

    def decode(model: Any, prompt: list[int], kind: str, **options) -> Any:
        steps: list[int] = []
        drafter = getattr(candidate_generator, kind)
        with monkeypatch.context() as patch:
            patch.setattr(
                drafter, "update_candidate_strategy", lambda *args: steps.append(int(args[3]))
            )
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, **options,
            )  # fmt: skip
        # the first step reads the prompt
        return out[0, len(prompt) :].tolist(), steps[1:]

    return decode


def train_on_half(head: Head, base: FrozenBase, texts: list[CheckText]) -> Head:
    """Train a head on half of each text, so that some of its drafts are accepted."""
    tokens = torch.tensor([(prompt + text)[:40] for prompt, text in texts])
    return train_head(head.double(), base, tokens, 30, learning_rate=1e-2)


def test_transformers_drafts_with_an_exported_dflash_head_as_we_do(tmp_path, decode_with_counts):
    folder = tiny.saved(tmp_path / "base")
    base = FrozenBase.load(folder, dtype="float64", device="cpu")
    texts = check_texts(base)
    torch.manual_seed(0)
    settings = {"kind": "dflash", "depth": DEPTH, "num_layers": 2, "mask_token": 7, **SHAPE}
    head = train_on_half(build_for_base(settings, base), base, texts)
    lines, parity = export_head(head, base, "transformers", tmp_path / "out", texts)
    assert parity.largest_difference < 1e-5
    assert "assistant_model" in lines[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assistant, info = AutoModel.from_pretrained(
        tmp_path / "out", dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values())
    options = {"assistant_model": assistant, "speculation_type": "dflash"}
    counts = []
    for prompt, text in texts:
        tokens, steps = decode_with_counts(
            model, prompt, "DFlashTokenCandidateGenerator", **options
        )
        assert tokens == text[:NEW_TOKENS]
        assert steps == accepted_counts(base, head, prompt, text, DEPTH)
        counts += steps
    assert {0, DEPTH} <= set(counts)


def add_module(folder: Path, head: Head, dtype: torch.dtype) -> None:
    """Store a head in a base's folder as its MTP module, by the names of Mellum and Qwen3-Next."""
    tensors = tiny.module(head.to(dtype), "mtp.", column=2)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        file = folder / "model.safetensors"
        save_file(load_file(file) | tensors, file, {"format": "pt", "made": "by hand"})
        return
    save_file(tensors, folder / "model-mtp.safetensors", {"format": "pt"})
    index_json = json.loads(index.read_text())
    index_json["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    index.write_text(json.dumps(index_json))


def based(folder: Path, dtype: torch.dtype, shard: str = "1GB") -> FrozenBase:
    """Save a Mellum of dense layers with a random MTP module, and load it."""
    settings = tiny.RECIPES["llama"].settings | MELLUM
    tiny.RECIPES["mellum"] = tiny.Recipe(transformers.MellumConfig, settings, seed=2)
    tiny.saved(folder, "mellum")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=shard)
    base = FrozenBase.load(folder, dtype="float64", device="cpu")
    torch.manual_seed(0)
    settings = {"kind": "mtp", "qk_norm": True, "rope_theta": 500_000.0, **SHAPE}
    add_module(folder, build_for_base(settings, base), dtype)
    return base


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize(("dtype", "shard"), [(torch.bfloat16, "1GB"), (torch.float32, "100KB")])
def test_a_trained_module_is_written_back_into_a_copy_of_its_base(
    dtype, shard, tmp_path, decode_with_counts
):
    folder, out = tmp_path / "base", tmp_path / "out"
    base = based(folder, dtype, shard)
    (folder / "chat").mkdir()
    (folder / "chat" / "tool.jinja").write_text("{{ 1 }}")
    before, texts = read_weights(folder), check_texts(base)
    head = train_on_half(resume_head(folder, base, "mtp"), base, texts)
    lines, parity = export_head(head, base, "base", out, texts)
    assert parity.largest_difference < 1e-5
    assert lines[0].startswith(f"{VLLM_SERVER} {out} ")

    # only the module differs, and the base's own files are untouched
    after = read_weights(out)
    assert before.keys() == after.keys() == read_weights(folder).keys()
    for name, value in before.items():
        assert torch.equal(value, read_weights(folder)[name])
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]) != name.startswith("mtp."), name
    for file in (file for file in folder.rglob("*") if file.is_file()):
        copy = out / file.relative_to(folder)
        if file.suffix != ".safetensors":
            assert copy.read_bytes() == file.read_bytes()
        else:
            with safe_open(file, "pt") as old, safe_open(copy, "pt") as new:
                assert old.metadata() == new.metadata()
    assert {file.name for file in out.iterdir()} - {file.name for file in folder.iterdir()} == {
        RECORD
    }

    # the copy gives the trained module back, bit for bit in the dtype of the file
    reloaded = load_head(out).state_dict()
    for name, value in head.state_dict().items():
        assert torch.equal(value.to(dtype), reloaded[name].to(dtype)), name

    # transformers decodes with it as with the base, and drafts one token per module
    drafter = load_head(out, base)
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    counts = []
    for prompt, text in texts:
        alone = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        assert alone[0, len(prompt) :].tolist() == text[:NEW_TOKENS]
        tokens, steps = decode_with_counts(model, prompt, "MTPCandidateGenerator", use_mtp=True)
        assert tokens == text[:NEW_TOKENS]
        assert steps == accepted_counts(base, drafter, prompt, text, depth=1)
        counts += steps
    assert {0, 1} == set(counts)


def test_a_copy_needs_a_base_with_a_module_of_the_head_s_architecture(tmp_path):
    folder, out = tmp_path / "base", tmp_path / "out"
    base = based(folder, torch.float32)
    tiny.saved(tmp_path / "plain", "mellum")
    plain = FrozenBase.load(tmp_path / "plain", dtype="float32", device="cpu")
    prompts = tiny.prompts()
    texts = list(zip(prompts, [[*range(8)]] * len(prompts), strict=True))
    head = load_head(folder, base)
    misfit = build_for_base({"kind": "mtp", "rope_theta": 500_000.0, **SHAPE}, base)

    def refusal(head: Head, base: FrozenBase) -> str:
        with pytest.raises(InputError) as error:
            export_head(head, base, "base", out, texts)
        assert not out.exists()
        return str(error.value)

    assert "plain has no MTP module; transformers drops it" in refusal(head, plain)
    assert refusal(misfit, base).endswith(
        f"the module in {folder} has qk_norm=True, the head has False; engines that can: vllm"
    )
    base.adapter = "lora"
    assert "an adapter is merged into the base" in refusal(head, base)
    base.adapter = ""
    # a copy would hold a file from elsewhere
    (tmp_path / "secret").write_text("x")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    assert "must be in its own folder" in refusal(head, base)


def test_a_base_in_the_cache_of_the_hub_is_copied_without_its_links(tmp_path, monkeypatch):
    folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    base = based(folder, torch.float32, "100KB")
    texts = check_texts(base)[:1]
    head = load_head(folder, base)
    blobs.mkdir()
    for file in [*folder.iterdir()]:
        file.symlink_to(file.rename(blobs / file.name))
    base.location = "ada/base"
    monkeypatch.setattr(engine_module("base"), "snapshot_download", lambda *_, **__: folder)
    export_head(head, base, "base", tmp_path / "out", texts)
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert read_weights(folder).keys() == read_weights(tmp_path / "out").keys()


@pytest.mark.parametrize(
    ("kind", "engine"), [("dflash", "transformers"), ("dflash", "sglang"), ("dspark", "sglang")]
)
def test_a_block_head_needs_a_base_with_a_plain_embedding(kind, engine, tmp_path):
    base = tiny.base("gemma3")
    head = build_for_base({"kind": kind, "depth": 2, "num_layers": 1}, base)
    with pytest.raises(InputError, match=r"embeds tokens by Gemma3TextScaled.*: llama_cpp, specu"):
        export_head(head, base, engine, tmp_path / "out", [])
