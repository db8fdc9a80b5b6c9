"""A base used by several threads, and a base whose model changes."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.core.tree import chain
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from tests import tiny


def fresh() -> FrozenBase:
    return FrozenBase(copy.deepcopy(tiny.base().model))


def test_threads_that_share_a_base_get_the_results_of_each_alone():
    inside, most, base, known = 0, 0, fresh(), tiny.continuations()

    def enter(*_: Any) -> None:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        time.sleep(1e-3)

    def leave(*_: Any) -> None:
        nonlocal inside
        inside -= 1

    base.model.base_model.register_forward_pre_hook(enter)
    base.model.base_model.register_forward_hook(leave)
    together = threading.Barrier(2)

    def decode(row: int) -> list[list[int]]:
        together.wait()
        return generate(base, tiny.oracle(3), [tiny.prompts()[row]], max_new_tokens=20).tokens

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(decode, [0, 1]))
    assert said == [[known[row][:20]] for row in (0, 1)]
    # the forwards of the two never overlap
    assert most == 1


def test_a_model_in_training_mode_is_refused_at_the_next_use():
    base, prompts = fresh(), tiny.prompts()
    engine = Engine(base)
    stream = engine.submit(Request(prompt=prompts[0], max_new_tokens=4))
    base.model.train()
    for use in (
        lambda: base.read(torch.tensor([[1, 2]])),
        lambda: base.verify(chain(torch.tensor([[1, 2]])), base.cache(1, 4)),
        lambda: generate(base, None, prompts, max_new_tokens=2),
        engine.run,
    ):
        with pytest.raises(InputError, match=r"training mode; call model\.eval\(\)"):
            use()
    assert stream.finish_reason == "failed"
    base.model.eval()
    assert generate(base, None, prompts, max_new_tokens=4).tokens == [
        text[:4] for text in tiny.continuations()
    ]
