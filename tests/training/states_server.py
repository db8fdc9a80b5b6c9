"""A server of the tests that gives hidden states as vLLM does, with the same files and locks.

`main` runs one in its own process: FOLDER_OF_BASE SHARED_FOLDER PORT LAYER LAYER ...
"""

import fcntl
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specheads.base.model import FrozenBase
from tests.servers import Listener

BASE_LOCK = threading.Lock()
"""Held while a base computes: servers of one test share it."""


class StatesServer:
    """Serves `/v1/models` and `/v1/completions` in a thread; tests change its attributes.

    Each file appears after the reply, and its lock is held until then. As vLLM does, the server
    deletes nothing and writes the file of a client that is gone.
    """

    def __init__(self, base: FrozenBase, folder: Path, layers: list[int], port: int = 0) -> None:
        self.base, self.folder, self.layers, self.port = base, folder, layers, port
        self.name, self.context, self.layer_ids = "base", base.max_length, True
        self.place = "hidden_states_path"
        """Key of a reply for the name of the file."""
        self.change: Callable[[Tensor], Tensor] = lambda states: states
        """Changes the states [token, layer, width]."""
        self.faults: list[str] = []
        """Faults of the next requests: status_CODE, dropped, stalled, absent, cut, late, or removed
        (with the whole folder)."""
        self.requests: list[list[int]] = []
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Listen, again on the same port after `stop`."""
        methods = {
            "get": lambda handler: handler.reply(200, self.models()),
            "post": lambda handler, body: self.answer(handler, body),
        }
        self.http = Listener(self.port, **methods)
        self.port = self.http.server_port

    def models(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "max_model_len": self.context}
        return {"object": "list", "data": [model]}

    def stop(self) -> None:
        self.http.stop()

    def answer(self, handler: Any, body: dict[str, Any]) -> None:
        with BASE_LOCK:
            fault = self.faults.pop(0) if self.faults else ""
            self.requests.append(body["prompt"])
            tokens = torch.tensor([body["prompt"]])
            features = self.base.read(tokens, tuple(self.layers))
            assert features.aux is not None
            next_token = int(self.base.projection(features.hidden[:, -1]).argmax())
        if fault.startswith("status_"):
            message = f"EngineDeadError {handler.headers['Authorization']}"
            handler.reply(int(fault.removeprefix("status_")), {"error": {"message": message}})
            return
        if body["model"] != self.name:
            handler.reply(404, {"error": {"message": f"no model {body['model']}"}})
            return
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            handler.reply(400, {"error": {"message": "the prompt is too long"}})
            return
        states = self.change(features.aux[0].unflatten(-1, (len(self.layers), -1)))
        tensors = {"hidden_states": states.contiguous(), "token_ids": tokens[0]}
        reply = partial(self._reply, handler, body, next_token, fault)
        self.send(f"cmpl-{handler.headers['X-Request-Id']}-0-0123abcd", tensors, reply, fault)

    def send(
        self,
        request: str,
        tensors: dict[str, Tensor],
        reply: Callable[[dict[str, Any]], None],
        fault: str,
    ) -> None:
        """Reply where the tensors of a request will be, and write them."""
        file = self.folder / f"{request}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        with Path(f"{file}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if fault == "stalled":
                time.sleep(3)
            reply({self.place: str(file)})
            time.sleep(0.5 if fault == "late" else 0)
            if self.layer_ids:
                tensors["layer_ids"] = torch.tensor(self.layers)
            if fault == "cut":
                file.write_bytes(b"\x10")
            elif fault != "absent":
                save_file(tensors, file)
            if fault == "removed":
                shutil.rmtree(self.folder, ignore_errors=True)

    def _reply(
        self, handler: Any, body: dict[str, Any], next_token: int, fault: str, parameters: Any
    ) -> None:
        if fault == "dropped":
            handler.close_connection = True
            return
        choice = {
            "index": 0, "text": "", "finish_reason": "length",
            "token_ids": [next_token], "prompt_token_ids": body["prompt"],
        }  # fmt: skip
        handler.reply(
            200,
            {
                "id": "cmpl", "object": "text_completion", "created": 0, "model": self.name,
                "choices": [choice],
                "kv_transfer_params": parameters,
            },
        )  # fmt: skip


def main() -> None:
    """Serve until killed."""
    base, folder, port, *layers = sys.argv[1:]
    torch.set_num_threads(1)
    loaded = FrozenBase.load(base, dtype="float32", device="cpu")
    StatesServer(loaded, Path(folder), [int(layer) for layer in layers], int(port))
    threading.Event().wait()


if __name__ == "__main__":
    main()
