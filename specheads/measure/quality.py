"""The base's own quality on held-out text, before and after joint training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.config import Train
from specheads.core.errors import InputError
from specheads.data.documents import cut_windows
from specheads.data.prompts import held_out
from specheads.data.tokenise import UnansweredError, tokenised
from specheads.measure.counts import bootstrap_interval
from specheads.measure.results import BaseQuality, QualityChange, TextQuality
from specheads.runs.progress import bar

NUM_WINDOWS = 64
"""Windows of validation text on which quality is measured."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a base predicts windows of text, one number per window."""

    nats: list[float]
    """Summed cross entropy."""
    right: list[int]
    """Tokens that equal the base's best guess."""
    tokens: list[int]
    """Predicted tokens: all but the first of a window."""

    def summary(self) -> TextQuality:
        """Return nats per token, the share of right tokens, and 95 % intervals over windows."""
        num_tokens = sum(self.tokens)
        return TextQuality(
            cross_entropy=sum(self.nats) / num_tokens,
            cross_entropy_interval=bootstrap_interval(self.nats, self.tokens),
            accuracy=sum(self.right) / num_tokens,
            accuracy_interval=bootstrap_interval(self.right, self.tokens),
            windows=len(self.tokens),
            tokens=num_tokens,
        )


def quality_windows(settings: Train, base: FrozenBase) -> list[list[int]]:
    """Return windows of validation text, at most 512 tokens each."""
    assert base.tokenizer is not None
    most = NUM_WINDOWS
    try:
        documents = tokenised(settings.data, "validation", base.tokenizer, settings.seed)
    except UnansweredError:
        # the corpus has prompts only
        return [
            prompt.tokens
            for prompt in held_out(
                settings.data, "validation", base.tokenizer, 512, most, settings.seed
            )
        ]
    length = min(512, base.max_length)
    while length > 1:
        windows = cut_windows(documents, base.tokenizer, length, settings.seed)
        if found := [window for _, window in islice(windows, most)]:
            return found
        # every document is shorter
        length //= 2
    raise InputError("the base's quality needs validation text, got none; give longer documents")


@torch.no_grad()
def measure_quality(
    base: FrozenBase, windows: Sequence[Sequence[int]], *, progress: bool = False
) -> Quality:
    """Score every next token of windows of text, each window by itself."""
    if not windows or min(map(len, windows)) < 2:
        raise InputError(
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


def compare_quality(before: Quality, after: Quality) -> BaseQuality:
    """Return the `base_quality` section of results.json.

    `change` is the difference on the same windows in nats per token; above zero the base has
    become worse.
    """
    added = [late - early for early, late in zip(before.nats, after.nats, strict=True)]
    return BaseQuality(
        before=before.summary(),
        after=after.summary(),
        change=QualityChange(
            cross_entropy=sum(added) / sum(before.tokens),
            interval=bootstrap_interval(added, before.tokens),
        ),
    )
