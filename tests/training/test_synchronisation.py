"""A training step synchronises once, for the number of scored rows."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core import machine
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for, kinds
from specheads.training import objective as objectives
from specheads.training.objective import Objective, label_counts
from specheads.training.schedule import PlacedPhase
from specheads.training.settings import Phase
from specheads.training.teacher import Step, Teacher
from tests import tiny
from tests.meta import META, Waits


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@pytest.mark.parametrize("weighting", ["geometric", "dpace"])
@pytest.mark.parametrize("kind", kinds())
def test_training_step_synchronises_once(kind, weighting, monkeypatch):
    monkeypatch.setattr(objectives, machine.to_device.__name__, uploaded)
    base = tiny.base()
    head = build_for({"kind": kind}, base).to(base.dtype).to(META).train()
    model: Any = copy.deepcopy(base.model)
    far = FrozenBase(model.to(META), owned=False)
    teacher = Teacher(far, head)
    teacher.begin()
    settings = Phase(
        steps=4, batch_size=2, sequence_length=32, loss="lk_hybrid", weighting=weighting
    )
    phase = PlacedPhase("corpus", settings, 0)
    tokens = torch.zeros(2, 32, dtype=torch.long, device=META)
    counted = torch.ones(2, 32, dtype=torch.bool, device=META)
    # without document ids transformers checks whether rows are packed
    documents = torch.zeros_like(tokens)
    with Waits() as waits:
        counts = label_counts(head, tokens, documents, counted, settings)
        batch = TokenBatch(tokens, counted, documents)
        step = Step(phase, 0, 0, batch, counted, counts)
        loss, _ = teacher.losses(step, Objective(head))
        loss.backward()
    assert waits.found == {"nonzero": 1}
