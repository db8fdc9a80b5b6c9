"""llama.cpp: EAGLE-3, converted to GGUF by its own script, which chooses the layers itself."""

import shlex
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, drafted_tokens
from specheads.export.layouts import _eagle3
from specheads.export.readers import eagle3

ABOUT = "llama.cpp with EAGLE-3 (after #18039)"


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder its converter reads, and the lines that convert and serve it."""
    place, target = shlex.quote(str(out)), shlex.quote(base.place)
    gguf = shlex.quote(str(out / "head.gguf"))
    lines = (
        f"python convert_hf_to_gguf.py {place} --target-model-dir {target} --outfile {gguf}",
        f"llama-server -m BASE.gguf -md {gguf} --spec-type draft-eagle3 "
        f"--spec-draft-n-max {drafted_tokens(head)}",
    )
    return Folder(_eagle3.config(head, base), _eagle3.tensors(head), lines)


def objection(head: Head, base: FrozenBase) -> str:
    """Return why it would read other layers than this head; empty where it would not."""
    fixed = [2, base.num_layers // 2, base.num_layers - 3]
    if list(head.aux_layers) == fixed:
        return ""
    return f"it always reads layers {fixed} of this base, the head's are {list(head.aux_layers)}"


LAYOUTS = {
    "eagle3": Layout(
        write,
        eagle3.llama_cpp,
        _eagle3.ONE_LAYER,
        "layout",
        "as its converter (0274f0fc) reads it",
        objection,
        "aux_layers 2, n // 2 and n - 3 only; the paper's network only",
    )
}
