"""When a chain stops: a threshold on a probability, the head's own or one learned from traces.

Source: Mamou et al. 2024, arXiv:2405.04304 (DISCO).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate, entropy
from specheads.measure.offline import drafted_from

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Confidences that are tried."""

LEAST = 1.01
"""Gain over a chain that never stops, below which a stop is not worth the asking."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a chain's drafts along one text looked like, greedily: (place, depth) each."""

    log_probs: Tensor
    entropies: Tensor
    right: Tensor
    """Whether the base said the best guess, given the text before it."""
    known: Tensor
    """Whether the text goes on as far."""


@torch.inference_mode()
def trace(base: FrozenBase, head: Head, prompt: list[int], continuation: list[int]) -> Trace:
    """Return the trace of a text that the base wrote; it needs two new tokens at least."""
    text = torch.tensor([prompt + continuation], device=base.device)
    places, first = len(continuation) - 1, len(prompt) - 1
    shape = places, head.depth
    found = Trace(*(torch.zeros(shape, dtype=torch.float64) for _ in range(2)),
                  *(torch.zeros(shape, dtype=torch.bool) for _ in range(2)))  # fmt: skip
    features = base.read(text, head.aux_layers)
    anchors = drafted_from(text, first, places)
    for level, state in enumerate(head.states(features, text, anchors)):
        count = max(places - level, 0)
        logs = head.logits(state[0, first : first + count], level).double().log_softmax(-1)
        best = logs.max(-1)
        answers = text[0, first + 2 + level : first + 2 + level + count]
        found.log_probs[:count, level] = best.values.cpu()
        found.entropies[:count, level] = entropy(logs).cpu()
        found.right[:count, level] = (head.to_tokens(best.indices) == answers).cpu()
        found.known[:count, level] = True
    return found


def learn(traces: Sequence[Trace]) -> Estimate:
    """Return the logistic regression of whether a token is right that is reached at all."""
    rows, wanted = [], []
    for one in traces:
        for level in range(one.right.shape[1]):
            # tokens below a wrong one are never asked about
            reached = one.known[:, level] & one.right[:, :level].all(1)
            logs, entropies = one.log_probs[reached, level], one.entropies[reached, level]
            levels = torch.full_like(logs, level)
            rows.append(torch.stack([torch.ones_like(logs), logs, entropies, levels], dim=1))
            wanted.append(one.right[reached, level].double())
    inputs, right = torch.cat(rows), torch.cat(wanted)
    weights = torch.zeros(4, dtype=torch.float64)
    # Newton's steps, held back a little so that traces without a mistake have an answer too
    ridge = 1e-2 * torch.eye(4, dtype=torch.float64)
    for _ in range(30):
        chance = (inputs @ weights).sigmoid()
        slope = inputs.T @ (right - chance) - ridge @ weights
        bend = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + ridge
        weights = weights + torch.linalg.solve(bend, slope).clamp(-5, 5)
    bias, log_prob, weight, level = weights.tolist()
    return Estimate(bias=bias, log_prob=log_prob, entropy=weight, level=level)


def best_stop(
    traces: Sequence[Trace], estimate: Estimate | None, cost: StepCost, context: int | float
) -> policies.Static | None:
    """Return the chain whose threshold gives the most tokens a second; None for never to stop.

    Replay is exact: a chain that stops is a chain of that length there.
    """
    depth = traces[0].right.shape[1]
    rates = {one: _rate(traces, one, estimate, cost, context) for one in (0.0, *THRESHOLDS)}
    confidence = max(rates, key=lambda one: rates[one])
    if rates[confidence] < LEAST * rates[0.0]:
        return None
    paths = [(0,) * length for length in range(1, depth + 1)]
    name = "threshold" if estimate is None else "learned stop"
    return policies.Static(paths, name, confidence, estimate)


def _rate(
    traces: Sequence[Trace],
    confidence: float,
    estimate: Estimate | None,
    cost: StepCost,
    context: int | float,
) -> float:
    """Return tokens a second of a chain that stops below this confidence, a row at a time."""
    tokens, seconds = 0, 0.0
    for one in traces:
        chances = one.log_probs.exp()
        if estimate is not None:
            levels = enumerate(zip(one.log_probs.T, one.entropies.T, strict=True))
            chances = torch.stack([estimate(*both, level) for level, both in levels], dim=1)
        goes_on = (chances >= confidence)[:, :-1].int().cumprod(1).sum(1)
        lengths = (1 + goes_on).tolist()
        right = one.right.int().cumprod(1).sum(1).tolist()
        place = 0
        while place < len(lengths):
            drafted = lengths[place]
            accepted = min(right[place], drafted, len(lengths) - place - 1)
            seconds += cost.seconds(1, context, drafted + 1, drafted)
            tokens += accepted + 1
            place += accepted + 1
    return tokens / seconds
