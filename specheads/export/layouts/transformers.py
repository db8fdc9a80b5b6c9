"""transformers: DFlash, as the assistant model of `generate`.

Its candidate generator takes any model with these inputs, and the only class that has them is
MuseGlimmerAssistantModel: Qwen3 layers behind a fusion of the base's layers, as in DFlash.
"""

from pathlib import Path

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.export.layouts import _shared
from specheads.export.layouts._shared import Folder, Layout
from specheads.heads.layers.block import BY_TRANSFORMERS, RENAMED, BlockHead

ABOUT = "transformers 5.23 (`generate` with `speculation_type`)"


def write(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the folder, and the call that drafts whole blocks with it."""
    assert isinstance(head, BlockHead)
    config = {
        **_shared.layer_settings(head, base),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": BY_TRANSFORMERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": head.config.rope_theta},
        "block_size": head.depth + 1,
        "target_layer_ids": [layer - 1 for layer in head.aux_layers],
        "mask_token_id": head.mask_token,
        "torch_dtype": _shared.stored_dtype(head),
    }
    public_names = {name: public for public, name in RENAMED.items()}
    tensors = {public_names.get(name, name): value for name, value in _shared.tensors(head).items()}
    line = (
        f"model.generate(**inputs, assistant_model=AutoModel.from_pretrained({str(out)!r}), "
        'speculation_type="dflash")'
    )
    return Folder(config, tensors, (line,))


RUN = "by transformers 5.23 on a CPU"
LAYOUTS = {
    "dflash": Layout(
        write, _shared.DFLASH, "run", RUN, lowest=1, objection=_shared.scaled_embedding
    )
}
