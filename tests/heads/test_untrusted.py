"""Untrusted checkpoints: no code runs, no outside file is read, and no huge memory is allocated."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.heads.checkpoint import read_tensors
from specheads.heads.kinds.eagle3 import IDS
from specheads.heads.load import build_for_base, build_head, load_head, resume_head
from specheads.measure.generation import BaseTexts, GenerationSettings
from specheads.measure.offline import measure_offline, offline_logits
from tests import tiny
from tests.heads import hostile
from tests.heads.golden import GOLDEN, changed

PUBLIC = {
    "medusa_heads": "medusa",
    "mlp_speculator_untied": "mlp_speculator",
    "mlp_speculator_tied_scaled": "mlp_speculator",
    "redrafter_rnn": "redrafter",
    "redrafter_sum": "redrafter",
    "hydra_mlp": "hydra_heads",
    "hydra_prefix_mlp": "hydra_heads",
    "eagle3_chain": "eagle3",
    "eagle3_speculators_ttt": "eagle3",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a small head of ours, to be damaged."""
    head_folder = tmp_path / "head"
    build_head({"kind": "medusa", "depth": 2}, width=8, vocab_size=11).save_pretrained(head_folder)
    (head_folder / "README.md").unlink()
    return head_folder


def settings(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_head(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_pipelines": {"x": {"impl": "model.Head"}}}, "names code in 'custom_pipelines'"),
        ({"_target_": "os.system"}, "names code in '_target_'"),
        ({"kind": "os.system"}, "head kind must be one of"),
        ({"kind": ["medusa"]}, "head kind must be one of"),
        ({"depth": 10_000}, "head.depth must be a whole number, at least 1, at most 64"),
        ({"depth": 10**12}, "at most 64, got 1000000000000"),
        ({"num_layers": 10**9}, "at most 64, got 1000000000"),
        ({"width": 10**6, "vocab_size": 10**6}, "size mismatch for"),
        ({"width": 10**12, "vocab_size": 10**12}, "do not describe a head"),
        ({"width": -8}, "do not describe a head"),
        ({"width": "8"}, "do not describe a head"),
        ({"depth": None}, "Missing key"),
        ({"depth": True, "num_layers": [1]}, "head.depth must be a whole number"),
        ({"kind": "x" * 10_000}, "head kind must be one of .{,200}$"),
    ],
)
def test_hostile_settings_are_refused_in_one_line(folder: Path, changes, message: str):
    settings(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize("nesting", ["nested", "listed"])
def test_code_is_detected_anywhere_in_the_settings(folder: Path, nesting: str):
    hidden = {"_target_": "builtins.exec"}
    settings(folder, rank={"a": hidden} if nesting == "nested" else [[hidden]])
    refused(folder, "names code in '_target_'")


@pytest.mark.parametrize(
    ("case", "setting", "value"),
    [
        ("eagle3_chain", "norm_before_residual", "false"),
        ("eagle3_chain", "rms_norm_eps", float("nan")),
        ("eagle3_speculators_ttt", "norm_before_residual", "true"),
        ("dflash_window", "sliding_window_non_causal", "false"),
        ("dflash_window", "sample_from_anchor", "true"),
        ("dflash_modelopt", "dflash_config", {"causal": "false"}),
        ("mlp_speculator_untied", "scale_input", "false"),
        ("medusa_heads", "medusa_num_layers", float("nan")),
    ],
)
def test_text_in_place_of_a_switch_and_nan_are_refused_by_name(case, setting, value, tmp_path):
    name = next(iter(value)) if isinstance(value, dict) else setting
    changes: Any = {setting: value}
    refused(changed(case, tmp_path, **changes), f"without quotes, and {name} is ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "not readable JSON"),
        (b'{"a":' * 100_000, "not readable JSON"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"\xff\xfe{}", "not readable JSON"),
        (b'{"depth": ' + b"9" * 5000 + b"}", "not readable JSON"),
        (b" " * 2_000_000, "at most 1048576 bytes"),
    ],
)
def test_an_invalid_config_file_is_refused(folder: Path, text: bytes, message: str):
    (folder / "config.json").write_bytes(text)
    refused(folder, message)


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ("medusa_heads", "medusa_num_heads"),
        ("hydra_mlp", "hydra_num_heads"),
        ("mlp_speculator_untied", "n_predict"),
        ("redrafter_rnn", "num_draft_layers"),
    ],
)
def test_public_layouts_have_the_same_limits(case: str, setting: str, tmp_path: Path):
    config: dict[str, Any] = {setting: 10_000}
    refused(changed(case, tmp_path, **config), "at most 64, got")


CLAIM = json.dumps(
    {"x": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}}
).encode()


@pytest.mark.parametrize(
    "content",
    [b"x", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", len(CLAIM)) + CLAIM + bytes(8)],
    ids=["damaged", "long header", "large claim"],
)
def test_a_damaged_file_is_refused(folder: Path, content: bytes):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "must hold complete tensors by name")


class _Shell:
    def __reduce__(self):
        return os.system, ("touch /tmp/specheads-was-here",)


@pytest.mark.parametrize("name", ["model.bin", "medusa_lm_head.pt"])
def test_a_pickle_with_code_is_refused_and_does_not_run(folder: Path, name: str):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({"weight": _Shell()}))
    refused(folder, "must hold complete tensors by name and nothing else")
    torch.save({"weight": _Shell()}, folder / name)
    refused(folder, "it has other objects")
    assert not Path("/tmp/specheads-was-here").exists()


# torch 2.11 warns about any sparse tensor
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "None is not one"),
        ({"x": 3}, "'x' is not one"),
        ({3: torch.zeros(1)}, "3 is not one"),
        ({"x": torch.zeros(1).expand(10**12)}, "'x' is not one"),
        ({"x": torch.zeros(2).to_sparse()}, "'x' is not one"),
        ({"x": torch.zeros(2, device="meta")}, "'x' is not one"),
    ],
)
def test_a_pickle_without_complete_tensors_is_refused(folder: Path, content, message: str):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    refused(folder, message)


def test_a_compressed_archive_is_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**7))
    refused(folder, "unpacks to 10000000 bytes")


def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path):
    outside = tmp_path / "secret.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    refused(folder, "must be in its own folder")
    (folder / "model.safetensors").unlink()
    shutil.copy(outside, folder / "model.safetensors")
    secret = tmp_path / "secret.json"
    (folder / "config.json").rename(secret)
    (folder / "config.json").symlink_to(secret)
    refused(folder, "must be in its own folder")


def test_links_of_the_hub_s_cache_are_followed(folder: Path, tmp_path: Path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", "models--a--b/blobs"
    (tmp_path / blobs).mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        shutil.move(file, tmp_path / blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert load_head(snapshot).depth == 2


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "model-2.safetensors", "x" * 300]
)
def test_an_index_that_names_other_folders_is_refused(folder: Path, name: str):
    index = {"weight_map": {"x": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder.parent / "secret.safetensors").write_bytes(b"x")
    refused(folder, "must name files of its folder")


def test_a_tensor_in_two_files_is_refused(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for shard in ("model-00001-of-00002", "model-00002-of-00002"):
        save_file(tensors, folder / f"{shard}.safetensors")
    refused(folder, "is in two files")


@pytest.mark.parametrize("ids", [[3, 2, 1], [1, 1, 2], [-1, 2, 3], [1, 2, 11]])
def test_an_invalid_draft_vocabulary_is_refused(tmp_path: Path, ids: list[int]):
    head = build_head({"kind": "medusa", "draft_tokens": 3}, width=8, vocab_size=11)
    assert head.draft_ids is not None
    head.draft_ids.copy_(torch.tensor(ids))
    head.save_pretrained(tmp_path)
    refused(tmp_path, "must increase and be below 11")


def test_half_precision_checkpoints_load_in_float32(folder: Path):
    tensors = {name: value.half() for name, value in read_tensors(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    assert {value.dtype for value in load_head(folder).parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def seed_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return hostile.seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_head_loads_or_is_refused_in_one_line(seed_folders, seed: int, tmp_path: Path):
    rng, folder, secret = hostile.Random(seed), tmp_path / "head", tmp_path / "secret"
    shutil.copytree(rng.choice(seed_folders), folder)
    shutil.copy(hostile.weights(seed_folders[0]), secret)
    hostile.spoil(folder, rng, tmp_path / "mark", secret)
    assert hostile.outcome(folder) in ("head", "refused")
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_damaged_heads_run_no_code_and_stay_within_folder_and_memory(tmp_path: Path):
    arguments = [sys.executable, "-m", "tests.heads.hostile", str(tmp_path), "1500", "0"]
    process = subprocess.run(
        arguments, cwd=GOLDEN.parents[1], capture_output=True, text=True, check=True
    )
    counts = json.loads(process.stdout.splitlines()[-1])
    assert set(counts["outcomes"]) == {"head", "refused"}
    assert (counts["strange"], counts["executed"]) == ([], False)
    assert counts["mebibytes"] < 500


@pytest.mark.parametrize("path", ["x" * 300, "~nobodyatall/head", "a/b/c", "a\0b"])
def test_an_invalid_path_of_a_head_is_refused(path: str):
    with pytest.raises(ValueError, match=r"a path must be|must be a folder or a reachable Hub id"):
        load_head(path)


def test_a_head_too_large_for_the_memory_is_refused_before_allocation(base: FrozenBase):
    with pytest.raises(
        ValueError, match=r"must fit in memory, and one with [\d,]+ parameters needs"
    ):
        build_for_base({"kind": "mlp_speculator", "inner_dim": 2**20}, base)
    with pytest.raises(ValueError, match="at most 1,048,576, got"):
        build_for_base({"kind": "mlp_speculator", "inner_dim": 2**62}, base)


# public checkpoints work like our own heads


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    config = tiny.config("llama", num_hidden_layers=7, hidden_size=48, vocab_size=211)
    return FrozenBase(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize("case", PUBLIC)
def test_a_public_checkpoint_is_evaluated_and_trained_like_ours(case: str, base: FrozenBase):
    head = resume_head(GOLDEN / case, base, PUBLIC[case])
    tokens = torch.randint(211, (2, 16), generator=torch.manual_seed(0))
    texts = BaseTexts(tokens[:, :6].tolist(), tokens[:, 6:].tolist())
    measured = measure_offline(base, head, texts, GenerationSettings(max_new_tokens=64))
    assert measured.forwards > 0
    logits = offline_logits(head, base.read(tokens, head.aux_layers), tokens)
    torch.stack([level_logits.square().mean() for level_logits in logits]).sum().backward()
    assert all(value.grad is not None for value in head.parameters())


def test_resuming_a_head_of_another_kind_is_refused(base: FrozenBase):
    with pytest.raises(ValueError, match="is a head of kind redrafter: set head=redrafter"):
        resume_head(GOLDEN / "redrafter_rnn", base, "medusa")


OUTPUTS, STREAMS = {"eagle_config": {IDS: [1, 3, 4]}}, {IDS: [1, 2, 3]}


@pytest.mark.parametrize(
    ("ids", "streams"),
    [
        # SpecForge and SGLang store outputs of layers there; vLLM stores streams at the top level
        (OUTPUTS, (2, 4, 5)),
        ({"eagle_config": {IDS: [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {IDS: [1, 29, 56], "use_aux_hidden_state": True}}, (2, 30, 57)),
        (STREAMS, (1, 2, 3)),
        ({IDS: [0, 4, 8]}, (0, 4, 8)),
        (OUTPUTS | STREAMS, (1, 2, 3)),
    ],
)
def test_layer_ids_have_the_meaning_of_their_project(
    ids: dict, streams: tuple[int, ...], tmp_path: Path
):
    assert load_head(changed("eagle3_chain", tmp_path, drop=IDS, **ids)).aux_layers == streams


@pytest.mark.parametrize("ids", [[2, 4, 5], [0, 3, 4], [4, 6, 8], [3], [2, 30, 57]])
def test_layer_ids_in_eagle_config_that_may_be_inputs_are_refused(tmp_path: Path, ids: list[int]):
    with pytest.raises(InputError, match="can be inputs or outputs; add"):
        load_head(changed("eagle3_chain", tmp_path, drop=IDS, eagle_config={IDS: ids}))
