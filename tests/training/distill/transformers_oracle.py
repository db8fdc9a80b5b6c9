"""Text that transformers' `generate` writes with the sampling of the local engine."""

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from specheads.base.loading import without_generation_config
from specheads.base.model import FrozenBase
from specheads.core.tree import TokenTree
from specheads.decoding import accept
from specheads.decoding.sampling import SamplingState
from specheads.training.distill.engines import GeneratedAnswer, GenerationRequest

pad_left = partial(pad_sequence, batch_first=True, padding_side="left")


@torch.inference_mode()
def generate_answers(base: FrozenBase, requests: list[GenerationRequest]) -> list[GeneratedAnswer]:
    """Return the answers of one batch, truncated at the limit and after the end token."""
    model, end_ids = base.model, base.eos_ids
    prompt_tokens = max(len(request.tokens) for request in requests)
    new_tokens = max(request.new_tokens for request in requests)
    rows = [torch.tensor(request.tokens, device=model.device) for request in requests]
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=end_ids[0] if end_ids else None,
    )
    with without_generation_config(model):
        tokens = cast(Any, model).generate(
            input_ids=pad_left(rows),
            attention_mask=pad_left([torch.ones_like(row) for row in rows]),
            generation_config=settings,
            logits_processor=LogitsProcessorList([SampledToken(requests, new_tokens, base)]),
        )
    answers = []
    for request, row in zip(requests, tokens[:, prompt_tokens:].tolist(), strict=True):
        row = row[: request.new_tokens]
        end = next((index for index, token in enumerate(row, 1) if token in end_ids), None)
        answers.append(GeneratedAnswer(request.number, row[:end], "eos" if end else "length"))
    return answers


class SampledToken(LogitsProcessor):
    """Masks all tokens except the one that the local engine would sample."""

    def __init__(
        self, requests: list[GenerationRequest], new_tokens: int, base: FrozenBase
    ) -> None:
        rows = [torch.tensor(request.tokens, device=base.device) for request in requests]
        text = F.pad(pad_sequence(rows, batch_first=True), (0, new_tokens))
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
