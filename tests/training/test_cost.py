"""FLOPs of a step, as torch counts them."""

import pytest
import torch
from accelerate import Accelerator

from specheads.heads.load import build_for
from specheads.training.cost import flop_counter
from specheads.training.schedule import placed
from specheads.training.settings import Phase, Schedule
from specheads.training.step import Stepper
from specheads.training.teacher import Teacher
from tests import tiny
from tests.packed import alone, texts


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy"])
def test_flops_of_a_step_are_those_of_its_products(loss: str):
    """Forward of the base; forward and backward of the head and the vocabulary projections."""
    base, batch = tiny.base(dtype=torch.float32), alone(texts())
    head = build_for({"kind": "medusa", "depth": 2}, base)
    phase = Phase(text="corpus", steps=1, batch_size=2, sequence_length=40, loss=loss)
    schedule = Schedule(phases={"corpus": phase})
    stepper = Stepper(Teacher(base, head), schedule, Accelerator(cpu=True), 0)
    stepper.teacher.begin()
    with flop_counter() as counter:
        base.read(batch.tokens)
    (where,) = placed(schedule)
    found = stepper.flops(batch, where, 0)
    # rows are padded to a multiple of 128; the base's distribution serves both depths
    vocabulary = 2 * 128 * tiny.VOCAB * base.width
    projections = 2 * 3 + (loss == "soft_cross_entropy")
    own = 2 * 2 * batch.tokens.numel() * base.width**2
    assert found > counter.get_total_flops() + projections * vocabulary + own
    assert found < counter.get_total_flops() + projections * vocabulary + 4 * own
    assert all(value.grad is None for value in head.parameters())
