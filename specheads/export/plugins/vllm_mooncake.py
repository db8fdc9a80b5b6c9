"""Connector for a vLLM server that puts hidden states into a Mooncake store. See docs/scale.md.

vLLM imports this file by `kv_connector_module_path`, with this folder on PYTHONPATH, as it does
`vllm_features`. Written for vLLM 0.32 and hs-connectors 0.9, which must be installed with vLLM.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from hs_connectors.mooncake_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    MooncakeHiddenStatesConnector,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm_features import layer_ids  # pyright: ignore[reportMissingImports]

COMPLETE = SimpleNamespace(record=lambda: None, wait_event=lambda _: None)
"""Replacement for a stream and for an event of it: on a CPU a forward that returned is complete."""
CPU = SimpleNamespace(
    Stream=lambda: COMPLETE, Event=lambda: COMPLETE, stream=lambda _: nullcontext()
)


class MooncakeStates(MooncakeHiddenStatesConnector):
    """hs-connectors' own connector, with the ids of the layers in each reply.

    On a CPU hs-connectors' looks for the streams of an accelerator.
    """

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Return the manifest of a request, and the ids of its layers."""
        is_pending, manifest = super().request_finished(request, block_ids)
        if manifest is not None:
            manifest["layer_ids"] = layer_ids(self._vllm_config)
        return is_pending, manifest

    def _device(self) -> Any:
        """Return torch's module with the streams of the device."""
        return CPU if current_platform.is_cpu() else super()._device()
