"""SGLang: EAGLE-3 and block heads. Its layer ids are one lower than in other engines."""

import shlex
from pathlib import Path

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import Folder, Layout, drafted_tokens, named_base

ABOUT = "SGLang 0.5.23"


def eagle3_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the folder and the command line that drafts a chain."""
    line = (
        f"{_serve(base, out, 'EAGLE3')} --speculative-num-steps {drafted_tokens(head)} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted_tokens(head) + 1}"
    )
    return _shared.eagle3_folder(head, base, line)


def blocks_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the format of z-lab, or of DeepSpec (DSpark).

    The command line drafts the whole block whatever the tuned tree: a shorter block has fewer
    masks than in training.
    """
    # the folder's settings tell DFlash 2 and Domino from DFlash
    is_domino = head.kind == "domino"
    algorithm = "DFLASH" if is_domino else head.kind.upper().rstrip("2")
    # it counts the token before the drafted ones, and a Domino block's last slot drafts nothing
    num_tokens = head.depth + (not is_domino)
    line = f"{_serve(base, out, algorithm)} --speculative-num-draft-tokens {num_tokens}"
    return Folder(_shared.authors_config(head, base), _shared.tensors(head), (line,))


def _serve(base: BaseEnds, out: Path, algorithm: str) -> str:
    return (
        f"python3 -m sglang.launch_server --model-path {named_base(base)} "
        f"--speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(out))}"
    )


READ = "as SGLang 0.5.23's sources read it"
DOMINO_READ = "as the sources of SGLang's main branch (00731f0b) read it"
BY_INPUTS = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"),
)
"""Bases with which SGLang takes ids that do not begin with 1 for inputs of layers."""


def eagle3_objection(head: Head, base: BaseEnds) -> str:
    """Object to layers in place of which SGLang would read others."""
    kind, first = type(base.model).__name__, head.aux_layers[0]
    # sgl-project/sglang#39286
    if kind in ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"):
        return "it reads the layers of Gemma 3 without their residual stream"
    if kind not in BY_INPUTS or first == 2:
        return ""
    return f"it reads other layers of {kind} unless aux_layers begin with 2, here with {first}"


LAYOUTS = {
    "eagle3": Layout(
        eagle3_folder,
        _shared.EAGLE3_PLAIN,
        "layout",
        READ,
        lowest=1,
        num_aux=3,
        objection=eagle3_objection,
    ),
    **{
        kind: Layout(
            blocks_folder,
            settings,
            "layout",
            DOMINO_READ if kind == "domino" else READ,
            lowest=1,
            objection=_shared.scaled_embedding,
        )
        for kind, settings in _shared.BLOCKS.items()
    },
}
