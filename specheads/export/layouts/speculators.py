"""Heads in the format of vllm-project/speculators, which vLLM serves by its folder alone."""

import shlex
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, all_of, at_revision
from specheads.export.layouts import _blocks, _eagle3
from specheads.export.readers import blocks, eagle3

ABOUT = "speculators 0.9 format, for vLLM 0.32 and later"


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return a folder that names its base and holds a copy of the base's embedding."""
    config = _eagle3.config(head, base)
    kept = ("draft_vocab_size", "target_hidden_size", _eagle3.IDS, "torch_dtype", *_eagle3.NORMS)
    parallel = head.config.parallel
    kind = "peagle" if parallel else "eagle3"
    outer: dict[str, Any] = {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": _eagle3.layer(head, base),
        **_common(head, base, kind),
        **{name: config[name] for name in (*kept, "embed_requires_grad")},
        **({"mask_token_id": head.config.mask_token} if parallel else {}),
    }
    named = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in _eagle3.tensors(head).items()
    }
    named.setdefault("embed_tokens.weight", base.embedding)
    return Folder(outer, named, (_serve(base, out),))


def write_blocks(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return a folder that names its base, from which an engine takes what the head borrows."""
    outer = {**_blocks.in_speculators(head, base), **_common(head, base, head.kind)}
    return Folder(outer, _blocks.tensors(head), (_serve(base, out),))


def _common(head: Head, base: FrozenBase, algorithm: str) -> dict[str, Any]:
    """Return what config.json says of any head."""
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
                "name_or_path": base.place,
                "architectures": base.config.architectures or [type(base.model).__name__],
            },
        },
        "tie_word_embeddings": False,
    }


def _serve(base: FrozenBase, out: Path) -> str:
    # a folder has no revision: vLLM asks for the base's with it
    return f"vllm serve {at_revision(base, shlex.quote(str(out)))}"


def objection(head: Head, base: FrozenBase) -> str:
    """Return why vLLM would read other settings than the head's; empty where it would not."""
    if head.config.parallel and head.config.fc_norm:
        return "vLLM does not read fc_norm of a folder of P-EAGLE, this head has both"
    return _eagle3.hidden_layers_only(head, base)


RUN = "by vLLM 0.32.0 on a CPU (`make vllm`)"
READ = "as vLLM 0.32.0's sources read it; it serves no DSpark on a CPU"

LAYOUTS = {
    "eagle3": Layout(
        write,
        eagle3.speculators,
        _eagle3.SETTINGS,
        "run",
        f"{RUN}; of 0.33 the sources were read",
        objection,
        "aux_layers below the last layer; parallel without fc_norm",
    ),
    **{
        kind: Layout(
            write_blocks,
            read,
            {**settings, **all_of("draft_tokens")},
            verified,
            note,
            _eagle3.hidden_layers_only,
            "aux_layers below the last layer",
        )
        for kind, read, settings, verified, note in (
            ("dflash", blocks.dflash, _blocks.DFLASH, "run", RUN),
            ("dspark", blocks.dspark, _blocks.DSPARK, "layout", READ),
        )
    },
}
