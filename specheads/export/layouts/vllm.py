"""vLLM, current: EAGLE-3 as it loads it itself, every other kind through our plug-in.

The plug-in's folder is our own layout, `config.json` with a `kind` beside `model.safetensors`, as
`load_head` reads it. The engine lends it the base's embedding and projection.
"""

import json
import shlex
from pathlib import Path

from specheads.base.fingerprint import tables_fingerprint
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, all_of, drafted_tokens, named_base
from specheads.export.layouts import _eagle3
from specheads.export.readers import eagle3, medusa, mlp_speculator, plugin

ABOUT = "vLLM 0.32.0 (EAGLE-3 natively, other kinds through the plug-in of specheads)"

PROPOSER = "specheads.export.vllm.Proposer"
"""What vLLM's `custom_class` is to be set to."""

HEAD_VARIABLE = "SPECHEADS_HEAD"
"""Environment variable in which the plug-in finds the exported folder."""

FORCE_VARIABLE = "SPECHEADS_FORCE"
"""Environment variable that serves a head of other weights than the base's where it says true."""


def serve(head: Head, base: FrozenBase, method: str, model: str) -> str:
    """Return the command line that serves a base with a head."""
    settings = {"method": method, "model": model, "num_speculative_tokens": drafted_tokens(head)}
    if getattr(head.config, "parallel", False):
        settings["parallel_drafting"] = True
    speculative = shlex.quote(json.dumps(settings))
    return f"vllm serve {named_base(base)} --speculative-config {speculative}"


def write_plugin(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return our own layout, and how the plug-in serves it."""
    line = f"{HEAD_VARIABLE}={shlex.quote(str(out))} {serve(head, base, 'custom_class', PROPOSER)}"
    if not head.is_of(tables_fingerprint(base.embedding, base.projection.weight)):
        line = f"{FORCE_VARIABLE}=true {line}"
    return Folder(head.settings(), head.state_dict(), (line,))


def write_eagle3(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder vLLM loads as `eagle3`."""
    lines = (serve(head, base, "eagle3", str(out)),)
    return Folder(_eagle3.config(head, base), _eagle3.tensors(head), lines)


NOTE = "in vLLM 0.32.0 on a CPU (`make vllm`); of 0.33 the sources were read"
ATTENTION = ("attention_heads", "key_value_heads", "inner_dim", "rope_theta")
MTP = ("head_dim", "hidden_first", "qk_norm", "attention_bias", "rope_scaling", "epsilon")
READ = {
    "medusa": (medusa.own, ("num_layers", "projection", "rank")),
    "mlp_speculator": (
        mlp_speculator.own,
        ("inner_dim", "state", "tie_weights", "scale_input"),
    ),
    "hydra_heads": (plugin.hydra_heads, ("num_layers", "prefix", *ATTENTION)),
    "mtp": (plugin.mtp, (*ATTENTION, *MTP)),
    "redrafter": (plugin.redrafter, ("num_layers", "exit_dim", "rnn")),
}
"""Our own layout's readers, and the settings they know: each in every value."""

LAYOUTS = {
    "eagle3": Layout(
        write_eagle3,
        eagle3.vllm,
        _eagle3.SETTINGS,
        "run",
        f"natively, {NOTE}",
        _eagle3.hidden_layers_only,
        "aux_layers below the last layer",
    ),
    **{
        kind: Layout(write_plugin, read, all_of("draft_tokens", *names), "run", f"plug-in, {NOTE}")
        for kind, (read, names) in READ.items()
    },
}
