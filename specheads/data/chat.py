"""Conversations through the tokenizer's chat template: token ids and the loss mask.

The loss covers what the base itself writes after a generation prompt: an answer and its end token.
See docs/data.md.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.data.conversations import Message, first_answer
from specheads.data.encode import encoding
from specheads.data.files import located
from specheads.data.masks import added_ids, marked, squeezed, wrong_mask

Messages = Sequence[Message]
Tools = Sequence[dict[str, Any]] | None

THINKING = re.compile(r"\s|</?think>")
"""Text that templates write around thoughts, also around empty ones."""

DATE = "26 Jul 2024"
"""Today's date for templates (llama 3.1's own default), so that text is the same every day."""

CLOCK = (
    "{% macro strftime_now(format) -%}{{ format|replace('%d', '26')|replace('%b', 'Jul')"
    "|replace('%B', 'July')|replace('%m', '07')|replace('%Y', '2024')|replace('%A', 'Friday')"
    "|replace('%H', '00')|replace('%M', '00')|replace('%S', '00') }}{%- endmacro %}\n"
)
"""The same date for templates that call strftime_now."""

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

ASKED, ANSWERED = "\ue000", "\ue001"
"""Placeholders for a question and an answer when a template is probed; no text contains them."""

ASK: Message = {"role": "user", "content": ASKED}


@dataclass(frozen=True, slots=True)
class Sample:
    """A text to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """Which tokens the loss covers."""
    text: str
    """The text of the tokens."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer, and what the base had read when it wrote it."""

    message: Message
    prompt: str
    answer: str
    """Includes the end token."""
    rest: str
    """What the template adds after the end token."""


class Template:
    """The chat template of a tokenizer: renders messages, and tells answers from prompts.

    Raises:
        InputError: The tokenizer has no template, or gives no character offsets of its tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise InputError(
                "messages need a tokenizer with a chat template, this one lacks it; give rows with "
                "plain text, or an instruction-tuned base"
            )
        if not tokenizer.is_fast:
            raise InputError(
                "conversations need a tokenizer that gives the characters of each token, "
                f"{type(tokenizer).__name__} does not; save it with a tokenizer.json"
            )
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits of the template and its special tokens."""
        special = {name: str(one) for name, one in self._tokenizer.special_tokens_map.items()}
        rules = [self._tokenizer.chat_template, special, DATE]
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:32]

    def samples(
        self, messages: Messages, tools: Tools = None, where: str = "a conversation"
    ) -> list[Sample]:
        """Return a conversation as texts in which every answer to the user is in the loss once.

        There is one text if the template keeps earlier answers as they were. A template may change
        them, for example remove earlier thoughts. Then such an answer has a text of its own, as
        the base saw it when it wrote it. Messages after the last answer are left out.

        Raises:
            InputError: There is no answer, the template refuses the messages, or the template does
                not show what the assistant wrote. `details` has the text with its loss mask.
        """
        with located(where):
            first = first_answer(messages)
            if first == len(messages):
                raise InputError(
                    "training on a conversation needs an answer of the assistant (or have the base "
                    "answer it in a distilled phase)",
                    fault="lacks one",
                )
            texts: list[tuple[str, list[_Turn]]] = []
            for place in reversed(range(first, len(messages))):
                if messages[place]["role"] != "assistant":
                    continue
                turn = self._turn(messages[: place + 1], tools)
                if not texts or not texts[-1][0].startswith(turn.prompt + turn.answer):
                    texts.append((turn.prompt + turn.answer + turn.rest, []))
                texts[-1][1].insert(0, turn)
            return [self._sample(text, turns) for text, turns in reversed(texts)]

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Return the token ids before an answer: they end with a generation prompt."""
        return self.read(self.text(messages, tools, ask=True))[0]

    def next_prompt(
        self, tokens: Sequence[int], messages: Messages, tools: Tools = None
    ) -> list[int]:
        """Append the next messages to a prompt and the base's answer, `tokens`.

        The answer keeps its ids, and gets its end token if it was cut off. `messages` is the whole
        conversation, with the answer as text. If the template changes the answer, for example
        removes its thoughts, the conversation is rendered again and does not begin with `tokens`.
        """
        last = max(place for place, one in enumerate(messages) if one["role"] == "assistant")
        before = self.text(messages[:last], tools, ask=True)
        after = self.text(messages, tools, ask=True)
        stand_in = [*messages[:last], {"role": "assistant", "content": ANSWERED}]
        probed = self.text([*stand_in, *messages[last + 1 :]], tools, ask=True)
        answer = squeezed(messages[last]["content"])
        kept = after.startswith(before) and squeezed(after[len(before) :]).startswith(answer)
        if not kept or ANSWERED not in probed or messages[last].get("tool_calls"):
            return self.read(after)[0]
        # read together with the end token, because some tokenizers treat a text's begin specially
        rest = self.read(probed.rpartition(ANSWERED)[2])[0]
        is_ended = tokens[-1] in (self.end_id, self._tokenizer.eos_token_id)
        return [*tokens, *(rest[1:] if is_ended and rest[0] == self.end_id else rest)]

    def _turn(self, messages: Messages, tools: Tools) -> _Turn:
        """Find the text of the last message, which the assistant wrote, and its prompt."""
        prompt, whole = self.text(messages[:-1], tools, ask=True), self.text(messages, tools)
        shown = f"the prompt:\n{prompt}\nwith its answer:\n{whole}"
        written = whole.removeprefix(prompt)
        if (mark := self._mark(messages, tools)) is not None:
            near, begin = sorted((mark, len(prompt))) if whole.startswith(prompt) else (mark, mark)
            # templates differ in whether thinking tags of the generation prompt are marked
            if mark < 0 or THINKING.sub("", whole[near:begin]):
                raise InputError(
                    "the generation markers of a chat template must begin where the generation "
                    "prompt ends (move them, or remove them from the template)",
                    f"{shown}\nthe markers begin at:\n{whole[mark:] if mark >= 0 else 'nowhere'}",
                    fault="is rendered otherwise",
                )
            prompt, written = whole[:begin], whole[begin:]
        elif not whole.startswith(prompt):
            written = self._anywhere(messages[-1], tools)
            if not written or not whole.endswith(written):
                raise InputError(
                    "a chat template must begin a conversation with an answer as it begins the "
                    "prompt for it, else the mask is unstable (give the tokenizer a template with "
                    "{% generation %} markers)",
                    shown,
                    fault="is rendered otherwise",
                )
        answer, end, rest = written.rpartition(self.end)
        if not end:
            raise InputError(
                f"every answer must end with {self.end} (or give the tokenizer another chat "
                "template)",
                shown,
                fault="has one that does not",
            )
        return _Turn(messages[-1], prompt, answer + end, rest)

    def _anywhere(self, message: Message, tools: Tools) -> str:
        """Return the text of an answer after any question; empty if it is unknown."""
        prompt, whole = self.text([ASK], tools, ask=True), self.text([ASK, message], tools)
        return whole[len(prompt) :] if whole.startswith(prompt) else ""

    def _sample(self, text: str, turns: list[_Turn]) -> Sample:
        ids, places = self.read(text)
        loss_mask = np.zeros(len(ids), bool)
        for turn in turns:
            begin, end = len(turn.prompt), len(turn.prompt) + len(turn.answer)
            # a token that begins in the prompt is not the base's; the end token may contain the
            # line break after it
            loss_mask |= (begin <= places[:, 0]) & (places[:, 0] < end)
        sample = Sample(ids, loss_mask.tolist(), text)
        self.refuse_wrong_mask(sample, [turn.message for turn in turns])
        return sample

    def refuse_wrong_mask(self, sample: Sample, answers: Messages) -> None:
        """Refuse a sample whose loss mask does not cover exactly these answers and their ends.

        The check is independent of how the mask was made: it decodes the tokens.
        """
        fault = wrong_mask(
            self._tokenizer,
            sample.tokens,
            sample.loss_mask,
            answers,
            end=self.end,
            opening=self.opening,
        )
        if fault:
            raise InputError(
                "the mask must count the assistant's answers and nothing else (or fix the "
                "tokenizer's chat template; the text below has what is counted in brackets)",
                marked(self._tokenizer, sample.tokens, sample.loss_mask),
                fault=f"has a text in which {fault}",
            )

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer and the base's turn."""
        whole = self.text([ASK, {"role": "assistant", "content": ANSWERED}])
        if ANSWERED not in whole:
            raise InputError(
                "a chat template must write the assistant's messages, this tokenizer's leaves them "
                "out; give the tokenizer another template",
                whole,
            )
        after = self.read(whole.rpartition(ANSWERED)[2])[0]
        eos: Any = self._tokenizer.eos_token_id
        added = added_ids(self._tokenizer)
        ends = [eos] if eos in after else [one for one in after if one in added]
        if not ends:
            raise InputError(
                "a chat template must end an answer with a special token, which the base writes to "
                f"end its turn, this tokenizer's does not: it adds {whole[-40:]!r}; add the token "
                "to the tokenizer, or take the tokenizer of the base that the template is for"
            )
        return ends[-1]

    @cached_property
    def end(self) -> str:
        """Text of the end token."""
        return str(self._tokenizer.decode([self.end_id]))

    @cached_property
    def opening(self) -> str:
        """Text before an answer to the user: the generation prompt if there is one."""
        prompt, plain = self.text([ASK], ask=True), self.text([ASK])
        added = prompt.removeprefix(plain) if prompt.startswith(plain) else ""
        return added or prompt.rpartition(ASKED)[2]

    def _mark(self, messages: Messages, tools: Tools) -> int | None:
        """Return the character at which the last marked answer begins.

        It is -1 if nothing is marked, and None if the template has no generation markers.
        """
        if not MARKER.search(self._source(tools)):
            return None
        read: Any = self._apply(
            messages,
            tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        begins = np.flatnonzero(np.diff(read["assistant_masks"], prepend=0) == 1)
        return read["offset_mapping"][begins[-1]][0] if len(begins) else -1

    def text(self, messages: Messages, tools: Tools = None, *, ask: bool = False) -> str:
        """Render messages as text; with `ask` it ends with a generation prompt."""
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=ask))

    def _source(self, tools: Tools) -> str:
        """Return the template; some tokenizers have another one for tools."""
        source = self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        return f"{CLOCK}{source}" if "strftime_now" in source else source

    def _apply(self, messages: Messages, tools: Tools, **choices: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._source(tools),
                date_string=DATE,
                **choices,
            )
        except Exception as error:
            # a template is a program and can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"the tokenizer's chat template must take the messages of a row: {reason:.200}",
                fault="has others",
            ) from error

    def read(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the token ids of rendered text, and the (begin, end) character of each."""
        # the template wrote the special tokens itself
        choices = {"add_special_tokens": False, "return_offsets_mapping": True}
        found = encoding(self._tokenizer, text, **choices)
        return found["input_ids"], np.array(found["offset_mapping"], int).reshape(-1, 2)
