"""Conversations through the tokenizer's chat template: what is read, and what the loss counts.

Counted is what the base itself writes behind a generation prompt: an answer and the token that ends
it. See docs/data.md.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.data.answers import squeezed, wrong_mask
from specheads.data.conversations import Conversation, Message, conversation, first_answer
from specheads.data.rendering import ANSWERED, ASKED, Rendering
from specheads.data.shown import marked

__all__ = ["Conversation", "Sample", "Template", "conversation"]

THINKING = re.compile(r"\s|</?think>")
"""What templates put around thoughts, also around none."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A text to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """Which tokens the loss covers."""
    text: str
    """What the tokens say."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer behind what the base had read when it wrote it."""

    message: Message
    prompt: str
    answer: str
    """Up to the token that ends it, and with that."""
    rest: str
    """What the template adds."""


class Template:
    """The chat template of a tokenizer.

    Raises:
        ValueError: The tokenizer has none, or cannot tell which characters a token stands for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str = "a conversation") -> None:
        self._tokenizer, self._rendering = tokenizer, Rendering(tokenizer, where)

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits that change when conversations would be written differently."""
        return self._rendering.fingerprint

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        where: str = "a conversation",
    ) -> Sample:
        """Return a conversation up to its last answer: the last of its `samples`."""
        return self.samples(messages, tools, where)[-1]

    def samples(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        where: str = "a conversation",
    ) -> list[Sample]:
        """Return a conversation as texts that count every answer to the user once, in their order.

        It is one text where the template keeps what stands before an answer. Where it does not, as
        one that strips earlier thoughts, an answer that reads otherwise later on has a text of its
        own: what the base had read when it wrote it. What follows the last answer is left out.

        Raises:
            ValueError: Nobody answers, the template does not take the messages, or it cannot be
                told from it what the assistant wrote. The text with its mask is in `details`.
        """
        roles = [message["role"] for message in messages]
        first = first_answer(messages)
        places = [place for place in range(first, len(roles)) if roles[place] == "assistant"]
        if not places:
            raise InputError(
                f"training on a conversation needs an answer of the assistant, {where} has none; "
                "remove the row, or have the base answer it in a distilled phase"
            )
        texts: list[tuple[str, list[_Turn]]] = []
        for place in reversed(places):
            turn = self._turn(messages[: place + 1], tools, where)
            if not texts or not texts[-1][0].startswith(turn.prompt + turn.answer):
                texts.append((turn.prompt + turn.answer + turn.rest, []))
            texts[-1][1].insert(0, turn)
        return [self._sample(text, turns, where) for text, turns in reversed(texts)]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        where: str = "a conversation",
    ) -> list[int]:
        """Return the token ids behind which the base answers: they end with a generation prompt."""
        return self._rendering.read(self._rendering.text(messages, tools, where, ask=True))[0]

    def next_prompt(
        self,
        tokens: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        where: str = "a conversation",
    ) -> list[int]:
        """Return a prompt and the base's answer to it, `tokens`, with what is said next behind.

        The answer keeps its ids, and gets the token that ends it where it was cut off. `messages`
        is the whole conversation: the answer as text, and what is said next. Where the template
        shows the base something else than what it wrote, as one that strips earlier thoughts, the
        conversation is rendered anew, and the result does not begin with `tokens`.
        """
        rendering = self._rendering
        last = max(place for place, one in enumerate(messages) if one["role"] == "assistant")
        before = rendering.text(messages[:last], tools, where, ask=True)
        after = rendering.text(messages, tools, where, ask=True)
        stand_in = [*messages[:last], {"role": "assistant", "content": ANSWERED}]
        shown = rendering.text([*stand_in, *messages[last + 1 :]], tools, where, ask=True)
        said = squeezed(messages[last]["content"])
        kept = after.startswith(before) and squeezed(after[len(before) :]).startswith(said)
        if not kept or ANSWERED not in shown or messages[last].get("tool_calls"):
            return rendering.read(after)[0]
        # read with the token that ends an answer, so that nothing is taken for a text's beginning
        glue = rendering.read(shown.rpartition(ANSWERED)[2])[0]
        is_ended = tokens[-1] in (rendering.end_id, self._tokenizer.eos_token_id)
        return [*tokens, *(glue[1:] if is_ended and glue[0] == rendering.end_id else glue)]

    def _turn(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, where: str
    ) -> _Turn:
        """Find what the assistant wrote in the last message, and what it had read."""
        prompt = self._rendering.text(messages[:-1], tools, where, ask=True)
        whole = self._rendering.text(messages, tools, where)
        mark = self._rendering.mark(messages, tools, where)
        written = whole.removeprefix(prompt)
        if mark is not None:
            written = self._marked(whole, prompt, mark, where)
            prompt = whole[: len(whole) - len(written)]
        elif not whole.startswith(prompt):
            written = self._anywhere(messages[-1], tools, where)
            if not written or not whole.endswith(written):
                raise InputError(
                    "a chat template must begin a conversation with an answer as it begins the "
                    f"prompt for it, this tokenizer's does not in {where}: the mask would be "
                    "unstable; give the tokenizer a template with {% generation %} markers",
                    f"the prompt:\n{prompt}\nwith its answer:\n{whole}",
                )
        answer, end, rest = written.rpartition(self._rendering.end)
        if not end:
            raise InputError(
                f"every answer must end with {self._rendering.end}, one of {where} does not; give "
                "the tokenizer another chat template",
                f"the prompt:\n{prompt}\nits answer:\n{written}",
            )
        return _Turn(messages[-1], prompt, answer + end, rest)

    def _marked(self, whole: str, prompt: str, mark: int, where: str) -> str:
        """Return the answer that the template's markers mark, held against the prompt for it."""
        if whole.startswith(prompt):
            near, begin = sorted((mark, len(prompt)))
            between = whole[max(near, 0) : begin]
        else:
            begin, between = mark, "" if mark >= 0 else whole
        # some mark the tag that the generation prompt ends with, and some not the empty thought
        if THINKING.sub("", between):
            raise InputError(
                "the generation markers of a chat template must begin where the generation prompt "
                f"ends, this tokenizer's do not in {where}; move them, or remove them from the "
                "template",
                f"the prompt:\n{prompt}\nwith its answer:\n{whole}\nthe markers begin at:\n"
                f"{whole[mark:] if mark >= 0 else 'nowhere'}",
            )
        return whole[begin:]

    def _anywhere(
        self, message: Message, tools: Sequence[dict[str, Any]] | None, where: str
    ) -> str:
        """Return how an answer reads behind any question; empty where that cannot be told."""
        asked: list[Message] = [{"role": "user", "content": ASKED}]
        prompt = self._rendering.text(asked, tools, where, ask=True)
        whole = self._rendering.text([*asked, message], tools, where)
        return whole[len(prompt) :] if whole.startswith(prompt) else ""

    def _sample(self, text: str, turns: list[_Turn], where: str) -> Sample:
        ids, places = self._rendering.read(text)
        loss_mask = np.zeros(len(ids), bool)
        for turn in turns:
            begin, end = len(turn.prompt), len(turn.prompt) + len(turn.answer)
            # a token that begins in the prompt is none that the base writes; the one that ends the
            # answer may take in the line break behind it
            loss_mask |= (begin <= places[:, 0]) & (places[:, 0] < end)
        sample = Sample(ids, loss_mask.tolist(), text)
        self.refuse_wrong_mask(sample, [turn.message for turn in turns], where)
        return sample

    def refuse_wrong_mask(
        self, sample: Sample, answers: Sequence[Message], where: str = "a conversation"
    ) -> None:
        """Refuse a sample whose counted tokens are not these answers and what ends them.

        It knows nothing of how the mask was made: it reads the tokens back.
        """
        told = wrong_mask(
            self._tokenizer,
            sample.tokens,
            sample.loss_mask,
            answers,
            end=self._rendering.end,
            opening=self._rendering.opening,
        )
        if told:
            shown = marked(self._tokenizer, sample.tokens, sample.loss_mask)
            raise InputError(
                f"the mask must count the assistant's answers and nothing else, in {where} {told}; "
                "see the text below, counted in brackets: mend the row, or the tokenizer's chat "
                "template",
                shown,
            )
