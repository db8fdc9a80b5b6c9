"""The connector that writes hidden states, with a fake vLLM and with real vLLM."""

import fcntl
import os
import runpy
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.commands.serve_features import CONNECTOR, PLUGIN
from specheads.config import data_dir
from tests.export.features_server import features_server

BASE = data_dir("recipes") / "tiny_code" / "base"
NAME = "vllm.distributed.kv_transfer.kv_connector.v1"
BLOCK, BLOCKS, LAYERS, WIDTH = 4, 6, 3, 5


class Own:
    """vLLM's connector as far as ours uses it."""

    layers = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[4, 0, 2])
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=layers))
    _vllm_config = SimpleNamespace(speculative_config=draft)

    def __init__(self, kv_cache: torch.Tensor, rank: int = 0) -> None:
        self._kv_cache, self._block_size, self._is_tp_rank_zero = kv_cache, BLOCK, rank == 0
        self._executor = ThreadPoolExecutor(1)
        self._lock_fds: dict[str, int] = {}
        self._req_futures: dict[str, Any] = {}
        self._req_copy_events: dict[str, Any] = {}
        self.left: list[Any] = []
        self.done: list[str] = []

    def _submit_async_write(self, pending: Any) -> None:
        self.left.append(pending)

    @staticmethod
    def _write_tensors(tensors: Any, event: Any, filename: str, lock: int) -> None:
        event.synchronize()
        save_file(tensors, filename)
        os.close(lock)

    def _on_write_done(self, request: str, job: Any) -> None:
        job.result()
        self.done.append(request)


def extract(kv_cache: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    return kv_cache[slots // BLOCK, :, slots % BLOCK][:count]


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return our connector's class, imported as vLLM imports it."""
    modules = {"ExampleHiddenStatesConnector": Own, "extract_from_kv_cache": extract}
    module = SimpleNamespace(**modules)
    package: Any = ModuleType(NAME)
    package.example_hidden_states_connector = module
    monkeypatch.setitem(sys.modules, NAME, package)
    module = runpy.run_path(str(PLUGIN / f"{CONNECTOR['kv_connector_module_path']}.py"))
    return module[CONNECTOR["kv_connector"]]


def pending(folder: Path, tokens: int) -> Any:
    file = str(folder / "made" / "a.safetensors")
    return SimpleNamespace(
        req_id="a", filename=file, token_ids=torch.arange(tokens), block_ids=[4, 1, 3]
    )


@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_states_of_a_request_are_written_and_its_lock_is_released(tokens, connector, tmp_path):
    cache = torch.randn(BLOCKS, LAYERS, BLOCK, WIDTH)
    expected = torch.cat([cache[block].transpose(0, 1) for block in (4, 1, 3)])[:tokens].clone()
    request, connector_object = pending(tmp_path, tokens), connector(cache)
    connector_object._lock_fds["a"] = os.open(tmp_path / "lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(connector_object._lock_fds["a"], fcntl.LOCK_EX)
    connector_object._submit_async_write(request)
    # vLLM may use the blocks again
    cache.zero_()
    assert connector_object._req_copy_events["a"].query()
    with (tmp_path / "lock").open() as lock:
        # waits until the file is complete
        fcntl.flock(lock, fcntl.LOCK_SH)
        saved = load_file(request.filename)
    connector_object._executor.shutdown()
    assert (connector_object._lock_fds, connector_object.done, connector_object.left) == (
        {},
        ["a"],
        [],
    )
    assert torch.equal(saved["hidden_states"], expected)
    assert torch.equal(saved["token_ids"], request.token_ids)
    assert saved["layer_ids"].tolist() == [0, 2, 4]


def test_other_ranks_write_nothing_and_other_devices_use_vllm_s_own(connector, tmp_path):
    request = pending(tmp_path, 4)
    second_connector = connector(torch.zeros(BLOCKS, LAYERS, BLOCK, WIDTH), rank=1)
    second_connector._submit_async_write(request)
    assert (second_connector.left, second_connector._req_futures, list(tmp_path.iterdir())) == (
        [],
        {},
        [],
    )
    elsewhere = connector(torch.zeros(BLOCKS, LAYERS, BLOCK, WIDTH, device="meta"))
    elsewhere._submit_async_write(request)
    assert elsewhere.left == [request]


def states_of(address: str, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Return the file that a server writes for a prompt, and delete it."""
    body = {"model": str(BASE), "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    reply = httpx2.post(f"{address}/completions", json=body, timeout=None, trust_env=False)
    file = Path(reply.raise_for_status().json()["kv_transfer_params"]["hidden_states_path"])
    lock = file.with_name(f"{file.name}.lock")
    with lock.open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_SH)
        saved = load_file(file)
    file.unlink()
    lock.unlink()
    return saved


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        (["head=eagle3", "tensor_parallel=1"], {}),
        (["head=dflash", "tensor_parallel=2"], {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    ],
)
def test_real_server_gives_the_states_of_transformers(overrides, environment, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    text = tokenizer(Path(__file__).read_text()).input_ids
    # ragged prompts of 1 to 351 tokens; each text is longer than a block
    prompts = [text[50 * at : 100 * at + 1] for at in range(8)]
    log, folder = tmp_path / "log", tmp_path / "shared"
    with features_server(BASE, folder, log, *overrides, **environment) as (address, server):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: states_of(address, prompt), prompts * 2))
        assert list(folder.iterdir()) == []
        server.send_signal(signal.SIGTERM)
        # the code of the server, and no code of ours
        assert server.wait() == 0, log.read_text()[-3000:]
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    ends: list[torch.Tensor] = []
    # transformers' own last state is after the final norm
    model.model.norm.register_forward_pre_hook(lambda _, inputs: ends.append(inputs[0]))
    for prompt, answer in zip(prompts * 2, answers, strict=True):
        with torch.inference_mode():
            out = model(torch.tensor([prompt]), output_hidden_states=True)
        states = [*out.hidden_states[:-1], ends[-1]]
        expected = torch.stack([states[layer][0] for layer in answer["layer_ids"].tolist()], dim=1)
        assert answer["token_ids"].tolist() == prompt
        assert answer["layer_ids"].tolist()[-1] == len(states) - 1
        error = (answer["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2e-5
        assert torch.equal(answer["hidden_states"][:, 0], states[0][0])
