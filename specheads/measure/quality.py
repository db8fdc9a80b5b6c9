"""The base's own quality, before and after joint training changed it: on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.measure.counts import bootstrap_interval
from specheads.runs.progress import bar


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a base predicts some windows of text, one number a window."""

    nats: list[float]
    """Summed surprise."""
    right: list[int]
    """Tokens that were the base's likeliest."""
    tokens: list[int]
    """Tokens predicted: all of a window but its first."""

    def describe(self) -> dict[str, Any]:
        """Return nats a token, the share of right ones, and 95 % intervals over windows."""
        num_tokens = sum(self.tokens)
        return {
            "cross_entropy": sum(self.nats) / num_tokens,
            "cross_entropy_interval": list(bootstrap_interval(self.nats, self.tokens)),
            "accuracy": sum(self.right) / num_tokens,
            "accuracy_interval": list(bootstrap_interval(self.right, self.tokens)),
            "windows": len(self.tokens),
            "tokens": num_tokens,
        }


@torch.no_grad()
def measure_quality(
    base: FrozenBase, windows: Sequence[Sequence[int]], *, progress: bool = False
) -> Quality:
    """Have the base read windows of text, each by itself, and score every next token.

    Args:
        base: Whose quality it is.
        windows: Token ids, two at least in each.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: There is no window, or one has nothing to predict.
    """
    if not windows or min(map(len, windows)) < 2:
        raise ValueError(
            f"quality needs windows of two tokens at least, got {len(windows)} windows; give more "
            "or longer validation text"
        )
    out = Quality([], [], [])
    for window in bar(windows, "base quality", progress):
        tokens = torch.tensor(window, device=base.device)
        logits = base.logits_of(base.read(tokens[None]).hidden[0, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        out.nats.append(F.cross_entropy(logits, tokens[1:], reduction="sum").item())
        out.right.append(int((logits.argmax(-1) == tokens[1:]).sum()))
        out.tokens.append(len(tokens) - 1)
    return out


def compare(before: Quality, after: Quality) -> dict[str, Any]:
    """Return the `base_quality` section of results.json.

    `change` is paired: the interval is that of the difference on the same windows, nats a token;
    above zero the base has become worse.
    """
    added = [late - early for early, late in zip(before.nats, after.nats, strict=True)]
    return {
        "before": before.describe(),
        "after": after.describe(),
        "change": {
            "cross_entropy": sum(added) / sum(before.tokens),
            "interval": list(bootstrap_interval(added, before.tokens)),
        },
    }
