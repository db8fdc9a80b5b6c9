"""Texts, and messages in a chat template, as token ids; the identity of a tokenizer."""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from specheads.core.errors import InputError, one_line
from specheads.data.conversations import Message


def encode_text(
    tokenizer: Tokenizer, text: str | list[str], *, add_special_tokens: bool = True
) -> Any:
    """Return the token ids of a text, or of each of several texts."""
    return call_tokenizer(tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"]


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text to continue, without an end token."""
    ids, (_, closing) = encode_text(tokenizer, text), affix_ids(tokenizer)
    # what the tokenizer adds after a text is no part of a prompt
    if closing and ids[-len(closing) :] == closing:
        ids = ids[: -len(closing)]
    while text and ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()
    return ids


def affix_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after every text."""
    ids, plain_ids = (
        encode_text(tokenizer, "a", add_special_tokens=special) for special in (True, False)
    )
    if not plain_ids or plain_ids[0] not in ids:
        raise InputError("text needs a tokenizer that reads any letter, this one cannot read 'a'")
    first = ids.index(plain_ids[0])
    return ids[:first], ids[first + len(plain_ids) :]


def call_tokenizer(tokenizer: Tokenizer, text: str | list[str], **choices: Any) -> Any:
    """Call a tokenizer on a text or a list of texts; `choices` are the tokenizer's own."""
    try:
        # verbose=False: no warning about texts longer than the context
        return tokenizer(text, return_attention_mask=False, verbose=False, **choices)
    except Exception as error:
        # tokenizers raises a bare Exception for text that a vocabulary cannot express
        raise InputError(
            f"the tokenizer must read any text, and it fails on {text!r:.60}: {error}; give it a "
            "token for what is unknown"
        ) from error


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return 32 hex digits that change if the tokenizer would read a text differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {"vocab": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    # these two depend on the last call, not on the tokenizer
    rules = {name: rules[name] for name in rules if name not in ("truncation", "padding")}
    identity = {
        "rules": rules,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
NULL_CONTENT = (
    "{%- set rows = namespace(all=[]) -%}{%- for row in messages -%}{%- set rows.all = rows.all + "
    "[dict(row, content=none) if row.content is undefined else row] -%}{%- endfor -%}"
    "{%- set messages = rows.all -%}\n"
)
"""Null as the content of messages without any: transformers removes what is null."""
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
QUESTION_TEXT, ANSWER_TEXT, THOUGHT_TEXT = "\ue000", "\ue001", "\ue002"
"""Placeholders for a question, an answer and its thought in a probe; no text contains them."""
QUESTION: Message = {"role": "user", "content": QUESTION_TEXT}
ANSWER: Message = {"role": "assistant", "content": ANSWER_TEXT}


class ChatRenderer:
    """Renders messages with the chat template of a tokenizer.

    `thinking` is the value of `enable_thinking`, which some templates read; None leaves it out.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None = None) -> None:
        if tokenizer.chat_template is None:
            raise InputError(
                "messages need a tokenizer with a chat template, this one lacks it; copy "
                "chat_template.jinja of the original model into its folder, or give rows of text"
            )
        self.tokenizer = tokenizer
        # some templates have the shorter name
        names = () if thinking is None else ("enable_thinking", "thinking")
        self._thinking = dict.fromkeys(names, thinking)

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits of the template and its special tokens."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        rules = [self.tokenizer.chat_template, special, DATE]
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:32]

    def render(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return messages as text."""
        generation = {"add_generation_prompt": add_generation_prompt}
        return str(self._apply_any_form(messages, tools, tokenize=False, **generation))

    def encode(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the token ids of rendered text, and the (begin, end) character of each."""
        # the template wrote the special tokens itself
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        encoding = call_tokenizer(self.tokenizer, text, **options)
        return encoding["input_ids"], np.array(encoding["offset_mapping"], int).reshape(-1, 2)

    def marked_starts(self, messages: Messages, tools: Tools) -> list[int] | None:
        """Return where each `{% generation %}` marker begins; None if there are no markers."""
        if not GENERATION_MARKER.search(self._source(tools)):
            return None
        encoding: Any = self._apply_any_form(
            messages,
            tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        starts = np.flatnonzero(np.diff(encoding["assistant_masks"], prepend=0) == 1)
        return [encoding["offset_mapping"][start][0] for start in starts]

    def _source(self, tools: Tools) -> str:
        """Return the template; some tokenizers have another one for tools."""
        source = self.tokenizer.get_chat_template(None, list(tools) if tools else None)
        return f"{CLOCK}{source}" if "strftime_now" in source else source

    def _apply_any_form(self, messages: Messages, tools: Tools, **options: Any) -> Any:
        """Apply the template to the form of content and of arguments that it reads."""
        if self._template_prefix:
            messages = list(map(_without_content, messages))
        if self._reads_parts:
            messages = [
                message | {"content": _text_parts(message["content"] or "")} for message in messages
            ]
        try:
            return self._apply_with_calls(messages, tools, **options)
        except Exception as error:
            reason = one_line(error)
            raise InputError(
                f"the tokenizer's chat template must take the messages of a row: {reason:.200}",
                fault="has others",
            ) from error

    def _apply_with_calls(self, messages: Messages, tools: Tools, **options: Any) -> Any:
        """Apply the template; some read arguments of calls as JSON text."""
        try:
            return self._apply(messages, tools, **options)
        except Exception:
            # a template is a program and can raise anything
            with suppress(Exception):
                if any(message.get("tool_calls") for message in messages):
                    return self._apply(list(map(_with_json_arguments, messages)), tools, **options)
            raise

    def _apply(self, messages: Messages, tools: Tools, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=self._template_prefix + self._source(tools),
            date_string=DATE,
            **self._thinking,
            **options,
        )

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads content as parts only, as some of vision models do."""

        def is_rendered(content: Any) -> bool:
            with suppress(Exception):
                probe = [QUESTION | {"content": content}]
                return QUESTION_TEXT in self._apply(probe, None, tokenize=False)
            return False

        return not is_rendered(QUESTION_TEXT) and is_rendered(_text_parts(QUESTION_TEXT))

    @cached_property
    def _template_prefix(self) -> str:
        """What the template needs before it, if it writes calls next to null as content only."""
        function = {"name": ANSWER_TEXT, "arguments": {}}
        calls = [{"id": "abcdefghi", "type": "function", "function": function}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        for prefix, message in (("", call), (NULL_CONTENT, _without_content(call))):
            # the property has this value while the probe is rendered
            self.__dict__["_template_prefix"] = prefix
            with suppress(Exception):
                probe = [QUESTION, message]
                if ANSWER_TEXT in self._apply_with_calls(probe, None, tokenize=False):
                    return prefix
        return ""


def _without_content(message: Message) -> Message:
    """Return a message of tool calls without text as one without content."""
    is_call_only = message.get("tool_calls") and message["content"] == ""
    return {**message, "content": None} if is_call_only else message


def _text_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _with_json_arguments(message: Message) -> Message:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | ({"tool_calls": calls} if calls else {})
