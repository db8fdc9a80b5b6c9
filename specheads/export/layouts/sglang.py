"""SGLang: EAGLE-3, DFlash and DSpark. Its layer ids are one lower than in other engines."""

import shlex
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import Folder, Layout, drafted_tokens, named_base
from specheads.heads.layers.block import BlockHead

ABOUT = "SGLang 0.5.23"


def write_eagle3(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder and the command line that drafts a chain."""
    line = (
        f"{_serve(base, out, 'EAGLE3')} --speculative-num-steps {drafted_tokens(head)} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted_tokens(head) + 1}"
    )
    return _shared.eagle3_folder(head, base, line)


def write_blocks(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the format of z-lab (DFlash) or DeepSpec (DSpark).

    The command line drafts the whole block whatever the tuned tree: a shorter block has fewer
    masks than in training.
    """
    assert isinstance(head, BlockHead)
    dspark = head.kind == "dspark"
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        **_shared.layer_settings(head, base),
        "num_target_layers": base.num_layers,
        # DFlash counts the anchor's slot; DSpark counts drafted tokens in both modes
        "block_size": head.depth + (not dspark),
        "dflash_config": {
            "target_layer_ids": [layer - 1 for layer in head.aux_layers],
            "mask_token_id": head.mask_token,
        },
        "sample_from_anchor": head.config.sample_from_anchor,
        **_shared.markov_config(head),
        "torch_dtype": _shared.stored_dtype(head),
    }
    line = f"{_serve(base, out, head.kind.upper())} --speculative-num-draft-tokens {head.depth + 1}"
    return Folder(config, _shared.tensors(head), (line,))


def _serve(base: FrozenBase, out: Path, algorithm: str) -> str:
    return (
        f"python3 -m sglang.launch_server --model-path {named_base(base)} "
        f"--speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(out))}"
    )


READ = "as SGLang 0.5.23's sources read it"

LAYOUTS = {
    "eagle3": Layout(
        write_eagle3,
        _shared.EAGLE3_PLAIN,
        "layout",
        READ,
        lowest=1,
        num_aux=3,
        limits=_shared.NETWORK,
    ),
    "dflash": Layout(write_blocks, _shared.DFLASH, "layout", READ, lowest=1),
    "dspark": Layout(write_blocks, _shared.DSPARK, "layout", READ, lowest=1),
}
