"""Conversations through the tokenizer's chat template: token ids and the loss mask.

The loss covers what the base itself writes after a generation prompt: an answer and its end token.
See docs/data.md.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError, one_line
from specheads.data.conversations import Message, first_answer, last_message
from specheads.data.encode import call_tokenizer
from specheads.data.files import located
from specheads.data.masks import decoded, marked, says_all, squeezed, wrong_mask

Messages = Sequence[Message]
Tools = Sequence[dict[str, Any]] | None
DATE = "26 Jul 2024"
"""Today's date for templates (llama 3.1's own default), so that text is the same every day."""
CLOCK = (
    "{% macro strftime_now(format) -%}{{ format|replace('%d', '26')|replace('%b', 'Jul')"
    "|replace('%B', 'July')|replace('%m', '07')|replace('%Y', '2024')|replace('%A', 'Friday')"
    "|replace('%H', '00')|replace('%M', '00')|replace('%S', '00') }}{%- endmacro %}\n"
)
"""The same date for templates that call strftime_now."""
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
QUESTION_TEXT, ANSWERED, THOUGHT = "\ue000", "\ue001", "\ue002"
"""Placeholders for a question, an answer and its thought in a probe; no text contains them."""
QUESTION: Message = {"role": "user", "content": QUESTION_TEXT}
ANSWER: Message = {"role": "assistant", "content": ANSWERED}


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

    `thinking` is the value of `enable_thinking`, which some templates read; None leaves it out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> None:
        if tokenizer.chat_template is None:
            raise InputError(
                "messages need a tokenizer with a chat template, this one lacks it; copy "
                "chat_template.jinja of the original model into its folder, or give rows of text"
            )
        self._tokenizer = tokenizer
        # some templates have the shorter name
        names = () if thinking is None else ("enable_thinking", "thinking")
        self._choices = dict.fromkeys(names, thinking)

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

        An answer that the template changes later, for example by removing its thought, has a text
        of its own, as the base saw it. Messages after the last answer are left out.
        """
        with located(where):
            places = range(first_answer(messages), len(messages))
            answers = [place for place in places if messages[place]["role"] == "assistant"]
            if not answers:
                raise InputError(
                    "training on a conversation needs an answer of the assistant (or have the base "
                    "answer it in a distilled phase)",
                    fault="lacks one",
                )
            texts: list[tuple[str, list[_Turn]]] = []
            for place in reversed(answers):
                turn = self._turn(messages[: place + 1], tools)
                if not texts or not texts[-1][0].startswith(turn.prompt + turn.answer):
                    texts.append((turn.prompt + turn.answer + turn.rest, []))
                texts[-1][1].insert(0, turn)
            samples = [self._sample(text, turns, tools) for text, turns in reversed(texts)]
            asked = [one for one in messages[: answers[-1]] if one["role"] in ("system", "user")]
            parts = [(one["role"], one["content"]) for one in asked]
            parts += [
                ("tools", str(one.get("function", one).get("name", ""))) for one in tools or ()
            ]
            _warn_of_left_out(texts[0][0], parts)
            return samples

    def encode_prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Return the token ids before an answer: they end with a generation prompt."""
        return self.encode(self.render(messages, tools, ask=True))[0]

    def parse_answer(self, tokens: Sequence[int]) -> Message:
        """Return an answer's tokens as a message, with its thought apart from its content."""
        written = decoded(self._tokenizer, tokens)
        for form in self._forms:
            if found := form.fullmatch(written):
                parts = found.groupdict()
                thought = parts.get("thought")
                reasoning = {"reasoning_content": thought} if thought else {}
                return {"role": "assistant", "content": parts["content"]} | reasoning
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        return {"role": "assistant", "content": text}

    def extend_prompt(
        self, tokens: Sequence[int], messages: Messages, tools: Tools = None
    ) -> list[int]:
        """Append the next messages to a prompt and the base's answer, `tokens`.

        `messages` is the whole conversation, with the answer as `parse_answer` returns it. It
        keeps its ids, and its end becomes that of the template. If the template changes the answer,
        for example removes its thought, the conversation is rendered again.
        """
        last = last_message(messages, "assistant")
        probe = [*messages[:last], messages[last] | ANSWER, *messages[last + 1 :]]
        _, is_written, rest = self.render(probe, tools, ask=True).rpartition(ANSWERED)
        after = self.render(messages, tools, ask=True)
        size = len(tokens) if is_written else 0
        # the template writes the end of the answer again
        while squeezed(decoded(self._tokenizer, tokens[:size]) + rest) != squeezed(after):
            if not size or tokens[size - 1] not in self._special_ids:
                return self.encode(after)[0]
            size -= 1
        return [*tokens[:size], *self.encode(rest)[0]]

    @property
    def end_id(self) -> int:
        """Token id with which the base ends its turn."""
        reader: Any = self._tokenizer
        return int(reader.convert_tokens_to_ids(self._end))

    def _turn(self, messages: Messages, tools: Tools) -> _Turn:
        """Find the text of the last message, which the assistant wrote, and its prompt."""
        prompt, whole = self.render(messages[:-1], tools, ask=True), self.render(messages, tools)
        shown = f"the prompt:\n{prompt}\nwith its answer:\n{whole}"
        if whole.startswith(prompt):
            begin = len(prompt)
            # after a tool's result a prompt may lack the header of an answer
            if self._header and whole.startswith(self._header, begin):
                begin += len(self._header)
        else:
            plain = self.render(messages[:-1], tools)
            # generation markers may contain the header, or leave out what is no answer
            found = self._begin(plain, prompt, whole), self._mark(plain, whole, messages, tools)
            begin = max((place for place in found if place is not None), default=None)
        if begin is None:
            written = self._anywhere(messages[-1], tools)
            if not written or not whole.endswith(written):
                raise InputError(
                    "a chat template must begin a conversation with an answer as it begins the "
                    "prompt for it, else the mask is unstable (give the tokenizer a template with "
                    "{% generation %} markers around its answers)",
                    shown,
                    fault="is rendered otherwise",
                )
            begin, whole = len(prompt), prompt + written
        answer, rest = self._ended(messages[-1], whole[begin:])
        if not answer:
            raise InputError(
                f"every answer must end with {self._end} (or give the tokenizer another "
                "chat template)",
                shown,
                fault="has one that does not",
            )
        return _Turn(messages[-1], whole[:begin], answer, rest)

    def _begin(self, plain: str, prompt: str, whole: str) -> int | None:
        """Return where an answer begins whose prompt opens a thought or a channel that it lacks."""
        header = _shared(plain, prompt)
        pieces = [one.span() for one in self._pieces.finditer(prompt, header)]
        places = sorted({place for span in pieces for place in span}, reverse=True)
        thought = prompt.rfind(self._opener, header) if self._opener else -1
        if any(begin > thought for begin, _ in pieces):
            # the prompt closes the thought that it opens, so the base writes a thought of its own
            places.insert(0, thought)
        for place in (len(prompt.rstrip()), *places):
            # a role's name after a special token is no thought
            opens = prompt[place : place + 1].isspace() or self._pieces.match(prompt, place)
            if place > header and opens and whole.startswith(prompt[:place]):
                return place
        return None

    @cached_property
    def _opener(self) -> str:
        """Text of the token that opens a thought; empty if the template writes no thoughts."""
        inline = {"content": f"<think>{THOUGHT}</think>{ANSWERED}"}
        for answer in (ANSWER | {"reasoning_content": THOUGHT}, ANSWER | inline):
            before, found, _ = self.render([QUESTION, answer]).partition(THOUGHT)
            if found:
                return ["", *self._pieces.findall(before)][-1]
        return ""

    def _ended(self, message: Message, written: str) -> tuple[str, str]:
        """Split what follows a prompt: the answer, empty if it has no end, and the rest."""
        if self._is_next:
            return written, ""
        ended = written.rstrip().removesuffix(self._closing).rstrip()
        # calls may have an end of their own
        ends = (self._end, *(self._special if message.get("tool_calls") else ()))
        if not ended.endswith(ends):
            before, end, _ = written.rpartition(self._end)
            ended = before + end
        return ended, written[len(ended) :]

    def _anywhere(self, message: Message, tools: Tools) -> str:
        """Return the text of an answer after any question; empty if it is unknown."""
        prompt, whole = (
            self.render([QUESTION], tools, ask=True),
            self.render([QUESTION, message], tools),
        )
        return whole[len(prompt) :] if whole.startswith(prompt) else ""

    def _sample(self, text: str, turns: list[_Turn], tools: Tools) -> Sample:
        ids, places = self.encode(text)
        loss_mask = np.zeros(len(ids), bool)
        for turn in turns:
            begin, end = len(turn.prompt), len(turn.prompt) + len(turn.answer)
            if self._is_next and (header := self._headers.match(text, end)):
                end = header.end()
            # a token that begins in the prompt is not the base's; the end token may contain the
            # line break after it
            loss_mask |= (begin <= places[:, 0]) & (places[:, 0] < end)
        sample = Sample(ids, loss_mask.tolist(), text)
        self.refuse_wrong_mask(sample, [turn.message for turn in turns], tools)
        return sample

    def refuse_wrong_mask(self, sample: Sample, answers: Messages, tools: Tools = None) -> None:
        """Refuse a sample whose loss mask does not cover exactly these answers and their ends."""
        expected = [self._turn([QUESTION, one], tools).answer for one in answers]
        for one, answer in zip(expected, answers, strict=True):
            if not says_all(one, answer):
                called = [call["function"]["name"] for call in answer.get("tool_calls", ())]
                wanted = " and calls ".join([f"{answer['content']!r:.60}", *called])
                raise InputError(
                    "the tokenizer's chat template must write all of an answer, inside its {% "
                    "generation %} markers if it has them (give the tokenizer one that does)",
                    sample.text,
                    fault=f"has one of which it writes {one!r:.60}: {wanted}",
                )
            _warn_of_left_out(one, [("reasoning", answer.get("reasoning_content", ""))])
        read = self._tokenizer, sample.tokens, sample.loss_mask
        if fault := wrong_mask(*read, expected, is_next=self._is_next):
            raise InputError(
                "the mask must count the assistant's answers and nothing else (or fix the "
                "tokenizer's chat template; the text below has what is counted in brackets)",
                marked(*read),
                fault=f"has a text in which {fault}",
            )

    @cached_property
    def _forms(self) -> list[re.Pattern[str]]:
        """What the base writes, up to whitespace: a thought and an answer, or an answer alone."""
        forms = []
        for probe in (ANSWER | {"reasoning_content": THOUGHT}, ANSWER):
            with suppress(InputError):
                head, _, tail = self._turn([QUESTION, probe], None).answer.partition(ANSWERED)
                if (THOUGHT in head) == ("reasoning_content" in probe):
                    begin = r"\s*".join(map(re.escape, head.split()))
                    begin = begin.replace(THOUGHT, r"\s*(?P<thought>.*?)\s*")
                    ends = self._tokens.findall(tail)
                    # the base may have written a part of the end, or another end
                    end = "".join(f"(?:{re.escape(one)}" for one in ends) + ")?" * len(ends)
                    other = "|".join(map(re.escape, self._special))
                    form = rf"\s*{begin}\s*(?P<content>.*?)\s*{end}(?:{other})?\s*"
                    forms.append(re.compile(form, re.DOTALL))
        return forms

    @cached_property
    def _tail(self) -> str:
        """What the template adds after the last answer of a conversation."""
        whole = self.render([QUESTION, ANSWER])
        if ANSWERED not in whole:
            raise InputError(
                "a chat template must write the assistant's messages, this tokenizer's leaves them "
                "out; give the tokenizer another template",
                whole,
            )
        return whole.rpartition(ANSWERED)[2]

    @cached_property
    def _end(self) -> str:
        """The token with which the base ends its turn."""
        between = self.render([QUESTION, ANSWER, QUESTION]).rpartition(ANSWERED)[2]
        for text in (self._tail[: _shared(self._tail, between)], self._tail):
            if ends := self._tokens.findall(text):
                eos: Any = self._tokenizer.eos_token
                return eos if eos in ends else ends[-1]
        header = self._headers.match(between)
        asked = self.render([QUESTION], ask=True).rpartition(QUESTION_TEXT)[2]
        # a token that opens every turn does not end one
        if not self._tail.strip() and header and header[0].strip() not in asked:
            return header[0].strip()
        raise InputError(
            "a chat template must end an answer with a special token, which the base writes to end "
            f"its turn, this tokenizer's adds {self._tail[-40:]!r}; write {{{{ eos_token }}}} "
            "after answers in the template, or add the text to the tokenizer as a special token"
        )

    @property
    def _is_next(self) -> bool:
        """Whether the end token opens the next turn, so a last answer lacks it."""
        return self._end not in self._tail

    @property
    def _closing(self) -> str:
        """What the template adds after the end token of a last answer."""
        return self._tail.rpartition(self._end)[2].strip()

    @cached_property
    def _header(self) -> str:
        """The generation prompt after a question; empty without one."""
        plain, prompt = self.render([QUESTION]), self.render([QUESTION], ask=True)
        return prompt[_shared(plain, prompt) :]

    @cached_property
    def _added(self) -> dict[str, bool]:
        """Added tokens by their text, and whether each is special."""
        known: Any = self._tokenizer
        added = {one.content: one.special for one in known.added_tokens_decoder.values()}
        return added | dict.fromkeys(known.all_special_tokens, True)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(text for text, is_special in self._added.items() if is_special)

    @cached_property
    def _special_ids(self) -> set[int]:
        reader: Any = self._tokenizer
        return set(reader.convert_tokens_to_ids(list(self._special)))

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        """Matches an added token."""
        # the longest first; without any it matches nothing
        texts = sorted(map(re.escape, self._added), key=len, reverse=True)
        return re.compile("|".join(texts) or "(?!)")

    @cached_property
    def _pieces(self) -> re.Pattern[str]:
        return re.compile(f"</?think>|{self._tokens.pattern}")

    @cached_property
    def _headers(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{self._tokens.pattern})")

    def _mark(self, plain: str, whole: str, messages: Messages, tools: Tools) -> int | None:
        """Return the character at which the markers of the last answer begin, None without any."""
        if not MARKER.search(self._source(tools)):
            return None
        read: Any = self._apply(
            messages,
            tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        first = _shared(plain.rstrip().removesuffix(self._closing), whole)
        begins = np.flatnonzero(np.diff(read["assistant_masks"], prepend=0) == 1)
        places = [read["offset_mapping"][begin][0] for begin in begins]
        # markers around a header do not show where the answer begins
        place = next((place for place in places if place >= first), first)
        return place if whole[first:place].strip() else None

    def render(self, messages: Messages, tools: Tools = None, *, ask: bool = False) -> str:
        """Render messages as text; with `ask` it ends with a generation prompt."""
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=ask))

    def _source(self, tools: Tools) -> str:
        """Return the template; some tokenizers have another one for tools."""
        source = self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        return f"{CLOCK}{source}" if "strftime_now" in source else source

    def _apply(self, messages: Messages, tools: Tools, **choices: Any) -> Any:
        if self._in_parts:
            messages = [one | {"content": _parts(one["content"])} for one in messages]
        try:
            return self._rendered(messages, tools, **choices)
        except Exception as error:
            # some templates read arguments as JSON text; a template is a program and can raise
            # anything
            with suppress(Exception):
                if any(one.get("tool_calls") for one in messages):
                    return self._rendered(list(map(_with_text, messages)), tools, **choices)
            reason = one_line(error)
            raise InputError(
                f"the tokenizer's chat template must take the messages of a row: {reason:.200}",
                fault="has others",
            ) from error

    def _rendered(self, messages: Messages, tools: Tools, **choices: Any) -> Any:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=self._source(tools),
            date_string=DATE,
            **self._choices,
            **choices,
        )

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template reads content as parts only, as some of vision models do."""

        def is_read(content: Any) -> bool:
            with suppress(Exception):
                return QUESTION_TEXT in self._rendered(
                    [QUESTION | {"content": content}], None, tokenize=False
                )
            return False

        return not is_read(QUESTION_TEXT) and is_read(_parts(QUESTION_TEXT))

    def encode(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the token ids of rendered text, and the (begin, end) character of each."""
        # the template wrote the special tokens itself
        choices = {"add_special_tokens": False, "return_offsets_mapping": True}
        found = call_tokenizer(self._tokenizer, text, **choices)
        return found["input_ids"], np.array(found["offset_mapping"], int).reshape(-1, 2)


def _warn_of_left_out(text: str, parts: Sequence[tuple[str, str]]) -> None:
    """Warn of each kind of text that a template does not write; `parts` has kinds and texts."""
    whole = squeezed(text)
    for kind in sorted({kind for kind, part in parts if squeezed(part) not in whole}):
        warnings.warn(
            f"the tokenizer's chat template leaves out text of a conversation ({kind}), which is "
            "not learned then; give the tokenizer another template, or remove it from the rows",
            stacklevel=2,
        )


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _with_text(message: Message) -> Message:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | ({"tool_calls": calls} if calls else {})


def refuse_fixed_thinking(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the chat template renders a question alike with and without thinking."""
    rendered = {Template(tokenizer, one).render([QUESTION], ask=True) for one in (True, False)}
    if len(rendered) == 1:
        raise InputError(
            "evaluation.thinking needs a chat template that reads enable_thinking, this "
            "tokenizer's does not; leave it out"
        )


def turn_end_ids(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return the token that ends a turn in a tokenizer's chat template, if there is one."""
    with suppress(InputError):
        return () if tokenizer is None else (Template(tokenizer).end_id,)
    return ()
