"""Where the answers are in a rendered conversation: what the base writes after its prompt."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specheads.core.errors import InputError
from specheads.data.conversations import Message
from specheads.data.encode import (
    ANSWER,
    ANSWER_TEXT,
    QUESTION,
    QUESTION_TEXT,
    THOUGHT_TEXT,
    ChatRenderer,
    Messages,
    Tools,
)


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """An answer in the text of its conversation, and what the base had read when it wrote it."""

    message: Message
    prompt: str
    answer: str
    """Includes the end token."""
    suffix: str
    """What the template adds after the end token."""

    @property
    def text(self) -> str:
        """The prompt with its answer."""
        return self.prompt + self.answer


class AnswerFinder:
    """Finds answers in rendered conversations, by comparing a conversation with its prompt."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer, self._render = renderer, renderer.render

    def find(self, messages: Messages, tools: Tools = None) -> AnswerSpan:
        """Find the last message, which the assistant wrote, and its prompt."""
        prompt = self._render(messages[:-1], tools, add_generation_prompt=True)
        text = self._render(messages, tools)
        details = f"the prompt:\n{prompt}\nwith its answer:\n{text}"
        begin = self._answer_start(prompt, text, messages, tools)
        if begin is None:
            answer = self._answer_to_any_question(messages[-1], tools)
            if not answer or not text.endswith(answer):
                raise InputError(
                    "a chat template must begin a conversation with an answer as it begins the "
                    "prompt for it, else the mask is unstable (give the tokenizer a template with "
                    "{% generation %} markers around its answers)",
                    details,
                    fault="is rendered otherwise",
                )
            begin, text = len(prompt), prompt + answer
        answer, suffix = self._split_at_end(messages[-1], text[begin:])
        if not answer:
            raise InputError(
                f"every answer must end with {self.end_token} (or give the tokenizer another "
                "chat template)",
                details,
                fault="has one that does not",
            )
        return AnswerSpan(messages[-1], text[:begin], answer, suffix)

    def _answer_start(self, prompt: str, text: str, messages: Messages, tools: Tools) -> int | None:
        """Return the character of `text` at which the last answer begins; None if unknown."""
        if text.startswith(prompt):
            # after a tool's result a prompt may lack the header of an answer
            has_header = self._header and text.startswith(self._header, len(prompt))
            return len(prompt) + (len(self._header) if has_header else 0)
        history = self._render(messages[:-1], tools)
        # generation markers may contain the header, or leave out what is no answer
        starts = (
            self._start_without_thought(history, prompt, text),
            self._marked_start(history, text, messages, tools),
        )
        return max((start for start in starts if start is not None), default=None)

    def _start_without_thought(self, history: str, prompt: str, text: str) -> int | None:
        """Return where an answer begins whose prompt opens a thought or a channel that it lacks."""
        header_start = _common_length(history, prompt)
        spans = [match.span() for match in self._pieces.finditer(prompt, header_start)]
        candidates = sorted({bound for span in spans for bound in span}, reverse=True)
        thought = prompt.rfind(self._thought_opener, header_start) if self._thought_opener else -1
        if any(begin > thought for begin, _ in spans):
            # the prompt closes the thought that it opens, so the base writes a thought of its own
            candidates.insert(0, thought)
        for start in (len(prompt.rstrip()), *candidates):
            # a role's name after a special token is no thought
            is_opening = prompt[start : start + 1].isspace() or self._pieces.match(prompt, start)
            if start > header_start and is_opening and text.startswith(prompt[:start]):
                return start
        return None

    def _marked_start(
        self, history: str, text: str, messages: Messages, tools: Tools
    ) -> int | None:
        """Return where the generation marker of the last answer begins, None without any."""
        starts = self._renderer.marked_starts(messages, tools)
        if starts is None:
            return None
        history_end = _common_length(history.rstrip().removesuffix(self._closing), text)
        # markers around a header do not show where the answer begins
        start = next((start for start in starts if start >= history_end), history_end)
        return start if text[history_end:start].strip() else None

    def _answer_to_any_question(self, message: Message, tools: Tools) -> str:
        """Return the text of an answer after any question; empty if it is unknown."""
        prompt = self._render([QUESTION], tools, add_generation_prompt=True)
        text = self._render([QUESTION, message], tools)
        return text[len(prompt) :] if text.startswith(prompt) else ""

    def _split_at_end(self, message: Message, text: str) -> tuple[str, str]:
        """Split what follows a prompt: the answer, empty if it has no end, and its suffix."""
        if self.opens_next_turn:
            return text, ""
        answer = text.rstrip().removesuffix(self._closing).rstrip()
        # calls may have an end of their own
        ends = (self.end_token, *(self._special if message.get("tool_calls") else ()))
        if not answer.endswith(ends):
            before, end, _ = text.rpartition(self.end_token)
            answer = before + end
        return answer, text[len(answer) :]

    def loss_mask(self, text: str, offsets: np.ndarray, spans: Iterable[AnswerSpan]) -> np.ndarray:
        """Return which tokens of a text are in the loss; `offsets` has the characters of each."""
        mask = np.zeros(len(offsets), bool)
        for span in spans:
            begin, end = len(span.prompt), len(span.text)
            if self.opens_next_turn and (header := self._any_header.match(text, end)):
                end = header.end()
            # a token that begins in the prompt is not the base's; the end token may contain the
            # line break after it
            mask |= (begin <= offsets[:, 0]) & (offsets[:, 0] < end)
        return mask

    @cached_property
    def answer_patterns(self) -> list[re.Pattern[str]]:
        """What the base writes, up to whitespace: a thought and an answer, or an answer alone."""
        patterns = []
        for probe in (ANSWER | {"reasoning_content": THOUGHT_TEXT}, ANSWER):
            with suppress(InputError):
                before, _, after = self.find([QUESTION, probe]).answer.partition(ANSWER_TEXT)
                if (THOUGHT_TEXT in before) == ("reasoning_content" in probe):
                    begin = r"\s*".join(map(re.escape, before.split()))
                    begin = begin.replace(THOUGHT_TEXT, r"\s*(?P<thought>.*?)\s*")
                    ends = self._added_pattern.findall(after)
                    # the base may have written a part of the end, or another end
                    end = "".join(f"(?:{re.escape(token)}" for token in ends) + ")?" * len(ends)
                    any_end = "|".join(map(re.escape, self._special))
                    pattern = rf"\s*{begin}\s*(?P<content>.*?)\s*{end}(?:{any_end})?\s*"
                    patterns.append(re.compile(pattern, re.DOTALL))
        return patterns

    @cached_property
    def end_token(self) -> str:
        """The token with which the base ends its turn."""
        between = self._render([QUESTION, ANSWER, QUESTION]).rpartition(ANSWER_TEXT)[2]
        common = self._last_suffix[: _common_length(self._last_suffix, between)]
        for text in (common, self._last_suffix):
            if ends := self._added_pattern.findall(text):
                eos: Any = self._renderer.tokenizer.eos_token
                return eos if eos in ends else ends[-1]
        header = self._any_header.match(between)
        prompt = self._render([QUESTION], add_generation_prompt=True).rpartition(QUESTION_TEXT)[2]
        # a token that opens every turn does not end one
        if not self._last_suffix.strip() and header and header[0].strip() not in prompt:
            return header[0].strip()
        raise InputError(
            "a chat template must end an answer with a special token, which the base writes to end "
            f"its turn, this tokenizer's adds {self._last_suffix[-40:]!r}; write "
            "{{ eos_token }} after answers in the template, or add the text to the tokenizer as a "
            "special token"
        )

    @property
    def opens_next_turn(self) -> bool:
        """Whether the end token opens the next turn, so a last answer lacks it."""
        return self.end_token not in self._last_suffix

    @cached_property
    def _last_suffix(self) -> str:
        """What the template adds after the last answer of a conversation."""
        text = self._render([QUESTION, ANSWER])
        if ANSWER_TEXT not in text:
            raise InputError(
                "a chat template must write the assistant's messages, this tokenizer's leaves them "
                "out; give the tokenizer another template",
                text,
            )
        return text.rpartition(ANSWER_TEXT)[2]

    @property
    def _closing(self) -> str:
        """What the template adds after the end token of a last answer."""
        return self._last_suffix.rpartition(self.end_token)[2].strip()

    @cached_property
    def _header(self) -> str:
        """The generation prompt after a question; empty without one."""
        prompt = self._render([QUESTION], add_generation_prompt=True)
        return prompt[_common_length(self._render([QUESTION]), prompt) :]

    @cached_property
    def _thought_opener(self) -> str:
        """Text of the token that opens a thought; empty if the template writes no thoughts."""
        inline = {"content": f"<think>{THOUGHT_TEXT}</think>{ANSWER_TEXT}"}
        for answer in (ANSWER | {"reasoning_content": THOUGHT_TEXT}, ANSWER | inline):
            before, thought, _ = self._render([QUESTION, answer]).partition(THOUGHT_TEXT)
            if thought:
                return ["", *self._pieces.findall(before)][-1]
        return ""

    @cached_property
    def _added(self) -> dict[str, bool]:
        """Added tokens by their text, and whether each is special."""
        tokenizer: Any = self._renderer.tokenizer
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        return added | dict.fromkeys(tokenizer.all_special_tokens, True)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(text for text, is_special in self._added.items() if is_special)

    @cached_property
    def special_ids(self) -> set[int]:
        """Token ids of all special tokens."""
        tokenizer: Any = self._renderer.tokenizer
        return set(tokenizer.convert_tokens_to_ids(list(self._special)))

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Matches an added token."""
        # the longest first; without any it matches nothing
        texts = sorted(map(re.escape, self._added), key=len, reverse=True)
        return re.compile("|".join(texts) or "(?!)")

    @cached_property
    def _pieces(self) -> re.Pattern[str]:
        """Matches an added token, or a tag of a thought."""
        return re.compile(f"</?think>|{self._added_pattern.pattern}")

    @cached_property
    def _any_header(self) -> re.Pattern[str]:
        """Matches the token that opens a turn."""
        return re.compile(rf"\s*(?:{self._added_pattern.pattern})")


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
