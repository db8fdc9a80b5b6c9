"""The base's own quality on held-out text, before and after joint training."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data.documents import cut_windows
from specheads.data.prompts import held_out_prompts
from specheads.data.tokenise import UnansweredError, tokenise_corpus
from specheads.measure.counts import bootstrap_interval
from specheads.measure.results import TextQuality
from specheads.runs.progress import progress_bar

NUM_WINDOWS = 64
"""Windows of validation text on which quality is measured."""
Scores = list[tuple[float, int]]
"""For each window: summed cross entropy in nats, and predicted tokens: all but the first."""


def quality_windows(base: BaseEnds, corpus: DataSettings, seed: int) -> list[list[int]]:
    """Return windows of validation text, at most 512 tokens each."""
    tokenizer = base.tokenizer_for("the base's quality")
    try:
        documents = tokenise_corpus(corpus, "validation", tokenizer, seed)
    except UnansweredError:
        # the corpus has prompts only
        prompts = held_out_prompts(corpus, "validation", tokenizer, 512, NUM_WINDOWS, seed)
        return [prompt.tokens for prompt in prompts]
    length = min(512, base.max_length)
    while length > 1:
        rows = cut_windows(documents, tokenizer, length, seed)
        if windows := [window for _, window in islice(rows, NUM_WINDOWS)]:
            return windows
        # every document is shorter
        length //= 2
    raise InputError("the base's quality needs validation text, got none; give longer documents")


@torch.no_grad()
def measure_quality(
    base: FrozenBase, windows: Sequence[Sequence[int]], *, progress: bool = False
) -> Scores:
    """Score every next token of windows of text, each window by itself."""
    scores = []
    for window in progress_bar(windows, "base quality", progress):
        tokens = torch.tensor(window, device=base.device)
        logits = base.logits_of(base.read(tokens[None]).hidden[0, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats = F.cross_entropy(logits, tokens[1:], reduction="sum").item()
        scores.append((nats, len(tokens) - 1))
    return scores


def compare_quality(before: Scores, after: Scores) -> dict[str, TextQuality]:
    """Return the `base_quality` section of results.json.

    `change` is the difference on the same windows; above zero the cross entropy has become worse.
    """
    change = [
        (nats_after - nats_before, num_tokens)
        for (nats_before, num_tokens), (nats_after, _) in zip(before, after, strict=True)
    ]
    return {"before": _summary(before), "after": _summary(after), "change": _summary(change)}


def _summary(scores: Scores) -> TextQuality:
    nats, tokens = zip(*scores, strict=True)
    interval = bootstrap_interval(nats, tokens)
    return TextQuality(cross_entropy=sum(nats) / sum(tokens), cross_entropy_interval=interval)
