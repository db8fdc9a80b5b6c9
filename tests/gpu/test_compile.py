"""Compiled verification gives the tokens of eager verification; on CUDA these are CUDA graphs.

Every case runs in a process of its own, as users run it: the compiler cannot trace the type checks
that pytest installs.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specheads.base.cache import KVCache
from specheads.base.forward import logits_and_output
from specheads.base.model import FrozenBase
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from tests import tiny
from tests.base.test_compile import oracle

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
TREE = policies.Static([(0,), (1,), (0, 0), (0, 1)])


def compiled_base(architecture: str, device: torch.device) -> FrozenBase:
    """Return a base whose graphs have fixed shapes, as CUDA graphs have.

    A CPU has no CUDA graphs: there the graphs run as plain torch code over a static cache.
    """
    dtype = torch.float32
    if device.type == "cuda":
        return tiny.own_base(architecture, dtype=dtype, device=device, compile=True)
    base = tiny.own_base(architecture, dtype=dtype, device=device)
    base.forwards.compiled_answer = torch.compile(
        logits_and_output, backend="eager", dynamic=False, fullgraph=True
    )

    def cache(batch: int, capacity: int) -> KVCache:
        return KVCache(base.num_layers, batch, capacity, device, static=True)

    base.cache = cache
    return base


def decode_both_ways(architecture: str, name: str) -> None:
    """Decode one prompt at two lengths, then several that end one after another."""
    device = torch.device(name)
    plain = tiny.base(architecture, dtype=torch.float32, device=device)
    base = compiled_base(architecture, device)
    for prompts, length in (
        (tiny.prompts()[:1], 24),
        (tiny.prompts()[:1], 60),
        (tiny.prompts(), 30),
    ):
        settings = {"max_new_tokens": length, "tree": TREE}
        decoding = generate(base, oracle(plain, prompts, length), prompts, **settings)
        assert decoding == generate(plain, oracle(plain, prompts, length), prompts, **settings)
    if device.type == "cuda":
        assert base.static


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "granite"])
def test_compiled_graphs_give_the_text_of_eager_code(architecture, device):
    code = "from tests.gpu.test_compile import decode_both_ways as run; "
    code += f"run({architecture!r}, {str(device)!r})"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
