"""Heads in the format of vllm-project/speculators; vLLM serves such a folder by its path alone."""

import shlex
from pathlib import Path
from typing import Any

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import AllowedSettings, Folder, Layout, at_revision

ABOUT = "speculators 0.9 format, for vLLM 0.32 and later"


def eagle3_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return a folder that names its base and holds a copy of the base's embedding."""
    config = _shared.eagle3_config(head, base)
    names = ("draft_vocab_size", "target_hidden_size", _shared.EAGLE3_IDS, "torch_dtype")
    names += (*_shared.EAGLE3_NORMS, "embed_requires_grad")
    parallel = head.config.parallel
    kind = "peagle" if parallel else "eagle3"
    outer: dict[str, Any] = {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": _shared.layer_settings(head, base),
        **_common(head, base, kind),
        **{name: config[name] for name in names},
        **({"mask_token_id": head.config.mask_token} if parallel else {}),
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in _shared.tensors(head).items()
    }
    tensors.setdefault("embed_tokens.weight", base.embedding)
    return Folder(outer, tensors, (_serve(base, out),))


def blocks_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return a folder that names its base; the engine takes shared tensors from there."""
    outer = {**_shared.block_config(head, base), **_common(head, base, head.kind)}
    return Folder(outer, _shared.tensors(head), (_serve(base, out),))


def _common(head: Head, base: BaseEnds, algorithm: str) -> dict[str, Any]:
    """Return the part of config.json that all kinds share."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": head.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": base.location,
                "architectures": base.config.architectures or [type(base.model).__name__],
            },
        },
        "tie_word_embeddings": False,
    }


def _serve(base: BaseEnds, out: Path) -> str:
    # vLLM uses this revision for the base; the head is a local folder
    return f"{_shared.VLLM_SERVER} {at_revision(base, shlex.quote(str(out)))}"


def eagle3_objection(head: Head, _: BaseEnds) -> str:
    """Object to a head whose settings vLLM would not read from this format."""
    unread = head.config.parallel and head.config.fc_norm
    return "vLLM does not read fc_norm of a folder of P-EAGLE, this head has both" if unread else ""


def dspark_objection(head: Head, _: BaseEnds) -> str:
    """Object to a window over blocks that are not causal: vLLM reads no setting of this."""
    if not head.config.sliding_window or head.config.causal:
        return ""
    return "vLLM makes blocks of DSpark with a window causal, those of this head are not"


RUN = "by vLLM 0.32.0 on a CPU (`make vllm`)"
READ = "as vLLM 0.32.0's sources read it; it serves no DSpark and no DFlash 2 on a CPU"
EAGLE3_NOTE = f"{RUN}; of 0.33 the sources were read"
DFLASH: AllowedSettings = {**_shared.DFLASH, **_shared.DRAFT_VOCABULARY, **_shared.WINDOW}
DSPARK: AllowedSettings = {**_shared.DSPARK, **_shared.DRAFT_VOCABULARY, **_shared.WINDOW}

LAYOUTS = {
    "eagle3": Layout(
        eagle3_folder, _shared.EAGLE3_ALL, "run", EAGLE3_NOTE, objection=eagle3_objection
    ),
    "dflash": Layout(blocks_folder, DFLASH, "run", RUN),
    "dflash2": Layout(blocks_folder, {**_shared.DFLASH2, **_shared.WINDOW}, "layout", READ),
    "dspark": Layout(blocks_folder, DSPARK, "layout", READ, objection=dspark_objection),
}
