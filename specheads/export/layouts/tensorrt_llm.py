"""TensorRT-LLM, PyTorch backend: EAGLE-3, with layers named in options and not in the head."""

import json
import shlex
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, named_base
from specheads.export.layouts import _eagle3
from specheads.export.readers import eagle3

ABOUT = "TensorRT-LLM main, PyTorch backend"
OPTIONS = "trtllm.yaml"


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder, its options and the line that serves it."""
    options = {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": head.depth,
            "speculative_model": str(out),
            "eagle3_layers_to_capture": [layer - 1 for layer in head.aux_layers],
        }
    }
    line = (
        f"trtllm-serve {named_base(base)} --backend pytorch "
        f"--extra_llm_api_options {shlex.quote(str(out / OPTIONS))}"
    )
    return Folder(
        _eagle3.config(head, base),
        _eagle3.tensors(head),
        (line,),
        # JSON is YAML too
        files={OPTIONS: json.dumps(options, indent=2) + "\n"},
    )


LAYOUTS = {
    "eagle3": Layout(
        write,
        eagle3.tensorrt_llm,
        _eagle3.PLAIN_RESIDUAL,
        "layout",
        "as its sources (00679c66) read it",
        _eagle3.layer_outputs_only,
        "no aux layer 0; the paper's network only",
    )
}
