"""SGLang: EAGLE-3, DFlash and DSpark, with layer ids one below everybody else's."""

import shlex
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, drafted_tokens, named_base, stored_dtype
from specheads.export.layouts import _blocks, _eagle3
from specheads.export.readers import blocks, eagle3
from specheads.heads.layers.block import BlockHead

ABOUT = "SGLang 0.5.23"


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder and the line that serves it; a chain, as deep as the head."""
    line = (
        f"{_serve(base, out, 'EAGLE3')} --speculative-num-steps {drafted_tokens(head)} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted_tokens(head) + 1}"
    )
    return Folder(_eagle3.config(head, base), _eagle3.tensors(head), (line,))


def write_blocks(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return its authors' folder, z-lab's or DeepSpec's, and the line that drafts whole blocks.

    A block cut short by a tuned tree would show its slots fewer masks than it was trained with.
    """
    assert isinstance(head, BlockHead)
    dspark = head.kind == "dspark"
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        **_blocks.layer(head, base),
        "num_target_layers": base.num_layers,
        # DSpark's is the number of drafted tokens, whether the anchor's slot drafts or not
        "block_size": head.depth + (not dspark),
        "dflash_config": {
            "target_layer_ids": [layer - 1 for layer in head.aux_layers],
            "mask_token_id": head.mask_token,
        },
        "sample_from_anchor": head.config.sample_from_anchor,
        **_blocks.markov(head),
        "torch_dtype": stored_dtype(head),
    }
    line = f"{_serve(base, out, head.kind.upper())} --speculative-num-draft-tokens {head.depth + 1}"
    return Folder(config, _blocks.tensors(head), (line,))


def _serve(base: FrozenBase, out: Path, algorithm: str) -> str:
    return (
        f"python3 -m sglang.launch_server --model-path {named_base(base)} "
        f"--speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(out))}"
    )


def objection(head: Head, base: FrozenBase) -> str:
    """Return why it cannot read this head's layers; empty where it can."""
    if len(head.aux_layers) != 3:
        return f"it reads three layers, aux_layers are {list(head.aux_layers)}"
    return _eagle3.layer_outputs_only(head, base)


READ = "as SGLang 0.5.23's sources read it"

LAYOUTS = {
    "eagle3": Layout(
        write,
        eagle3.sglang,
        _eagle3.PLAIN_RESIDUAL,
        "layout",
        READ,
        objection,
        "three aux_layers, none of them 0; the paper's network only",
    ),
    **{
        kind: Layout(
            write_blocks,
            read,
            settings,
            "layout",
            READ,
            _eagle3.layer_outputs_only,
            "aux_layers below the last layer, none of them 0",
        )
        for kind, read, settings in (
            ("dflash", blocks.sglang_dflash, _blocks.DFLASH),
            ("dspark", blocks.sglang_dspark, _blocks.DSPARK),
        )
    },
}
