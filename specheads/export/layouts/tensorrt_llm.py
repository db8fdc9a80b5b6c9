"""TensorRT-LLM, PyTorch backend: EAGLE-3. The layers are named in its options, not in the head."""

import shlex
from dataclasses import replace
from pathlib import Path

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.core.files import as_json
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import Folder, Layout, named_base

ABOUT = "TensorRT-LLM main, PyTorch backend"
OPTIONS = "trtllm.yaml"


def eagle3_folder(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the folder with its options file, and the command line that serves it."""
    options = {
        "decoding_type": "Eagle3",
        "max_draft_len": head.depth,
        "speculative_model": str(out),
        "eagle3_layers_to_capture": [layer - 1 for layer in head.aux_layers],
    }
    line = (
        f"trtllm-serve {named_base(base)} --backend pytorch "
        f"--extra_llm_api_options {shlex.quote(str(out / OPTIONS))}"
    )
    # JSON is also YAML
    text = as_json({"speculative_config": options})
    return replace(_shared.eagle3_folder(head, base, line), files={OPTIONS: text})


READ = "as its sources (00679c66) read it"
LAYOUTS = {"eagle3": Layout(eagle3_folder, _shared.EAGLE3_PLAIN, "layout", READ, lowest=1)}
