"""Text engine with transformers' `generate`, one batch at a time: the reference engine."""

from collections.abc import Generator
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from specheads.base.loading import without_generation_config
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.tree import TokenTree
from specheads.decoding import accept
from specheads.decoding.sampling import SamplingState
from specheads.training.distill.engines import Answer, GenerationRequest, Pull, TextEngine
from specheads.training.settings import Distill


def build(
    settings: Distill, base: FrozenBase, head: Head | None = None, max_length: int = 0
) -> TextEngine:
    """Return an engine with the loaded base, which it does not change.

    The next batch starts when the longest text of the batch has ended. Sampling is that of the
    local engine with a seed per text, so the text does not depend on the batch, up to ties in
    rounding.
    """
    del head, max_length
    return partial(_answers, settings.batch_size, base)


def _answers(batch_size: int, base: FrozenBase, pull: Pull) -> Generator[Answer, None, None]:
    while requests := list(islice(iter(pull, None), batch_size)):
        yield from _write(base, requests)


@torch.inference_mode()
def _write(base: FrozenBase, requests: list[GenerationRequest]) -> list[Answer]:
    """Return the answers, truncated at the limit and after the end token."""
    model, ends = base.model, base.eos_ids
    longest = max(len(request.tokens) for request in requests)
    room = max(request.new_tokens for request in requests)
    rows = [torch.tensor(request.tokens, device=model.device) for request in requests]
    inputs = {
        "input_ids": _left_padded(rows),
        "attention_mask": _left_padded([torch.ones_like(row) for row in rows]),
    }
    settings = GenerationConfig(
        max_new_tokens=room,
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else None,
    )
    chosen = LogitsProcessorList()
    if not all(request.sampling.greedy for request in requests):
        chosen.append(_Chosen(requests, room, base))
    with without_generation_config(model):
        written = cast(Any, model).generate(
            **inputs, generation_config=settings, logits_processor=chosen
        )
    answers = []
    for request, row in zip(requests, written[:, longest:].tolist(), strict=True):
        tokens = row[: request.new_tokens]
        end = next((place for place, token in enumerate(tokens, 1) if token in ends), None)
        answers.append(Answer(request.number, tokens[:end], "eos" if end else "length"))
    return answers


_left_padded = partial(pad_sequence, batch_first=True, padding_side="left")


class _Chosen(LogitsProcessor):
    """Masks all tokens except the one that the local engine would sample.

    transformers has one random generator and one setting for a whole batch.
    """

    def __init__(self, requests: list[GenerationRequest], room: int, base: FrozenBase) -> None:
        rows = [torch.tensor(request.tokens, device=base.device) for request in requests]
        text = F.pad(pad_sequence(rows, batch_first=True), (0, room))
        lengths = torch.tensor([len(row) for row in rows], device=base.device)
        last = text.gather(1, lengths[:, None] - 1)
        # the last prompt token is the root
        self.root = TokenTree(last, torch.full_like(last, -1))
        sampling = [request.sampling for request in requests]
        self.rows = SamplingState(sampling, lengths - 1, text, base.vocab_size, dtype=base.dtype)

    def __call__(
        self, input_ids: Int[Tensor, "batch time"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return scores with one finite value per row."""
        del input_ids
        ancestors = self.root.ancestors()
        token = accept.match_rule(self.root, scores[:, None], ancestors, self.rows).bonus[:, None]
        self.rows.advance(token, self.rows.lengths + 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)
