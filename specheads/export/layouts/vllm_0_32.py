"""vLLM 0.32.0, the last version with a loader for Medusa of its own."""

from specheads.export.layout import Layout
from specheads.export.layouts import _medusa
from specheads.export.readers import medusa

ABOUT = "vLLM 0.32.0, its own Medusa loader"
LAYOUTS = {
    "medusa": Layout(
        _medusa.write,
        medusa.vllm_0_32,
        _medusa.SETTINGS,
        "run",
        "same folder as TGI's; in vLLM 0.32.0 on a CPU (`make vllm`)",
    )
}
