"""Train, measure and export speculator heads for a frozen language model.

One index convention, everywhere: `hidden[:, t]` is the base after reading `tokens[:, t]`. The
base itself predicts `tokens[:, t + 1]`. A head of depth K predicts, from position t,
`tokens[:, t + 2 + k]` for k = 0 .. K - 1, and may have read `tokens[:, ..t + 1 + k]`.
See docs/index_convention.md.
"""

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Features, Head
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance.sampling import Sampling
from specheads.decoding.engine import Engine
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.request import Request, Stream
from specheads.export.plugins.custom_generate import custom_generate
from specheads.heads.load import load_head
from specheads.measure.offline import offline_logits

__all__ = [
    "Decoding",
    "Drafter",
    "Engine",
    "Features",
    "FrozenBase",
    "Head",
    "Request",
    "Sampling",
    "Stream",
    "TokenTree",
    "custom_generate",
    "generate",
    "load_head",
    "offline_logits",
]
