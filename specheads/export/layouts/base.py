"""The base itself: a copy of its checkpoint, with the trained MTP module in place of its own.

What loads the base loads the copy, and drafts with the trained module where it drafts with the
base's own.
"""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import snapshot_download

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.core.errors import first_line
from specheads.export.layouts._shared import VLLM_SERVER, Folder, Layout, all_of, drafted_tokens
from specheads.heads.checkpoint import read_settings, read_tensors
from specheads.heads.kinds.mtp import from_public, module_names, read_public, to_public
from specheads.heads.load import copy_head

ABOUT = "a copy of the base, for transformers, vLLM and all that draft with its own module"


SETTINGS = all_of(
    *("attention_heads", "key_value_heads", "head_dim", "inner_dim", "rope_theta", "rope_scaling"),
    *("hidden_first", "qk_norm", "attention_bias", "epsilon"),
    *("rotary_share", "output_gate", "experts"),
)


def checkpoint(base: BaseEnds) -> Path:
    """Return the folder of a base, in the cache of the Hub if it came from there."""
    if (folder := Path(base.location)).exists():
        return folder
    return Path(snapshot_download(base.location, revision=base.revision, local_files_only=True))


def write(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the tensors of the module, by the names and in the dtypes of the base's own."""
    folder, stored = checkpoint(base), copy_head(head)
    weights = to_public(head.state_dict(), head.config)
    base_tensors = read_tensors(folder)
    _, names = module_names(base_tensors)
    tensors = {
        public: weights[name].cpu().to(base_tensors[public].dtype).contiguous()
        for public, name in names.items()
    }
    rounded = {name: tensors[public] for public, name in names.items()}
    stored.load_state_dict(from_public(rounded, head.config))
    settings = {"method": "mtp", "num_speculative_tokens": drafted_tokens(head)}
    config = shlex.quote(json.dumps(settings))
    line = f"{VLLM_SERVER} {shlex.quote(str(out))} --speculative-config {config}"
    return Folder({}, tensors, (line,), copied=folder, stored=stored)


def objection(head: Head, base: BaseEnds) -> str:
    """Object to a base whose own module is missing or has another architecture."""
    if base.adapter:
        return "an adapter is merged into the base, and the copy would not have it"
    try:
        folder = checkpoint(base)
        module = read_public(read_settings(folder), read_tensors(folder))
    # the Hub's errors are of both types
    except (OSError, ValueError) as error:
        return f"its base cannot be copied: {first_line(error)}"
    if module is None:
        return f"{folder} has no MTP module; transformers drops it when it saves a model"
    head_settings = asdict(head.config) | {"depth": module.depth}
    for name, value in asdict(module.config).items():
        if value != head_settings[name]:
            return (
                f"the module in {folder} has {name}={value!r}, the head has {head_settings[name]!r}"
            )
    return ""


RUN = "by transformers 5.23 and vLLM 0.32.0 on a CPU (`make vllm`)"
LAYOUTS = {"mtp": Layout(write, SETTINGS, "run", RUN, objection=objection)}
