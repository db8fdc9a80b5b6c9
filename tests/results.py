"""Results to show, where nothing was measured."""

from typing import Any

from specheads.core.files import from_json
from specheads.measure.results import Results

BARE: dict[str, Any] = {
    "head": {"kind": "medusa", "depth": 2, "parameters": 10},
    "base": {"name": "tiny", "revision": "", "fingerprint": "", "parameters": 1},
    "prompts": {"name": "three", "version": "1", "count": 3},
    "settings": {"temperature": 0.0, "tree": "static", "num_nodes": 9, "batch_size": 1}
    | {"dtype": "float64", "device": "cpu", "seed": 0, "max_new_tokens": 16},
    "provenance": {},
}


def bare(**sections: dict[str, Any]) -> Results:
    """Return results without any measurement; sections in part replace those there are."""
    return from_json(
        Results, BARE | {name: BARE.get(name, {}) | some for name, some in sections.items()}
    )
