"""Train, measure and export speculator heads for a frozen language model.

One index convention, everywhere: `hidden[:, t]` is the base after reading `tokens[:, t]`. The
base itself predicts `tokens[:, t + 1]`. A head of depth K predicts, from position t,
`tokens[:, t + 2 + k]` for k = 0 .. K - 1, and may have read `tokens[:, ..t + 1 + k]`.
See docs/index_convention.md.
"""

from specheads.base import FrozenBase
from specheads.decode import Decoding, generate
from specheads.drafter import Drafter, Features, Head
from specheads.engine import Engine
from specheads.export.custom_generate import custom_generate
from specheads.heads import load_head
from specheads.measure.offline import offline_logits
from specheads.sampling import Sampling
from specheads.stream import Request, Stream
from specheads.tree import TokenTree

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
