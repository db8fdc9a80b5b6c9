"""Logits processors that read the whole text of a request, before each node of a tree.

Biases, bad words, penalties and the smallest length are transformers' own processors. Two are here:
transformers has no presence penalty, and its prefix constraint calls the user's function after
drafts that the constraint forbids.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specheads.core.errors import InputError

AllowedTokensFunction = Callable[[int, Tensor], Collection[int] | Tensor]
"""Arguments: the index of the prompt, and the tokens of prompt and answer so far, on the CPU. It
returns the tokens that may follow. It must depend on its arguments alone."""


class PresencePenalty(LogitsProcessor):
    """Subtract from the logits of tokens of the answer so far, as OpenAI's two penalties do."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(
        self, input_ids: Int[Tensor, "node time"], scores: Float[Tensor, "node vocab"]
    ) -> Float[Tensor, "node vocab"]:
        """Subtract `presence` once, and `frequency` for each occurrence."""
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, answer, counts.new_ones(()).expand_as(answer))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class AllowedTokens(LogitsProcessor):
    """Allow the tokens that a function returns for each prefix.

    The function is called once for each prefix of a step, by the draft or by verification. It is
    not called after a token that it forbids or after the end of the text: the base alone would not
    reach such a prefix, so the scores there have no effect.
    """

    def __init__(self, function: AllowedTokensFunction, eos_ids: Sequence[int]) -> None:
        self.function, self.eos_ids = function, {*eos_ids}
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def clear(self) -> None:
        """Forget the prefixes of the step; the next prefix is the text up to the root."""
        self._masks.clear()

    def __call__(
        self, input_ids: Int[Tensor, "node time"], scores: Float[Tensor, "node vocab"]
    ) -> Float[Tensor, "node vocab"]:
        """Set the scores of other tokens to -inf."""
        masks = [self._mask(prefix, scores.shape[-1]) for prefix in input_ids.cpu()]
        full = torch.ones(scores.shape[-1], dtype=torch.bool)
        allowed = torch.stack([full if mask is None else mask for mask in masks])
        allowed = allowed.to(scores.device)
        out = scores.masked_fill(~allowed, -torch.inf)
        # as in transformers: the constraint holds even if nothing else allows its tokens
        nothing = out.amax(-1, keepdim=True).isneginf()
        return torch.where(nothing & allowed, 0.0, out)

    def _mask(self, prefix: Int[Tensor, " time"], vocab_size: int) -> Tensor | None:
        """Return which tokens may follow, or None after a prefix that is never reached."""
        key = tuple(prefix.tolist())
        if key not in self._masks:
            parent = self._masks.get(key[:-1])
            is_reached = parent is not None and key[-1] not in self.eos_ids and parent[key[-1]]
            # the first prefix of a step is the text up to the root
            is_reached = is_reached or not self._masks
            self._masks[key] = self._call(prefix, vocab_size) if is_reached else None
        return self._masks[key]

    def _call(self, prefix: Tensor, vocab_size: int) -> Tensor:
        allowed = self.function(0, prefix.clone())
        # one by one, items of a tensor are slow, and a set must be listed
        token_ids = torch.as_tensor(allowed if isinstance(allowed, Tensor) else list(allowed)).cpu()
        if not len(token_ids):
            raise InputError(
                "prefix_allowed_tokens_fn must allow at least one token, got none after "
                f"{len(prefix)} tokens; allow an end-of-text token there"
            )
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise InputError(
                f"prefix_allowed_tokens_fn must return token ids from 0 to {vocab_size - 1}, got "
                f"{lowest if lowest < 0 else highest}; use this base's own tokenizer"
            )
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        # as in transformers: also 32 bits, or a mask of the vocabulary
        mask[token_ids] = True
        return mask


def build_processors(
    settings: Any, prompt_length: int, eos_ids: Sequence[int], device: torch.device
) -> LogitsProcessorList:
    """Return the processors of one request in transformers' order; `settings` are `Sampling`.

    A repetition penalty alone needs none: a batch applies it at once.
    """
    out, device_name = LogitsProcessorList(), str(device)
    if not settings.has_processors:
        return out
    if settings.logit_bias:
        bias: Any = {_sequence(key): float(value) for key, value in settings.logit_bias.items()}
        out.append(SequenceBiasLogitsProcessor(bias))
    if settings.repetition_penalty != 1:
        out.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    presence, frequency = settings.presence_penalty, settings.frequency_penalty
    if presence or frequency:
        out.append(PresencePenalty(presence, frequency, prompt_length))
    if settings.bad_words:
        out.append(NoBadWordsLogitsProcessor([list(word) for word in settings.bad_words]))
    if settings.min_new_tokens and eos_ids:
        out.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_length, settings.min_new_tokens, list(eos_ids), device_name
            )
        )
    if settings.prefix_allowed_tokens_fn is not None:
        out.append(AllowedTokens(settings.prefix_allowed_tokens_fn, eos_ids))
    return out


# --- checks of settings ------------------------------------------------------------------------


def is_words(value: Any) -> bool:
    """Return whether this is a list of non-empty lists of token ids."""
    return isinstance(value, Sequence) and all(
        isinstance(word, Sequence) and len(word) > 0 and all(map(_is_token, word)) for word in value
    )


def is_bias(value: Any) -> bool:
    """Return whether this maps token ids, or tuples of them, to numbers below infinity."""
    return isinstance(value, Mapping) and all(
        (_is_token(key) or (isinstance(key, tuple) and is_words([key])))
        and isinstance(bias, int | float)
        and bias < float("inf")
        for key, bias in value.items()
    )


def largest_token(settings: Any) -> int:
    """Return the largest token id that biases and bad words name, or -1."""
    words = [*map(_sequence, settings.logit_bias), *settings.bad_words]
    return max((token for word in words for token in word), default=-1)


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _sequence(key: int | tuple[int, ...]) -> tuple[int, ...]:
    return key if isinstance(key, tuple) else (key,)
