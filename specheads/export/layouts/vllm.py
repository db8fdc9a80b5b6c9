"""vLLM, current: EAGLE-3 as it loads it itself, every other kind through our plug-in.

The plug-in's folder is our own layout, `config.json` with a `kind` beside `model.safetensors`, as
`load_head` reads it. The engine lends it the base's embedding and projection.
"""

import json
import shlex
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout
from specheads.export.layouts import _eagle3, _own
from specheads.export.readers import eagle3, hydra_heads, medusa, mlp_speculator, redrafter

ABOUT = "vLLM 0.32.0 (EAGLE-3 natively, other kinds through the plug-in of specheads)"

PROPOSER = "specheads.export.vllm.Proposer"
"""What vLLM's `custom_class` is to be set to."""

HEAD_VARIABLE = "SPECHEADS_HEAD"
"""Environment variable in which the plug-in finds the exported folder."""


def serve(base: str, settings: dict[str, object]) -> str:
    """Return the command line that serves a base with these speculative settings."""
    return (
        f"vllm serve {shlex.quote(base)} --speculative-config {shlex.quote(json.dumps(settings))}"
    )


def write_plugin(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return our own layout, and how the plug-in serves it."""
    settings: dict[str, object] = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": head.depth,
    }
    line = f"{HEAD_VARIABLE}={shlex.quote(str(out))} {serve(base.name, settings)}"
    return Folder(head.settings(), head.state_dict(), (line,))


def write_eagle3(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder vLLM loads as `eagle3`."""
    settings: dict[str, object] = {
        "method": "eagle3",
        "model": str(out),
        "num_speculative_tokens": head.depth,
    }
    config = _eagle3.config(head, base)
    return Folder(config, _eagle3.tensors(head), (serve(base.name, settings),))


NOTE = "plug-in, in vLLM 0.32.0 on a CPU (`make vllm`); of 0.33 the sources were read"
LAYOUTS = {
    "eagle3": Layout(
        write_eagle3,
        eagle3.vllm,
        _eagle3.SETTINGS,
        "run",
        "natively, in vLLM 0.32.0 on a CPU (`make vllm`); of 0.33 the sources were read",
        _eagle3.hidden_layers_only,
        "aux_layers below the last layer",
    ),
    **{
        kind: Layout(write_plugin, read, _own.SETTINGS[kind], "run", NOTE)
        for kind, read in (
            ("medusa", medusa.own),
            ("mlp_speculator", mlp_speculator.own),
            ("hydra_heads", hydra_heads.own),
            ("redrafter", redrafter.own),
        )
    },
}
