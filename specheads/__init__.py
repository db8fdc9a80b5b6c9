"""Train, measure and export speculator heads for a frozen language model.

One index convention, everywhere: `hidden[:, t]` is the base after reading `tokens[:, t]`. The
base itself predicts `tokens[:, t + 1]`. A head of depth K predicts, from position t,
`tokens[:, t + 2 + k]` for k = 0 .. K - 1, and may have read `tokens[:, ..t + 1 + k]`.
See docs/index_convention.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specheads.base.model import FrozenBase as FrozenBase
    from specheads.commands.compare import compare as compare
    from specheads.commands.distill import distill as distill
    from specheads.commands.evaluate import evaluate as evaluate
    from specheads.commands.export import export as export
    from specheads.commands.push import push as push
    from specheads.commands.serve_features import serve_features as serve_features
    from specheads.commands.simulate import simulate as simulate
    from specheads.commands.train import train as train
    from specheads.commands.tune import tune as tune
    from specheads.core.drafter import Committed as Committed
    from specheads.core.drafter import Drafter as Drafter
    from specheads.core.drafter import Features as Features
    from specheads.core.drafter import Head as Head
    from specheads.core.drafter import Memory as Memory
    from specheads.core.tree import TokenTree as TokenTree
    from specheads.decoding.engine import Engine as Engine
    from specheads.decoding.engine import Stream as Stream
    from specheads.decoding.generate import Decoding as Decoding
    from specheads.decoding.generate import generate as generate
    from specheads.decoding.request import Request as Request
    from specheads.decoding.sampling import Sampling as Sampling
    from specheads.export.custom_generate import custom_generate as custom_generate
    from specheads.heads.load import load_head as load_head
    from specheads.measure.offline import offline_logits as offline_logits

_PUBLIC = {
    "base.model": ["FrozenBase"],
    "commands.compare": ["compare"],
    "commands.distill": ["distill"],
    "commands.evaluate": ["evaluate"],
    "commands.export": ["export"],
    "commands.push": ["push"],
    "commands.serve_features": ["serve_features"],
    "commands.simulate": ["simulate"],
    "commands.train": ["train"],
    "commands.tune": ["tune"],
    "core.drafter": ["Committed", "Drafter", "Features", "Head", "Memory"],
    "core.tree": ["TokenTree"],
    "decoding.sampling": ["Sampling"],
    "decoding.engine": ["Engine", "Stream"],
    "decoding.generate": ["Decoding", "generate"],
    "decoding.request": ["Request"],
    "export.custom_generate": ["custom_generate"],
    "heads.load": ["load_head"],
    "measure.offline": ["offline_logits"],
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
"""Module of each public name. Modules are imported at first use: torch alone takes seconds."""
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

# `specheads.export` is a function, and also the name of a package. Python binds a package as an
# attribute once, at its first import, so import it now and remove the attribute.
import_module("specheads.export")
globals().pop("export", None)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specheads' has no attribute {name!r}")
    return getattr(import_module(f"specheads.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
