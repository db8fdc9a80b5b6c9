"""A training step synchronises once, for the number of scored rows.

See tests/decoding/test_synchronisation.py for how the device "meta" shows that.
"""

import copy
import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

META = torch.device("meta")


class Waits(TorchDispatchMode):
    """Records synchronisations of a GPU: reads of values, and copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.ops.aten.nonzero.default:
            self.found["nonzero"] += 1
            return torch.empty((8, args[0].ndim), dtype=torch.long, device=META)
        out = func(*args, **(kwargs or {}))
        read, made = (
            {one.device.type for one in tree_leaves(values) if isinstance(one, Tensor)}
            for values in ((args, kwargs), out)
        )
        if "cpu" in read and "meta" in read | made:
            frames = [frame for frame in traceback.extract_stack() if "specheads" in frame.filename]
            self.found[f"{func} of {frames[-1].filename}:{frames[-1].lineno}"] += 1
        return out


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@pytest.mark.parametrize("weighting", ["geometric", "dpace"])
@pytest.mark.parametrize("kind", kinds())
def test_training_step_synchronises_once(
    kind: str, weighting: str, monkeypatch: pytest.MonkeyPatch
):
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
