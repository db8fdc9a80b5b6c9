"""Text engine with transformers' `generate`, one batch at a time: the reference engine."""

from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from specheads.base.loading import without_generation_config
from specheads.base.model import FrozenBase
from specheads.core.tree import TokenTree
from specheads.decoding import accept
from specheads.decoding.sampling import SamplingState
from specheads.training.distill.engine import Answer, EngineOptions, GenerationRequest


class Batches:
    """Generates in batches; the next one starts when the longest text of the batch has ended.

    Sampling is that of the local engine with a seed per text, so the text does not depend on the
    batch, up to ties in rounding. Not thread-safe.
    """

    def __init__(self, base: FrozenBase, batch_size: int, max_length: int) -> None:
        self.base, self.batch_size, self.max_length = base, batch_size, max_length

    def answers(
        self, pull: Callable[[], GenerationRequest | None]
    ) -> Generator[Answer, None, None]:
        """Yield answers, as `TextEngine.answers`; a text without room for a token is empty."""
        while requests := self._next_batch(pull):
            yield from (
                Answer(request.number, [], "length")
                for request in requests
                if self._room(request) <= 0
            )
            if fitting := [request for request in requests if self._room(request) > 0]:
                yield from self._write(fitting)

    def _next_batch(self, pull: Callable[[], GenerationRequest | None]) -> list[GenerationRequest]:
        requests: list[GenerationRequest] = []
        while len(requests) < self.batch_size and (request := pull()) is not None:
            requests.append(request)
        return requests

    def _room(self, request: GenerationRequest) -> int:
        return min(request.new_tokens, self.max_length - len(request.tokens))

    @torch.inference_mode()
    def _write(self, requests: list[GenerationRequest]) -> list[Answer]:
        """Return the answers, truncated at the limit and after the end token."""
        model, ends = self.base.model, self.base.eos_ids
        longest, room = (
            max(len(request.tokens) for request in requests),
            max(map(self._room, requests)),
        )
        tokens, mask = _padded(requests, longest)
        inputs = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
        settings = GenerationConfig(
            max_new_tokens=room,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else None,
        )
        chosen = LogitsProcessorList()
        if not all(request.sampling.greedy for request in requests):
            chosen.append(_Chosen(requests, longest + room, self.base))
        with without_generation_config(model):
            written = cast(Any, model).generate(
                **inputs, generation_config=settings, logits_processor=chosen
            )
        rows = written[:, longest:].tolist()
        return [
            _answer(request, row[: self._room(request)], ends)
            for request, row in zip(requests, rows, strict=True)
        ]


def build(options: EngineOptions) -> Batches:
    """Return an engine with the loaded base, which it does not change."""
    context = options.base.max_length
    return Batches(options.base, options.batch_size, min(options.max_length or context, context))


class _Chosen(LogitsProcessor):
    """Masks all tokens except the one that the local engine would sample.

    transformers has one random generator and one setting for a whole batch.
    """

    def __init__(self, requests: list[GenerationRequest], capacity: int, base: FrozenBase) -> None:
        text = torch.zeros(len(requests), capacity, dtype=torch.long)
        for row, request in enumerate(requests):
            text[row, : len(request.tokens)] = torch.tensor(request.tokens)
        lengths = torch.tensor([len(request.tokens) for request in requests])
        last = text.gather(1, lengths[:, None] - 1).to(base.device)
        # the last prompt token is the root
        self.root = TokenTree(last, torch.full_like(last, -1))
        self.rows = SamplingState(
            [request.sampling for request in requests],
            (lengths - 1).to(base.device),
            text.to(base.device),
            base.vocab_size,
            dtype=base.dtype,
        )

    def __call__(
        self, input_ids: Int[Tensor, "batch time"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return scores with one finite value per row."""
        del input_ids
        ancestors = self.root.ancestors()
        token = accept.match_rule(self.root, scores[:, None], ancestors, self.rows).bonus[:, None]
        self.rows.advance(token, self.rows.lengths + 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _padded(
    requests: list[GenerationRequest], longest: int
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
    """Return the left-padded texts and their attention mask."""
    missing = [longest - len(request.tokens) for request in requests]
    rows = [[0] * gap + request.tokens for gap, request in zip(missing, requests, strict=True)]
    places = torch.arange(longest)
    return torch.tensor(rows), (places >= torch.tensor(missing)[:, None]).long()


def _answer(request: GenerationRequest, tokens: list[int], ends: tuple[int, ...]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    if end is None:
        return Answer(request.number, tokens, "length")
    return Answer(request.number, tokens[: end + 1], "eos")
