"""`specheads serve-features`: the printed command, refusals, and the started process."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from specheads.commands._call import call
from specheads.commands.serve_features import PLUGIN
from specheads.config import compose, data_dir
from tests import tiny

BASE = data_dir("recipes") / "tiny_code" / "base"
LAYERS = 6
SERVER = "vllm.entrypoints.openai.api_server"


def options(line: str) -> dict[str, str]:
    """Return the options of a printed command by name."""
    path, _, *words = shlex.split(line)
    assert path == f"PYTHONPATH={PLUGIN}"
    assert words[:2] == ["-m", SERVER]
    return dict(zip(words[2::2], words[3::2], strict=True))


def printed_lines(capsys: Any, *overrides: str) -> list[str]:
    call("serve-features", [f"base={BASE}", *overrides])
    output = capsys.readouterr()
    # the arguments that the training needs
    overrides = tuple(shlex.split(output.err.splitlines()[-1].removeprefix("train with ")))
    assert overrides[0] == "features=vllm"
    compose.settings_of("train", ["recipe=smoke", *overrides])
    return output.out.splitlines()


def printed(capsys: Any, *overrides: str) -> list[dict[str, str]]:
    return [options(line) for line in printed_lines(capsys, *overrides)]


@pytest.mark.parametrize(
    ("head", "layers"),
    [
        *(([f"head={kind}"], [0, LAYERS]) for kind in ("medusa", "mlp_speculator", "redrafter")),
        *(([f"head={kind}"], [0, LAYERS]) for kind in ("hydra_heads", "mtp")),
        (["head=eagle3"], [0, 1, 3, 5, LAYERS]),
        (["head=eagle_gru"], [0, 1, 3, 5, LAYERS]),
        (["head=eagle3", "head.parallel=true", "head.mask_token=1"], [0, 1, 3, 5, LAYERS]),
        (["head=eagle3", "head.aux_layers=[0,2,6]"], [0, 2, LAYERS]),
        (["head=dflash", "head.aux_layers=[4,1]"], [0, 1, 4, LAYERS]),
        (["head=dspark"], list(range(LAYERS + 1))),
    ],
)
def test_command_names_the_layers_of_the_head(head: list[str], layers: list[int], capsys: Any):
    (command,) = printed(capsys, *head)
    extraction = json.loads(command["--speculative-config"])
    assert extraction["draft_model_config"] == {
        "hf_config": {"eagle_aux_hidden_state_layer_ids": layers}
    }


def test_base_with_mla_is_not_asked_for_its_embedding(tmp_path: Path, capsys: Any):
    # vLLM 0.32 ends at the first request for it
    config = DeepseekV3Config(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, vocab_size=61,
        num_attention_heads=4, num_key_value_heads=4, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    (command,) = printed(capsys, f"base={tmp_path}", "head=eagle3", "head.aux_layers=[1,2]")
    assert '"eagle_aux_hidden_state_layer_ids": [1, 2, 3]' in command["--speculative-config"]


def test_command_follows_the_settings_of_the_training(tmp_path: Path, capsys: Any):
    base = tiny.saved(tmp_path / "a base")
    commands = printed(
        capsys,
        *("recipe=smoke", f"base={base}", "base.dtype=float16", f"folder={tmp_path}/shared"),
        *("features.url=[http://a:1/v1,http://b:2/v1]", "tensor_parallel=4"),
        "schedule.phases.corpus.sequence_length=100",
        "options=--gpu-memory-utilization '0.8'",
    )
    addresses = [(command["--host"], command["--port"]) for command in commands]
    assert addresses == [("a", "1"), ("b", "2")]
    (first, _) = commands
    assert first["--model"] == str(base)
    assert first["--dtype"] == "float16"
    assert first["--tensor-parallel-size"] == "4"
    # the longest row of all phases, and a token that is written
    assert first["--max-model-len"] == "101"
    assert first["--gpu-memory-utilization"] == "0.8"
    transfer = json.loads(first["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == f"{tmp_path}/shared"
    # rows may fill the context, which a written token does not extend
    (command,) = printed(capsys, "url=http://c:3", f"base={base}")
    assert command["--max-model-len"] == "128"
    assert command["--port"] == "3"


def test_mooncake_prints_the_master_and_a_pool_of_each_server(capsys: Any):
    master, first, second = printed_lines(
        capsys,
        *("features.transport=mooncake", "features.master=a:50051", "features.max_gib=0.5"),
        *("features.url=[http://a:1/v1,http://b:2/v1]", "python=/env/python"),
    )
    assert shlex.split(master)[:4] == ["/env/python", "-m", "mooncake.cli", "--rpc_port=50051"]
    for line, host in ((first, "a"), (second, "b")):
        transfer = json.loads(options(line)["--kv-transfer-config"])
        assert (PLUGIN / f"{transfer['kv_connector_module_path']}.py").is_file()
        store = transfer["kv_connector_extra_config"]["mooncake"]
        assert store["master_server_address"] == "a:50051"
        assert (store["local_hostname"], store["global_segment_size"]) == (host, 2**29)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["base.dtype=float64"], "in float32, bfloat16 or float16"),
        (["base.adapter=x"], "got base.adapter=x; merge it with peft"),
        (["url=127.0.0.1:8000"], "an address with a host and a port"),
        (["url=http://a:many"], "an address with a host and a port"),
        (["folder=/dev/null/x"], "a folder to write to is needed"),
        (["options='"], "fix the quotes"),
        (["run=true"], "needs vLLM in the environment of "),
        (["run=true", "python=/no/python"], "'/no/python'; check its name"),
        (["run=true", "features.url=[http://a:1,http://b:2]"], "got 2 addresses; add url=ADDRESS"),
        (["tensor_parallel=0"], "at least 1"),
        (["features.transport=mooncake", "features.master=a"], "a host and a port, got 'a'"),
        (["head.aux_layers=[9]", "head=dflash"], "reads the base after 9 layers"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    overrides: list[str], message: str, refusal: Any
):
    assert message in refusal("serve-features", f"base={BASE}", *overrides)


def test_started_server_gets_the_signals_and_gives_the_exit_code(tmp_path: Path):
    server = tmp_path / "python"
    server.write_text(
        "#!/bin/bash\n"
        '[ "$1" = -c ] && exit 0\n'
        "trap 'exit 7' TERM\n"
        f'echo "$PYTHONPATH" > {tmp_path}/path\n'
        "while true; do sleep 0.01; done\n"
    )
    server.chmod(0o755)
    words = [f"base={BASE}", "run=true", f"python={server}", f"folder={tmp_path}/shared"]
    command = [sys.executable, "-m", "specheads", "serve-features", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "path").is_file():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 7
    assert errors.startswith(f"{server} -m {SERVER} ")
    assert (tmp_path / "path").read_text().split(":")[0].strip() == str(PLUGIN)
