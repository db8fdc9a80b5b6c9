"""A head in the process of transformers' own `generate`. See docs/transformers.md."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specheads.base.model import FrozenBase
from specheads.base.selfcheck import check
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.decoding.acceptance import rules
from specheads.decoding.acceptance.sampling import each_prompt
from specheads.decoding.engine import Engine
from specheads.decoding.generate import refuse_unfit
from specheads.decoding.request import Request, Stream
from specheads.decoding.trees import policies
from specheads.export.plugins.generate_call import Call, read_call
from specheads.heads.load import fit

Generated = Tensor | GenerateDecoderOnlyOutput

_tried: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models that have shown that they read trees right, as long as they are alive."""


def custom_generate(
    head: Drafter,
    *,
    tree: policies.TreePolicy | None = None,
    acceptance: str | rules.AcceptanceRule = "match",
    coupled: bool = True,
    force: bool = False,
) -> Callable[..., Generated]:
    """Return what `model.generate(..., custom_generate=...)` calls in place of its own loop.

    The tokens are those that `generate` would give without it, several a forward where the head
    guesses right; sampled ones have the same distribution, but with the rule `typical`. What it
    cannot do it refuses when called. The head moves to the device and dtype of the model it is
    called with; `force` takes one that was trained on other weights too. `tree`, `acceptance` and
    `coupled` are as for `specheads.generate`: None is the head's tuned tree, or a chain.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch time"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Generated:
        """Decode as transformers calls it: what it cannot take is refused by `read_call`."""
        call = read_call(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        base = _base(model)
        if isinstance(head, Head):
            # every time: the model may have moved, or it may be another one
            with torch.inference_mode(False):
                fit(head, base, force=force)
        engine = _engine(base, head, call, tree, acceptance, coupled)
        rows = _decode(engine, call, input_ids)
        width = max(map(len, rows))
        padded = [row + [call.pad_id] * (width - len(row)) for row in rows]
        text = torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)
        sequences = cast(torch.LongTensor, text)
        return GenerateDecoderOnlyOutput(sequences=sequences) if call.as_dict else sequences

    return decode


def _base(model: PreTrainedModel) -> FrozenBase:
    """Return the base that a user's model is, and leave the model as it is."""
    if any(module.training for module in model.modules()):
        raise InputError("decoding needs a model in eval mode; call model.eval() first")
    base = FrozenBase(model, name=model.name_or_path or "", owned=False)
    if model not in _tried:
        check(base)
        _tried.add(model)
    return base


def _engine(
    base: FrozenBase,
    head: Drafter,
    call: Call,
    tree: policies.TreePolicy | None,
    acceptance: str | rules.AcceptanceRule,
    coupled: bool,
) -> Engine:
    """Return an engine with room for what is asked for."""
    refuse_unfit(base, call.prompts, call.max_new_tokens)
    return Engine(
        base,
        head,
        tree=tree,
        acceptance=acceptance,
        max_batch=len(call.prompts),
        max_length=max(map(len, call.prompts)) + call.max_new_tokens,
        coupled=coupled,
    )


def _decode(engine: Engine, call: Call, input_ids: Int[Tensor, "batch time"]) -> list[list[int]]:
    """Return the new tokens of each row."""
    each = each_prompt(call.sampling, len(call.prompts))
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=call.max_new_tokens,
            sampling=sampling,
            eos_ids=call.eos_ids,
        )
        for prompt, sampling in zip(call.prompts, each, strict=True)
    ]
    rows = [
        _Row(engine.submit(request), call, text)
        for request, text in zip(requests, input_ids, strict=True)
    ]
    more = True
    while more:
        more = engine.step()
        for row in rows:
            row.follow()
    if call.streamer is not None:
        call.streamer.end()
    return [row.tokens for row in rows]


class _Row:
    """What a row has been given, as far as it may: stopping criteria look at every token.

    `text` is the prompt as transformers has it, padding included.
    """

    def __init__(self, stream: Stream, call: Call, text: Int[Tensor, " time"]) -> None:
        self.tokens: list[int] = []
        self._stream, self._call, self._text = stream, call, text
        self._ended = False

    def follow(self) -> None:
        """Take over what the engine has added."""
        for token in self._stream.tokens[len(self.tokens) :]:
            if self._ended:
                return
            self.tokens.append(token)
            if self._call.streamer is not None:
                self._call.streamer.put(torch.tensor([token]))
            if self._call.criteria and self._is_over():
                self._ended = True
                self._stream.cancel()

    def _is_over(self) -> bool:
        new = torch.tensor(self.tokens, device=self._text.device)
        text = torch.cat([self._text, new])[None]
        # transformers gives None too, where scores are not recorded
        return bool(self._call.criteria(text, None).all())  # pyright: ignore[reportArgumentType]
