"""SGLang: EAGLE-3, with layer ids one below everybody else's."""

import shlex
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, drafted_tokens
from specheads.export.layouts import _eagle3
from specheads.export.readers import eagle3

ABOUT = "SGLang 0.5.23"


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder and the line that serves it; a chain, as deep as the head."""
    line = (
        f"python3 -m sglang.launch_server --model-path {shlex.quote(base.place)} "
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(str(out))} "
        f"--speculative-num-steps {drafted_tokens(head)} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {drafted_tokens(head) + 1}"
    )
    return Folder(_eagle3.config(head, base), _eagle3.tensors(head), (line,))


def objection(head: Head, base: FrozenBase) -> str:
    """Return why it cannot read this head's layers; empty where it can."""
    if len(head.aux_layers) != 3:
        return f"it reads three layers, aux_layers are {list(head.aux_layers)}"
    return _eagle3.layer_outputs_only(head, base)


LAYOUTS = {
    "eagle3": Layout(
        write,
        eagle3.sglang,
        _eagle3.PLAIN_RESIDUAL,
        "layout",
        "as SGLang 0.5.23's sources read it",
        objection,
        "three aux_layers, none of them 0; the paper's network only",
    )
}
