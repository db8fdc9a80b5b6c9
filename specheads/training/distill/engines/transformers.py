"""transformers' own `generate`, a batch at a time: what any other engine is measured against."""

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
from specheads.training.distill.engine import Answer, Ask, Writing


class Batches:
    """Has a base write in batches; the next begins when the longest text of one has ended.

    Tokens are chosen as our own engine chooses them, each text by its own seed: what is written
    does not depend on the batch, up to ties in rounding. Not for several threads.
    """

    def __init__(self, base: FrozenBase, batch_size: int, max_length: int) -> None:
        self.base, self.batch_size, self.max_length = base, batch_size, max_length

    def answers(self, pull: Callable[[], Ask | None]) -> Generator[Answer, None, None]:
        """Yield answers, as `Engine.answers`; a text without room for a token is empty."""
        while asked := self._asked(pull):
            yield from (Answer(ask.number, [], "length") for ask in asked if self._room(ask) <= 0)
            if fitting := [ask for ask in asked if self._room(ask) > 0]:
                yield from self._write(fitting)

    def _asked(self, pull: Callable[[], Ask | None]) -> list[Ask]:
        asked: list[Ask] = []
        while len(asked) < self.batch_size and (ask := pull()) is not None:
            asked.append(ask)
        return asked

    def _room(self, ask: Ask) -> int:
        return min(ask.new_tokens, self.max_length - len(ask.tokens))

    @torch.inference_mode()
    def _write(self, asked: list[Ask]) -> list[Answer]:
        """Return what the base writes after each, cut at its limit and after its end."""
        model, ends = self.base.model, self.base.eos_ids
        longest, room = max(len(ask.tokens) for ask in asked), max(map(self._room, asked))
        tokens, mask = _padded(asked, longest)
        inputs = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
        settings = GenerationConfig(
            max_new_tokens=room,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else None,
        )
        chosen = LogitsProcessorList()
        if not all(ask.sampling.greedy for ask in asked):
            chosen.append(_Chosen(asked, longest + room, self.base))
        with without_generation_config(model):
            written = cast(Any, model).generate(
                **inputs, generation_config=settings, logits_processor=chosen
            )
        rows = written[:, longest:].tolist()
        return [
            _answer(ask, row[: self._room(ask)], ends) for ask, row in zip(asked, rows, strict=True)
        ]


def build(how: Writing) -> Batches:
    """Return an engine over the base that is loaded already, which it does not change."""
    context = how.base.max_length
    return Batches(how.base, how.batch_size, min(how.max_length or context, context))


class _Chosen(LogitsProcessor):
    """Leaves each row the one token that our own loop would choose there.

    transformers draws from one generator for a whole batch, and has one setting for all rows.
    """

    def __init__(self, asked: list[Ask], capacity: int, base: FrozenBase) -> None:
        text = torch.zeros(len(asked), capacity, dtype=torch.long)
        for row, ask in enumerate(asked):
            text[row, : len(ask.tokens)] = torch.tensor(ask.tokens)
        lengths = torch.tensor([len(ask.tokens) for ask in asked])
        last = text.gather(1, lengths[:, None] - 1).to(base.device)
        # the last token of the prompt stays the root: `rows` knows the text after it
        self.root = TokenTree(last, torch.full_like(last, -1))
        self.rows = SamplingState(
            [ask.sampling for ask in asked],
            (lengths - 1).to(base.device),
            text.to(base.device),
            base.vocab_size,
            dtype=base.dtype,
        )

    def __call__(
        self, input_ids: Int[Tensor, "batch time"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return scores of which one a row is not minus infinity."""
        del input_ids
        ancestors = self.root.ancestors()
        token = accept.match_rule(self.root, scores[:, None], ancestors, self.rows).bonus[:, None]
        self.rows.advance(token, self.rows.lengths + 1, [1] * len(token))
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _padded(
    asked: list[Ask], longest: int
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
    """Return the texts and what to attend to, padded on the left."""
    missing = [longest - len(ask.tokens) for ask in asked]
    rows = [[0] * gap + ask.tokens for gap, ask in zip(missing, asked, strict=True)]
    places = torch.arange(longest)
    return torch.tensor(rows), (places >= torch.tensor(missing)[:, None]).long()


def _answer(ask: Ask, tokens: list[int], ends: tuple[int, ...]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    if end is None:
        return Answer(ask.number, tokens, "length")
    return Answer(ask.number, tokens[: end + 1], "eos")
