"""`specheads tune engine=vllm` with real vLLM: `make vllm` names its interpreter as VLLM_PYTHON."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.commands._call import checked_settings
from specheads.commands.tune import tune_vllm
from specheads.config.commands import Tune
from specheads.core.errors import InputError
from specheads.core.files import dumps, to_json
from specheads.decoding.calibration import Curve
from specheads.decoding.trees.tuned import FILE, Machine
from specheads.export.vllm_adapter import COST_FILE
from specheads.heads.load import build_for_base
from tests import tuned
from tests.export.trained import BASE, base
from tests.servers import VLLM

DEPTH = 2


@pytest.fixture
def settings(tmp_path) -> Tune:
    build_for_base({"kind": "mlp_speculator", "depth": DEPTH}, base()).save_pretrained(tmp_path)
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    overrides = ["engine=vllm", f"head={tmp_path}", f"base={BASE}", "base.dtype=float32"]
    return checked_settings(
        Tune, [*overrides, "batch_sizes=[1,4]", "contexts=[32]", f"python={python}"]
    )


def test_head_without_a_calibration_is_refused(settings):
    with pytest.raises(InputError, match="has no calibration; run specheads tune"):
        tune_vllm(settings)


def calibrate(folder: Path) -> None:
    """Write a tuned.json with a calibration."""
    measured = tuned.tuned()
    curves = [Curve(probs=[0.5], accepted=[0.5])] * DEPTH
    acceptance = replace(measured.acceptance, curves=curves)
    (folder / FILE).write_text(dumps(replace(measured, acceptance=acceptance)))


def test_noisy_times_of_a_server_are_measured_again_and_never_stored(
    settings, tmp_path, monkeypatch, capsys
):
    """The second of two engines is quiet; then none is."""
    calibrate(tmp_path)
    generator, noises, cost = random.Random(0), [2.0, 0.01, 2.0, 2.0], tuned.tuned().cost

    def serve(command: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        noise, job, steps = noises.pop(0), json.loads(input), []
        shapes = product(job["batch_sizes"], job["contexts"], range(1 + DEPTH), range(20))
        for batch, context, depth, step in shapes:
            load = batch, context + 64 * step
            verify = cost.seconds(*load, 1 + depth, 0)
            seconds = verify, cost.seconds(*load, 1 + depth, depth) - verify
            noisy = [value * generator.lognormvariate(0, noise) for value in seconds]
            steps.append((*load, depth, *noisy))
        machine = to_json(Machine.of(torch.device("cpu"), torch.float32))
        answer = {"engine": "vLLM", "machine": machine, "steps": steps, "ragged": []}
        return subprocess.CompletedProcess(command, 0, json.dumps(answer))

    monkeypatch.setattr(subprocess, "run", serve)
    served = tune_vllm(settings)
    assert served.cost_error["median"] < 0.25
    assert json.loads((tmp_path / COST_FILE).read_text())["cost_error"] == served.cost_error
    assert capsys.readouterr().err.count("starting vLLM with") == 2
    (tmp_path / COST_FILE).unlink()
    with pytest.raises(InputError, match=r"got \d+% over \d+ points, twice; close other work"):
        tune_vllm(settings)
    assert not (tmp_path / COST_FILE).exists()


@pytest.mark.vllm
def test_more_drafts_and_more_requests_take_longer(settings, tmp_path, monkeypatch):
    for name, value in VLLM.items():
        monkeypatch.setenv(name, value)
    # tune has a default for it
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    calibrate(tmp_path)
    served = tune_vllm(settings)
    cost, stored = served.cost, json.loads((tmp_path / COST_FILE).read_text())
    assert stored["engine"] == served.engine
    assert served.machine == Machine.of(torch.device("cpu"), torch.float32)
    alone: Any = [cost.seconds(batch, 32, 1, 0) for batch in (1, 4)]
    assert 0 < alone[0] <= alone[1] < cost.seconds(4, 32, 1 + DEPTH, DEPTH)
