"""Export heads: layouts for serving engines, upload to the Hub, plug-ins for vLLM and transformers.

The attribute `specheads.export` is the library function, so import from this package by
`from specheads.export import ...`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # lazy, because `import specheads` binds this package and must not import torch
    if name != "export_head":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specheads.export.write import export_head

    return export_head
