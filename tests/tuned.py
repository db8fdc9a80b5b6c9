"""What tune might have measured of a head on this machine."""

from dataclasses import replace
from typing import Any

import torch

from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees.tuned import AcceptanceRates, Machine, MatchRates, Tuned, TunedTree

FORWARD = ForwardCost(fixed=1e-3, token=1e-4, context=1e-6)
NEGATIVE = replace(FORWARD, token=-1.0)
MATCH = MatchRates(share=0.3, rates=[0.5] * 10)


def tree(batch: int = 1, context: int = 32, kind: str = "static", **more: Any) -> TunedTree:
    more = {"paths": [[0], [1]], "num_nodes": 3, "depth": 1} | more if kind == "static" else more
    gain = {"tokens_per_forward": 1.5, "predicted_speedup": 1.2}
    return TunedTree(batch=batch, context=context, kind=kind, **gain, **more)


def tuned(*trees: TunedTree, machine: Machine | None = None) -> Tuned:
    return Tuned(
        machine=machine or Machine.of(torch.device("cpu"), torch.float64),
        base="",
        cost=StepCost(verify=FORWARD, draft=FORWARD),
        cost_error={"points": 9, "median": 0.01, "largest": 0.05},
        acceptance=AcceptanceRates(per_depth=[0.5, 0.4]),
        trees=list(trees) or [tree()],
    )
