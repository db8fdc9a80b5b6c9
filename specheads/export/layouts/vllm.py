"""vLLM: EAGLE-3, DFlash and DFlash 2 natively, other kinds through the plug-in of this package.

The plug-in reads our own layout: config.json with `kind`, and model.safetensors. The engine lends
it the base's embedding and projection.
"""

import json
import shlex
from pathlib import Path

from specheads.base.ends import BaseEnds
from specheads.base.fingerprint import tables_fingerprint
from specheads.core.drafter import Head
from specheads.core.files import dumps
from specheads.decoding.trees import tuned
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import VLLM_SERVER, Folder, Layout, drafted_tokens, named_base
from specheads.heads.layers.block import SINK

ABOUT = "vLLM 0.32.0 (EAGLE-3, DFlash, DFlash 2 natively, other kinds through our plug-in)"
PROPOSER = "specheads.export.vllm.Proposer"
"""The value of vLLM's `custom_class`."""
HEAD_VARIABLE = "SPECHEADS_HEAD"
"""Environment variable that names the exported folder for the plug-in."""
FORCE_VARIABLE = "SPECHEADS_FORCE"
"""Environment variable; `true` serves a head that was trained on other weights than the base's."""


def serve(head: Head, base: BaseEnds, method: str, model: str) -> str:
    """Return the command line that serves a base with a head."""
    # a shorter block is another network
    depth = head.depth if method == "dflash" else drafted_tokens(head)
    settings = {"method": method, "model": model, "num_speculative_tokens": depth}
    if getattr(head.config, "parallel", False):
        settings["parallel_drafting"] = True
    speculative = shlex.quote(json.dumps(settings))
    return f"{VLLM_SERVER} {named_base(base)} --speculative-config {speculative}"


def plugin_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return our own layout, and the command line that serves it with the plug-in."""
    line = f"{HEAD_VARIABLE}={shlex.quote(str(out))} {serve(head, base, 'custom_class', PROPOSER)}"
    if not head.matches_fingerprint(tables_fingerprint(base.embedding, base.projection.weight)):
        line = f"{FORCE_VARIABLE}=true {line}"
    # the plug-in reads the calibration and the rates
    files = {tuned.FILE: dumps(head.tuned)} if head.tuned else {}
    return Folder(head.settings(), head.state_dict(), (line,), files=files)


def eagle3_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the folder that vLLM loads with method `eagle3`."""
    return _shared.eagle3_folder(head, base, serve(head, base, "eagle3", str(out)))


def dflash_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return z-lab's format with ModelOpt's settings of a window and of sinks."""
    config, settings = _shared.authors_config(head, base), head.config
    if settings.sliding_window and not settings.full_layers:
        config["layer_types"] = ["full_attention"] * settings.num_layers
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": settings.sliding_window}
    if settings.sliding_window and not (settings.full_layers and settings.causal):
        # of all layers; by default those with a window are causal
        config["dflash_config"]["causal"] = bool(settings.causal)
    config["dflash_config"][SINK[0]] = bool(settings.attention_sink)
    line = serve(head, base, "dflash", str(out))
    return Folder(config, _shared.tensors(head), (line,))


def dflash_objection(head: Head, _: BaseEnds) -> str:
    """Object to a window that vLLM would count in another way."""
    if head.config.sliding_window and not head.config.window_counts_slots:
        return "its window counts slots, that of this head does not"
    return ""


NOTE = "in vLLM 0.32.0 on a CPU (`make vllm`); of 0.33 the sources were read"
PLUGIN = ("eagle_gru", "hydra_heads", "medusa", "mlp_speculator", "mtp", "redrafter")
"""Kinds that the plug-in serves, with any settings."""
LAYOUTS = {
    "eagle3": Layout(eagle3_folder, _shared.EAGLE3_ALL, "run", f"natively, {NOTE}"),
    **{
        kind: Layout(
            dflash_folder,
            {**settings, **_shared.WINDOW, "window_counts_slots": None},
            "layout",
            "natively, as vLLM 0.32.0's sources read it",
            lowest=1,
            objection=dflash_objection,
        )
        for kind, settings in (("dflash", _shared.DFLASH), ("dflash2", _shared.DFLASH2))
    },
    **{kind: Layout(plugin_folder, None, "run", f"plug-in, {NOTE}") for kind in PLUGIN},
}
