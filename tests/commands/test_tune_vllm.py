"""`specheads tune engine=vllm` with real vLLM: `make vllm` names its interpreter as VLLM_PYTHON."""

import json
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from specheads.commands._call import checked_settings
from specheads.commands.tune import tune_vllm
from specheads.config.commands import Tune
from specheads.core.errors import InputError
from specheads.core.files import dumps
from specheads.decoding.calibration import Curve
from specheads.decoding.trees.tuned import FILE, Machine
from specheads.export.vllm_head import COST_FILE
from specheads.heads.load import build_for_base
from tests import tuned
from tests.export.trained import BASE, base
from tests.servers import VLLM

DEPTH = 2


@pytest.fixture
def settings(tmp_path) -> Tune:
    build_for_base({"kind": "mlp_speculator", "depth": DEPTH}, base()).save_pretrained(tmp_path)
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    told = ["engine=vllm", f"head={tmp_path}", f"base={BASE}", "base.dtype=float32"]
    return checked_settings(Tune, [*told, "batch_sizes=[1,4]", "contexts=[32]", f"python={python}"])


def test_head_without_a_calibration_is_refused(settings):
    with pytest.raises(InputError, match="has no calibration; run specheads tune"):
        tune_vllm(settings)


@pytest.mark.vllm
def test_more_drafts_and_more_requests_take_longer(settings, tmp_path, monkeypatch):
    for name, value in VLLM.items():
        monkeypatch.setenv(name, value)
    measured = tuned.tuned()
    curves = [Curve(kind="isotonic", probs=[0.5], accepted=[0.5])] * DEPTH
    acceptance = replace(measured.acceptance, curves=curves)
    (tmp_path / FILE).write_text(dumps(replace(measured, acceptance=acceptance)))
    served = tune_vllm(settings)
    cost, found = served.cost, json.loads((tmp_path / COST_FILE).read_text())
    assert found["engine"] == served.engine
    assert served.machine == Machine.of(torch.device("cpu"), torch.float32)
    alone: Any = [cost.seconds(batch, 32, 1, 0) for batch in (1, 4)]
    assert 0 < alone[0] <= alone[1] < cost.seconds(4, 32, 1 + DEPTH, DEPTH)
