"""MTP: numbers of other projects, modules of bases, and training states that equal drafts."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.decoding.generate import generate
from specheads.heads.kinds import mtp
from specheads.heads.load import load_head, resume_head
from specheads.training.depth_loss import weights_of_depths
from tests import tiny
from tests.heads.golden import GOLDEN, close, expected
from tests.heads.test_heads import make

CASES = ["mtp_speculators", "mtp_mimo", "mtp_deepseek"]
FIRST = 5
"""Positions that the first of two drafts has seen."""

QWEN3_NEXT = {
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}


def loaded(folder: Path) -> mtp.Head:
    head = load_head(folder)
    assert isinstance(head, mtp.Head)
    return head


def case(name: str) -> tuple[mtp.Head, dict[str, Tensor]]:
    head, golden = loaded(GOLDEN / name), expected(name)
    head.double().bind(golden["in.embedding"], golden["in.projection"])
    return head, golden


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", CASES)
def test_a_public_module_drafts_like_its_project_s_layer(name: str):
    """Draft twice from one memory: after the first positions, and after all."""
    head, golden = case(name)
    hidden, tokens = golden["in.hidden"], golden["in.tokens"]
    memory = head.memory(2, capacity=32)
    for step, (start, end) in enumerate(itertools.pairwise((0, FIRST, hidden.shape[1]))):
        new_features, following = Features(hidden[:, start:end]), tokens[:, start + 1 : end + 1]
        count = torch.full((2,), end - start)
        logits, state = head.begin(Committed(new_features, following, count), memory)
        decoding = golden[f"out.drafted.{step}"]
        for level, reference in enumerate(golden[f"out.draft_logits.{step}"].unbind(1)):
            close(logits[:, 0], reference)
            assert torch.equal(logits.argmax(-1)[:, 0], decoding[:, level])
            node = decoding[:, level : level + 1]
            logits, state = head.extend(state, node, torch.zeros_like(node))
    assert golden["out.drafted.0"].shape[1] == head.depth == 3


@pytest.mark.usefixtures("in_float64")
def test_the_first_training_round_equals_speculators():
    head, golden = case("mtp_speculators")
    state = next(head.states(Features(golden["in.hidden"]), golden["in.tokens"][:, :-1]))
    reference = golden["out.logits"]
    assert reference.shape[1] == 9
    close(head.logits(state, 0)[:, : reference.shape[1]], reference)


def test_decay_equals_fastmtp_s_level_weights_up_to_scale():
    reference = expected("mtp_speculators")["out.step_weights"]
    result = torch.tensor(weights_of_depths(3, 0.6), dtype=reference.dtype)
    close(result / result.sum(), reference)


def edited(
    name: str,
    folder: Path,
    rename: Callable[[str], str] = str,
    extra_tensors: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Copy a checkpoint with other names and more tensors; return its tensors."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(key): value for key, value in tensors.items()} | (extra_tensors or {})
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_a_module_with_qwen3_next_s_names_is_read(tmp_path: Path):
    def rename(name: str) -> str:
        suffix = name.removeprefix("mtp_layers.0.")
        module = suffix.removesuffix(".weight")
        return (
            f"mtp.{QWEN3_NEXT[module]}.weight" if module in QWEN3_NEXT else f"mtp.layers.0.{suffix}"
        )

    assert "mtp.layers.0.mlp.up_proj.weight" in edited("mtp_speculators", tmp_path, rename)
    config = json.loads((GOLDEN / "mtp_speculators" / "config.json").read_text())
    inner = config["transformer_layer_config"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner}))
    result, reference = loaded(tmp_path), loaded(GOLDEN / "mtp_speculators")
    assert result.config == reference.config
    for name, value in reference.state_dict().items():
        assert torch.equal(value, result.state_dict()[name]), name


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.2.mlp.experts.0.up_proj.weight", "Unexpected key"),
        ("model.layers.2.mlp.shared_experts.up_proj.weight", "Unexpected key"),
        ("model.layers.2.self_attn.kv_a_proj_with_mqa.weight", "Unexpected key"),
        ("model.layers.3.eh_proj.weight", r"has 2: model\.layers\.2\., model\.layers\.3\.;"),
        ("model.layers.2.input_layernorm.bias", "Unexpected key"),
        (
            "model.layers.2.self_attn.q_proj.weight",
            "size mismatch for layer.mtp_block.self_attn.q_proj",
        ),
    ],
)
def test_unsupported_modules_are_refused_in_one_line(tensor: str, message: str, tmp_path: Path):
    edited("mtp_deepseek", tmp_path, extra_tensors={tensor: torch.zeros(64, 32)})
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(only 'silu'\)"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"num_attention_heads": 0}, "do not describe a head: ZeroDivisionError"),
    ],
)
def test_unsupported_settings_are_refused(change: dict, message: str, tmp_path: Path):
    edited("mtp_mimo", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    config.pop("head_dim")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


def test_a_base_and_its_mtp_head_load_from_one_folder(tmp_path: Path):
    """The base ignores the module, and `init=` loads it."""
    folder = tiny.saved(tmp_path)
    base = FrozenBase.load(folder, dtype="float64", device="cpu")
    shape = {"attention_heads": 4, "key_value_heads": 2, "head_dim": 8, "inner_dim": 48}
    suffix = make({"kind": "mtp", "hidden_first": True, **shape}, base).float()
    module = tiny.module(suffix, "model.mtp_layers.0.", column=1)
    save_file(load_file(folder / "model.safetensors") | module, folder / "model.safetensors")
    again = FrozenBase.load(folder, dtype="float64", device="cpu")
    head = resume_head(folder, again, "mtp")
    for name, value in suffix.state_dict().items():
        assert torch.equal(value, head.state_dict()[name]), name
    decoding = generate(again, head.double().eval(), tiny.prompts(), max_new_tokens=12)
    assert decoding.tokens == generate(base, None, tiny.prompts(), max_new_tokens=12).tokens
