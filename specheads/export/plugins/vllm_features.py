"""Connector for a vLLM server that writes hidden states of the base into files. See docs/scale.md.

vLLM imports this file by `kv_connector_module_path`, with this folder on PYTHONPATH: specheads
need not be installed in the server's environment. Written for vLLM 0.32, whose connectors are
experimental.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # pyright: ignore[reportMissingImports]
    example_hidden_states_connector as own,
)

DONE = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
"""Replacement for a CUDA event after a copy that is complete."""


def layer_ids(vllm_config: Any) -> list[int]:
    """Return the ids of the layers whose states a server gives."""
    settings = vllm_config.speculative_config.draft_model_config.hf_config
    # vLLM sorts them
    return sorted(settings.eagle_aux_hidden_state_layer_ids)


class HiddenStates(own.ExampleHiddenStatesConnector):
    """vLLM's own connector, with the ids of the layers in each file.

    On a CPU vLLM's fails when it copies states into pinned memory.
    """

    def _write_tensors(self, tensors: Any, event: Any, filename: str, lock: int | None) -> None:
        """Write the file of a request, and release its lock."""
        ids = torch.tensor(layer_ids(self._vllm_config))
        super()._write_tensors(tensors | {"layer_ids": ids}, event, filename, lock)

    def _submit_async_write(self, pending: Any) -> None:
        """Copy the states of a finished request, and write them in a thread of vLLM's pool."""
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
        elif self._is_tp_rank_zero:
            blocks = torch.tensor(pending.block_ids, dtype=torch.long)
            slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
            # a copy, because vLLM reuses the blocks as soon as this returns
            states = own.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
            tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
            os.makedirs(os.path.dirname(pending.filename), exist_ok=True)  # noqa: PTH103, PTH120
            # vLLM created and locked the lock file when it scheduled the request
            lock = self._lock_fds.pop(pending.req_id, None)
            job = self._executor.submit(self._write_tensors, tensors, DONE, pending.filename, lock)
            self._req_copy_events[pending.req_id] = DONE
            self._req_futures[pending.req_id] = job
            job.add_done_callback(lambda job: self._on_write_done(pending.req_id, job))
