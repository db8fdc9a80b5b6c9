"""Recorded verifications, with attention in two parts, equal eager ones under one mask."""

from itertools import product

import pytest
import torch

from specheads.base.paged import PagedKVCache
from tests import tiny
from tests.base.test_cache import outputs
from tests.slow import slow_except


@pytest.mark.parametrize(
    ("architecture", "paged"),
    slow_except(
        [*zip(tiny.ARCHITECTURES, (False, True) * 4, strict=True)],
        product(tiny.ARCHITECTURES, (False, True)),
    ),
)
def test_recorded_verifications_equal_eager_ones(architecture: str, paged: bool) -> None:
    base, eager = tiny.own_base(architecture), tiny.base(architecture)
    base.forwards.record()
    assert base.forwards.compiled_layers
    pool = base.pool(64, block_size=4)
    # the second time replays what the first recorded
    for _ in range(2):
        rows = outputs(base, PagedKVCache(pool, 3) if paged else base.cache(3, 128))
        for row, expected in zip(rows, outputs(eager, eager.cache(3, 128)), strict=True):
            atol = 1e-9 * float(expected.abs().max())
            torch.testing.assert_close(row, expected, rtol=0, atol=atol)
