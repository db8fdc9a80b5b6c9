"""Training with a sharded base equals training with a whole base."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.tensor import DTensor

from specheads.config.shared import BaseSettings
from specheads.core.errors import InputError
from specheads.heads.load import _fingerprint
from specheads.runs.trackers import read_metrics
from specheads.training.processes import TIMEOUT, accelerator_of_environment, load_base
from tests import tiny
from tests.slow import slow_except
from tests.training.in_processes import SHARED_OUT, forked, joined
from tests.training.test_processes import ENVIRONMENT, REPOSITORY
from tests.training.test_ranks import assert_same_rows, each, same_losses, stopped_at

CONFIGS = sorted((REPOSITORY / "configs" / "accelerate").glob("*.yaml"))


def test_two_processes_with_sharded_base_have_the_losses_of_one(tmp_path: Path):
    same_losses(tmp_path, (1, 1), (2, 2, "fsdp2"), of=["eagle3"], steps=3)


def known_again(sharding: str) -> None:
    shared_out, whole_base = joined(sharding)[1], tiny.base("llama")
    assert shared_out.sharding
    assert any(type(value) is DTensor for value in shared_out.model.parameters())
    assert shared_out.fingerprint == whole_base.fingerprint
    assert _fingerprint(shared_out) == _fingerprint(whole_base)
    assert shared_out.num_parameters == whole_base.num_parameters


@pytest.mark.parametrize("sharding", slow_except(["tensor"], ["fsdp2", "tensor"]))
def test_sharded_base_has_the_same_outputs(sharding: str):
    assert forked(2, known_again, sharding) == [0, 0]


def wait_as_long_as_the_run(sharding: str) -> None:
    shared_out = joined(sharding)[1].sharding
    assert shared_out
    assert shared_out.mesh.size() == 2
    backend: Any = shared_out.mesh.get_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout == TIMEOUT


@pytest.mark.parametrize("sharding", ["replicas", "tensor"])
def test_groups_of_a_sharded_base_have_the_timeout_of_the_run(sharding: str):
    assert forked(4, wait_as_long_as_the_run, sharding) == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", "tensor"])
def test_fifty_steps_have_the_same_loss_with_any_sharding(sharding: str, tmp_path: Path):
    """Six rows per step: four processes have unequal shares."""
    same_losses(tmp_path, (1, 1), (2, 1, sharding), (4, 1, sharding), (2, 2, sharding), steps=50)


@pytest.mark.slow
def test_each_group_of_processes_has_a_base(tmp_path: Path):
    same_losses(tmp_path, (1, 1), (4, 1, "replicas"), steps=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, ""), (2, "fsdp2")), ((2, "fsdp2"), (1, "")), ((2, "fsdp2"), (2, ""))],
    ids=lambda run: f"{run[0]}{run[1]}",
)
def test_run_resumes_with_another_sharding(before, after, tmp_path):
    of = ["eagle3", "mlp_speculator"]
    reference_folder, resumed_folder = tmp_path / "whole", tmp_path / "parts"
    settings = {"steps": 12, "choices": {"checkpoint_every": 6}}
    assert forked(1, each, of, reference_folder, settings) == [0]
    (count, sharding), (later, later_sharding) = before, after
    for kind in of:
        stopped = settings | {"shared_out": sharding}
        assert forked(count, stopped_at, 6, resumed_folder / kind, kind, stopped) == [1] * count
    assert (
        forked(later, each, of, resumed_folder, settings | {"shared_out": later_sharding})
        == [0] * later
    )
    for kind in of:
        assert_same_rows(resumed_folder / kind, reference_folder / kind, 12)
        weights, expected_weights = (
            torch.load(folder / kind / "head-0.pt") for folder in (resumed_folder, reference_folder)
        )
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"FSDP_VERSION": "1"}, r"FSDP2 \(fsdp_version=2\)"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tensor parallelism"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}, "groups of 4 of 6 processes"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "0"}, "dp_shard_size must be at least 1"),
    ],
)
def test_invalid_sharding_is_refused_before_loading(variables, refused, monkeypatch):
    joined = Accelerator(cpu=True)
    for name, value in (SHARED_OUT["fsdp2"] | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Accelerator, "num_processes", 6)
    with pytest.raises(InputError, match=refused):
        load_base(BaseSettings(model="nowhere"), joined)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "without DeepSpeed and Megatron"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision=fp16; start from"),
    ],
)
def test_unsupported_configuration_is_refused_with_remedy(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        accelerator_of_environment()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_configs_are_valid(file: Path):
    config: Any = load_config_from_file(str(file))
    sizes = config.parallelism_config.values()
    grouped = torch.tensor([1, *sizes]).prod().item()
    assert config.num_processes % grouped == 0
    assert config.num_processes % config.num_machines == 0


@cache
def launched(folder: Path, name: str, *choices: str) -> subprocess.CompletedProcess[str]:
    """Start two processes with one of our configurations."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--quiet"),
            *("--config_file", f"configs/accelerate/{name}.yaml"),
            *("--num_processes", "2", "--mixed_precision", "no", *choices),
            *("train.py", "recipe=smoke", "~schedule.phases.distilled", "log_every=1"),
            # one process has three, the other two
            *("validation.rows=5", "validation.every=2", f"run_dir={folder / name}"),
        ],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "choices"), [("fsdp2", ()), ("tensor_parallel", ("--parallelism_config_tp_size", "2"))]
)
def test_launcher_starts_processes_with_a_sharded_base(name, choices, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "launched"
    for config, options in (("cpu_2", ()), (name, choices)):
        process = launched(folder, config, *options)
        assert process.returncode == 0, process.stderr
    assert "a sharded base does not decode" in process.stdout
    rows, expected_rows = (
        read_metrics(folder / config / "metrics.jsonl") for config in (name, "cpu_2")
    )
    assert len(rows) == 6
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4, 6]
    for row, expected in zip(rows, expected_rows, strict=True):
        for name_of in row.keys() & {"loss", "validation/loss"}:
            assert row[name_of] == pytest.approx(expected[name_of], rel=1e-4)
    assert (folder / name / "head" / "model.safetensors").is_file()
