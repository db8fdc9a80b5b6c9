"""vLLM: EAGLE-3 natively, and the other kinds through the plug-in of this package.

The plug-in reads our own layout: config.json with `kind`, and model.safetensors. The engine lends
it the base's embedding and projection.
"""

import json
import shlex
from pathlib import Path

from specheads.base.fingerprint import tables_fingerprint
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.files import dumps
from specheads.decoding.trees import tuned
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import Folder, Layout, all_of, drafted_tokens, named_base

ABOUT = "vLLM 0.32.0 (EAGLE-3 natively, other kinds through the plug-in of specheads)"
PROPOSER = "specheads.export.vllm.Proposer"
"""The value of vLLM's `custom_class`."""
HEAD_VARIABLE = "SPECHEADS_HEAD"
"""Environment variable that names the exported folder for the plug-in."""
FORCE_VARIABLE = "SPECHEADS_FORCE"
"""Environment variable; `true` serves a head that was trained on other weights than the base's."""


def serve(head: Head, base: FrozenBase, method: str, model: str) -> str:
    """Return the command line that serves a base with a head."""
    settings = {"method": method, "model": model, "num_speculative_tokens": drafted_tokens(head)}
    if getattr(head.config, "parallel", False):
        settings["parallel_drafting"] = True
    speculative = shlex.quote(json.dumps(settings))
    return f"vllm serve {named_base(base)} --speculative-config {speculative}"


def write_plugin(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return our own layout, and the command line that serves it with the plug-in."""
    line = f"{HEAD_VARIABLE}={shlex.quote(str(out))} {serve(head, base, 'custom_class', PROPOSER)}"
    if not head.is_of(tables_fingerprint(base.embedding, base.projection.weight)):
        line = f"{FORCE_VARIABLE}=true {line}"
    # the plug-in reads the calibration and the rates
    files = {tuned.FILE: dumps(head.tuned)} if head.tuned else {}
    return Folder(head.settings(), head.state_dict(), (line,), files=files)


def write_eagle3(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder that vLLM loads with method `eagle3`."""
    return _shared.eagle3_folder(head, base, serve(head, base, "eagle3", str(out)))


NOTE = "in vLLM 0.32.0 on a CPU (`make vllm`); of 0.33 the sources were read"
ATTENTION = ("attention_heads", "key_value_heads", "inner_dim", "rope_theta")
MTP = ("head_dim", "hidden_first", "qk_norm", "attention_bias", "rope_scaling", "epsilon")
PLUGIN = {
    "medusa": ("num_layers", "projection", "rank"),
    "mlp_speculator": ("aux_layers", "inner_dim", "state", "tie_weights", "scale_input"),
    "hydra_heads": ("aux_layers", "num_layers", "prefix", *ATTENTION),
    "mtp": ("aux_layers", *ATTENTION, *MTP),
    "redrafter": ("aux_layers", "num_layers", "exit_dim", "rnn"),
    "eagle_gru": ("aux_layers", *ATTENTION, "head_dim", "epsilon", "sliding_window"),
}
"""Kinds that the plug-in serves, and their settings, which may have any value."""
LAYOUTS = {
    "eagle3": Layout(write_eagle3, _shared.EAGLE3_ALL, "run", f"natively, {NOTE}"),
    **{
        kind: Layout(write_plugin, all_of("draft_tokens", *names), "run", f"plug-in, {NOTE}")
        for kind, names in PLUGIN.items()
    },
}
