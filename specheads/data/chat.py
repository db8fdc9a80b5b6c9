"""Conversations through the tokenizer's chat template: token ids and the loss mask.

The loss covers what the base itself writes after a generation prompt: an answer and its end token.
See docs/data.md.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specheads.core.errors import InputError
from specheads.data.answer_spans import AnswerFinder, AnswerSpan
from specheads.data.bad_rows import locate_errors
from specheads.data.conversations import Message, first_answer, last_message
from specheads.data.encode import (
    ANSWER,
    ANSWER_TEXT,
    QUESTION,
    ChatRenderer,
    Messages,
    Tokenizer,
    Tools,
)
from specheads.data.masks import contains_answer, decode_ids, find_mask_fault, marked, strip_spaces


@dataclass(frozen=True, slots=True)
class Sample:
    """A text to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """Which tokens the loss covers."""
    text: str
    """The text of the tokens."""


class Template:
    """The chat template of a tokenizer: samples to train on, prompts, and answers.

    `thinking` is the value of `enable_thinking`, which some templates read; None leaves it out.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer, thinking)
        self._finder = AnswerFinder(self.renderer)

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits of the template and its special tokens."""
        return self.renderer.fingerprint

    def samples(
        self, messages: Messages, tools: Tools = None, location: str = "a conversation"
    ) -> list[Sample]:
        """Return a conversation as texts in which every answer to the user is in the loss once.

        An answer that the template changes later, for example by removing its thought, has a text
        of its own, as the base saw it. Messages after the last answer are left out.
        """
        with locate_errors(location):
            indices = range(first_answer(messages), len(messages))
            answers = [index for index in indices if messages[index]["role"] == "assistant"]
            if not answers:
                raise InputError(
                    "training on a conversation needs an answer of the assistant (or have the base "
                    "answer it in a distilled phase)",
                    fault="lacks one",
                )
            messages = [self._without_end(message) for message in messages]
            texts: list[tuple[str, list[AnswerSpan]]] = []
            for index in reversed(answers):
                span = self._finder.find(messages[: index + 1], tools)
                if not texts or not texts[-1][0].startswith(span.text):
                    texts.append((span.text + span.suffix, []))
                texts[-1][1].insert(0, span)
            samples = [self._sample(text, spans, tools) for text, spans in reversed(texts)]
            _warn_of_omissions(texts[0][0], _prompt_texts(messages[: answers[-1]], tools))
            return samples

    def _without_end(self, message: Message) -> Message:
        """Remove the template's own end from an answer that has it: the template adds it."""
        content, end = message["content"].rstrip(), self._finder.end_token
        if message["role"] != "assistant" or not content.endswith(end):
            return message
        return message | {"content": content.removesuffix(end).rstrip()}

    def encode_prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Return the token ids before an answer: they end with a generation prompt."""
        prompt = self.renderer.render(messages, tools, add_generation_prompt=True)
        return self.renderer.encode(prompt)[0]

    def parse_answer(self, tokens: Sequence[int]) -> Message:
        """Return an answer's tokens as a message, with its thought apart from its content."""
        text = decode_ids(self._tokenizer, tokens)
        for pattern in self._finder.answer_patterns:
            if match := pattern.fullmatch(text):
                thought = match.groupdict().get("thought")
                reasoning = {"reasoning_content": thought} if thought else {}
                return {"role": "assistant", "content": match["content"]} | reasoning
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        return {"role": "assistant", "content": text}

    def extend_prompt(
        self, tokens: Sequence[int], messages: Messages, tools: Tools = None
    ) -> list[int]:
        """Append the next messages to a prompt and the base's answer, `tokens`.

        `messages` is the whole conversation, with the answer as `parse_answer` returns it. The
        answer keeps its ids, and its end becomes that of the template. If the template changes the
        answer, for example removes its thought, the conversation is rendered again.
        """
        last = last_message(messages, "assistant")
        probe = [*messages[:last], messages[last] | ANSWER, *messages[last + 1 :]]
        probe_text = self.renderer.render(probe, tools, add_generation_prompt=True)
        _, is_rendered, suffix = probe_text.rpartition(ANSWER_TEXT)
        text = self.renderer.render(messages, tools, add_generation_prompt=True)
        size = len(tokens) if is_rendered else 0
        # up to whitespace; the template writes the end of the answer again
        expected = strip_spaces(text)
        while strip_spaces(decode_ids(self._tokenizer, tokens[:size]) + suffix) != expected:
            if not size or tokens[size - 1] not in self._finder.special_ids:
                return self.renderer.encode(text)[0]
            size -= 1
        return [*tokens[:size], *self.renderer.encode(suffix)[0]]

    @property
    def end_id(self) -> int:
        """Token id with which the base ends its turn."""
        tokenizer: Any = self._tokenizer
        return int(tokenizer.convert_tokens_to_ids(self._finder.end_token))

    def _sample(self, text: str, spans: list[AnswerSpan], tools: Tools) -> Sample:
        ids, offsets = self.renderer.encode(text)
        loss_mask = self._finder.loss_mask(text, offsets, spans).tolist()
        sample = Sample(ids, loss_mask, text)
        self.refuse_wrong_mask(sample, [span.message for span in spans], tools)
        return sample

    def refuse_wrong_mask(self, sample: Sample, answers: Messages, tools: Tools = None) -> None:
        """Refuse a sample whose loss mask does not cover exactly these answers and their ends."""
        expected = [self._finder.find([QUESTION, answer], tools).answer for answer in answers]
        for text, answer in zip(expected, answers, strict=True):
            if not contains_answer(text, answer):
                names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
                published = " and calls ".join([f"{answer['content']!r:.60}", *names])
                raise InputError(
                    "the tokenizer's chat template must write all of an answer, inside its {% "
                    "generation %} markers if it has them (give the tokenizer one that does)",
                    sample.text,
                    fault=f"has one of which it writes {text!r:.60}: {published}",
                )
            _warn_of_omissions(text, [("reasoning", answer.get("reasoning_content", ""))])
        labelled = self._tokenizer, sample.tokens, sample.loss_mask
        is_next = self._finder.opens_next_turn
        if fault := find_mask_fault(*labelled, expected, is_next=is_next):
            raise InputError(
                "the mask must count the assistant's answers and nothing else (or fix the "
                "tokenizer's chat template; the text below has what is counted in brackets)",
                marked(*labelled),
                fault=f"has a text in which {fault}",
            )


def _prompt_texts(messages: Messages, tools: Tools) -> list[tuple[str, str]]:
    """Return the kind and the text of what the base reads before an answer."""
    texts = [
        (message["role"], message["content"])
        for message in messages
        if message["role"] in ("system", "user")
    ]
    names = [str(tool.get("function", tool).get("name", "")) for tool in tools or ()]
    return texts + [("tools", name) for name in names]


def _warn_of_omissions(rendered: str, texts: Sequence[tuple[str, str]]) -> None:
    """Warn of each kind of text that a template does not write; `texts` has kinds and texts."""
    rendered = strip_spaces(rendered)
    for kind in sorted({kind for kind, text in texts if strip_spaces(text) not in rendered}):
        warnings.warn(
            f"the tokenizer's chat template leaves out text of a conversation ({kind}), which is "
            "not learned then; give the tokenizer another template, or remove it from the rows",
            stacklevel=2,
        )


def refuse_fixed_thinking(tokenizer: Tokenizer) -> None:
    """Raise if the chat template renders a question alike with and without thinking."""
    prompts = {
        ChatRenderer(tokenizer, thinking).render([QUESTION], add_generation_prompt=True)
        for thinking in (True, False)
    }
    if len(prompts) == 1:
        raise InputError(
            "evaluation.thinking needs a chat template that reads enable_thinking, this "
            "tokenizer's does not; leave it out"
        )


def turn_end_ids(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the token that ends a turn in a tokenizer's chat template, if there is one."""
    with suppress(InputError):
        return () if tokenizer is None else (Template(tokenizer).end_id,)
    return ()
