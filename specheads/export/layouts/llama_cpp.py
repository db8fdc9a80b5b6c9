"""llama.cpp: EAGLE-3, DFlash and DSpark, converted to GGUF by its own script."""

import shlex
from pathlib import Path

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import (
    AllowedSettings,
    Folder,
    Layout,
    all_of,
    at_revision,
    drafted_tokens,
)

ABOUT = "llama.cpp (0c1e5709), as llama-cpp-python 0.3.36 brings it"
EAGLE3: AllowedSettings = {
    **_shared.EAGLE3_ONE_LAYER,
    **all_of("norm_before_fc", "own_embedding", "rope_scaling"),
}
NO_BACKEND_SAMPLING = "--no-spec-draft-backend-sampling"
"""Without this flag EAGLE-3 accepts fewer drafts when several requests run together."""
YARN = {"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
"""YaRN settings that llama.cpp reads; it uses its defaults for the others."""


def eagle3_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the folder for the converter, with the command lines that convert and serve it."""
    *conversion, line = _lines("draft-eagle3", drafted_tokens(head), base, out)
    return _shared.eagle3_folder(head, base, *conversion, f"{line} {NO_BACKEND_SAMPLING}")


def block_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return a folder that the converter reads as DSpark; its DFlash has no draft vocabulary.

    Without a Markov head the engine treats the folder as DFlash; `draft-dspark` also drafts from
    the anchor. The command line drafts the whole block whatever the tuned tree, because the slots
    attend to each other and llama.cpp omits the slots beyond `--spec-draft-n-max`.
    """
    config = _shared.block_config(head, base) | {"architectures": ["DSparkSpeculator"]}
    plain = head.kind == "dflash" and not head.config.sample_from_anchor
    lines = _lines("draft-dflash" if plain else "draft-dspark", head.depth, base, out)
    return Folder(config, _shared.tensors(head), lines)


def _lines(draft: str, num_tokens: int, base: BaseEnds, out: Path) -> tuple[str, ...]:
    folder, gguf = shlex.quote(str(out)), shlex.quote(str(out / "head.gguf"))
    target, download = shlex.quote(base.location), ()
    if not Path(base.location).exists():
        # the converter reads config.json and the tokenizer from a folder
        target = shlex.quote(str(out / "base"))
        command = f"hf download {shlex.quote(base.location)} --exclude '*.safetensors' '*.bin'"
        download = (f"{at_revision(base, command)} --local-dir {target}",)
    return (
        *download,
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outfile {gguf}",
        f"llama-server -m BASE.gguf -md {gguf} --spec-type {draft} --spec-draft-n-max {num_tokens}",
    )


def eagle3_objection(head: Head, _: BaseEnds) -> str:
    """Object to settings of yarn that llama.cpp does not read."""
    scaling = head.config.rope_scaling
    unread = sorted({*scaling} - YARN) if scaling.get("rope_type") == "yarn" else []
    return f"it does not read {', '.join(unread)} of yarn" if unread else ""


RUN = "by its server (0c1e5709) on a CPU in float32 (`make llama_cpp`)"
DFLASH: AllowedSettings = {**_shared.BLOCK, **_shared.DRAFT_VOCABULARY}
DSPARK: AllowedSettings = {**_shared.DSPARK, **_shared.DRAFT_VOCABULARY}
LAYOUTS = {
    "eagle3": Layout(eagle3_folder, EAGLE3, "run", RUN, num_aux=3, objection=eagle3_objection),
    "dflash": Layout(block_folder, DFLASH, "run", RUN),
    "dspark": Layout(block_folder, DSPARK, "run", RUN),
}
