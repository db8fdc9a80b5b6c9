"""Decoding frees its tensors when it ends, not when Python collects cycles."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from specheads.base.paged import BlockPool
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from specheads.decoding.trees import policies
from tests import tiny
from tests.decoding.test_goodput import DRAFTERS

USUAL = "eagle3", "hybrid", "window", ""
NAMES = [
    *USUAL,
    *(pytest.param(one, marks=pytest.mark.slow) for one in DRAFTERS if one not in USUAL),
]


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Disable the collection of cycles, and ignore objects that existed before."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def left_by(act: Callable[[], object]) -> int:
    """Return how many tensors are alive afterwards that were not before, once all is warm."""
    act()
    gc.collect()
    # ignore the objects that exist now
    gc.freeze()
    act()
    # asking an object for its class wakes some that warn
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("name", NAMES)
def test_texts_free_all_tensors(name: str):
    drafter, (tree, *_) = DRAFTERS[name]() if name else (None, (policies.NOTHING,))
    how = {"max_new_tokens": 12, "stop_at_eos": False}
    assert left_by(lambda: generate(tiny.base(), drafter, tiny.prompts(), tree=tree, **how)) == 0


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_requests_that_join_and_leave_free_all_tensors(name: str, pooled: bool):
    drafter, (tree, *_) = DRAFTERS[name]() if name else (None, (policies.NOTHING,))
    pool: BlockPool | None = tiny.base().pool(40) if pooled else None
    engine = Engine(tiny.base(), drafter, tree=tree, max_batch=3, max_length=60, pool=pool)

    def serve() -> None:
        for place in range(6):
            prompt = tiny.prompts()[place % 2][:20]
            engine.submit(Request(prompt=prompt, max_new_tokens=4 + 3 * place, eos_ids=()))
            engine.step()
        engine.run()

    assert left_by(serve) == 0
