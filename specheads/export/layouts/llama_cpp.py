"""llama.cpp: EAGLE-3, DFlash and DSpark, converted to GGUF by its own script."""

import shlex
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, Settings, all_of, drafted_tokens
from specheads.export.layouts import _blocks, _eagle3
from specheads.export.readers import blocks, eagle3

ABOUT = "llama.cpp (0c1e5709), as llama-cpp-python 0.3.36 brings it"

SETTINGS: Settings = {
    **_eagle3.ONE_LAYER,
    **all_of("norm_before_fc", "own_embedding", "rope_scaling"),
}
"""What its EAGLE-3 holds."""

ALONE = "--no-spec-draft-backend-sampling"
"""Else it accepts fewer drafts of a chain where several requests are served together."""

YARN = {"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
"""What of yarn it computes with; of the rest it takes the defaults."""


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder its converter reads, and the lines that convert and serve it."""
    convert, line = _lines("draft-eagle3", drafted_tokens(head), base, out)
    lines = convert, f"{line} {ALONE}"
    return Folder(_eagle3.config(head, base), _eagle3.tensors(head), lines)


def write_block(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return a folder in speculators' format, which its converter reads as DSpark.

    Its converter's own DFlash knows no draft vocabulary. Without a Markov head the engine takes
    the same folder for DFlash, whose slots `draft-dspark` reads from the anchor on. All of a
    block is drafted, whatever the tuned tree: its slots see one another, and llama.cpp leaves
    those out that are not asked for.
    """
    config = _blocks.in_speculators(head, base) | {"architectures": ["DSparkSpeculator"]}
    plain = head.kind == "dflash" and not head.config.sample_from_anchor
    lines = _lines("draft-dflash" if plain else "draft-dspark", head.depth, base, out)
    return Folder(config, _blocks.tensors(head), lines)


def _lines(draft: str, num_tokens: int, base: FrozenBase, out: Path) -> tuple[str, ...]:
    place, target = shlex.quote(str(out)), shlex.quote(base.place)
    gguf = shlex.quote(str(out / "head.gguf"))
    return (
        f"python convert_hf_to_gguf.py {place} --target-model-dir {target} --outfile {gguf}",
        f"llama-server -m BASE.gguf -md {gguf} --spec-type {draft} --spec-draft-n-max {num_tokens}",
    )


def objection(head: Head, base: FrozenBase) -> str:
    """Return why it cannot compute this head; empty where it can."""
    if len(head.aux_layers) != 3:
        return f"it reads three layers, aux_layers are {list(head.aux_layers)}"
    scaling = head.config.rope_scaling
    if scaling.get("rope_type") == "yarn" and (unread := sorted({*scaling} - YARN)):
        return f"it does not read {', '.join(unread)} of yarn"
    return _eagle3.hidden_layers_only(head, base)


RUN = "by its server (0c1e5709) on a CPU in float32 (`make llama_cpp`)"

LAYOUTS = {
    "eagle3": Layout(
        write,
        eagle3.llama_cpp,
        SETTINGS,
        "run",
        RUN,
        objection,
        "three aux_layers below the last layer; yarn by factor and betas alone; one layer",
    ),
    **{
        kind: Layout(
            write_block,
            blocks.llama_cpp,
            {**settings, **all_of("draft_tokens")},
            "run",
            RUN,
            _eagle3.hidden_layers_only,
            "aux_layers below the last layer",
        )
        for kind, settings in (("dflash", _blocks.BLOCK), ("dspark", _blocks.DSPARK))
    },
}
