"""What a tokenizer's chat template makes of messages: text, and the token ids of it."""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.data.conversations import Message
from specheads.data.encode import encoding
from specheads.data.shown import added_ids

DATE = "26 Jul 2024"
"""What templates are told is today (llama 3.1's own default): a text must not change overnight."""

CLOCK = (
    "{% macro strftime_now(format) -%}{{ format|replace('%d', '26')|replace('%b', 'Jul')"
    "|replace('%B', 'July')|replace('%m', '07')|replace('%Y', '2024')|replace('%A', 'Friday')"
    "|replace('%H', '00')|replace('%M', '00')|replace('%S', '00') }}{%- endmacro %}\n"
)
"""The same for templates that ask the clock."""

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

ASKED, ANSWERED = "\ue000", "\ue001"
"""Stand for a question and an answer where a template is tried: nobody's text has them."""


class Rendering:
    """A chat template that is tried with messages; whatever it does, an error says in whose.

    Raises:
        ValueError: The tokenizer has no template, or cannot tell which characters a token is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        if tokenizer.chat_template is None:
            raise InputError(
                f"messages need a tokenizer with a chat template, {where} has messages and this "
                "tokenizer has no template; give rows with plain text, or an instruction-tuned base"
            )
        if not tokenizer.is_fast:
            raise InputError(
                "conversations need a tokenizer that tells which characters a token stands for, "
                f"{type(tokenizer).__name__} does not; save it with a tokenizer.json"
            )
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits of the template and the special tokens that it writes."""
        special = {name: str(one) for name, one in self._tokenizer.special_tokens_map.items()}
        rules = [self._tokenizer.chat_template, special, DATE]
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:32]

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer, and with it the base's turn."""
        asked: list[Message] = [{"role": "user", "content": ASKED}]
        whole = self.text([*asked, {"role": "assistant", "content": ANSWERED}], None, "a try")
        if ANSWERED not in whole:
            raise InputError(
                "a chat template must write what the assistant says, this tokenizer's leaves it "
                "out; give the tokenizer another template",
                whole,
            )
        behind = self.read(whole.rpartition(ANSWERED)[2])[0]
        eos: Any = self._tokenizer.eos_token_id
        added = added_ids(self._tokenizer)
        ends = [eos] if eos in behind else [one for one in behind if one in added]
        if not ends:
            raise InputError(
                "a chat template must end an answer with a special token, which the base writes to "
                f"end its turn, this tokenizer's does not: it adds {whole[-40:]!r}; add the token "
                "to the tokenizer, or take the tokenizer of the base that the template is for"
            )
        return ends[-1]

    @cached_property
    def end(self) -> str:
        """How that token reads."""
        return str(self._tokenizer.decode([self.end_id]))

    @cached_property
    def opening(self) -> str:
        """What stands before an answer to a user: the generation prompt, where there is one."""
        asked: list[Message] = [{"role": "user", "content": ASKED}]
        prompt = self.text(asked, None, "a try", ask=True)
        told = self.text(asked, None, "a try")
        added = prompt.removeprefix(told) if prompt.startswith(told) else ""
        return added or prompt.rpartition(ASKED)[2]

    def mark(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, where: str
    ) -> int | None:
        """Return the character at which the last stretch begins that the template marks.

        It is -1 where nothing is marked, and None of a template without markers.
        """
        if not MARKER.search(self._source(tools)):
            return None
        read: Any = self._apply(
            messages,
            tools,
            where,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        mask = read["assistant_masks"]
        begins = [
            place for place, one in enumerate(mask) if one and not (place and mask[place - 1])
        ]
        return read["offset_mapping"][begins[-1]][0] if begins else -1

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        where: str,
        *,
        ask: bool = False,
    ) -> str:
        """Return messages as text; with `ask` it ends with a generation prompt."""
        return str(self._apply(messages, tools, where, tokenize=False, add_generation_prompt=ask))

    def _source(self, tools: Sequence[dict[str, Any]] | None) -> str:
        """Return the template's text; some tokenizers have another one for tools."""
        source = self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        return f"{CLOCK}{source}" if "strftime_now" in source else source

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        where: str,
        **how: Any,
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._source(tools),
                date_string=DATE,
                **how,
            )
        except Exception as error:
            # a template is a stranger's program: it can raise whatever there is
            raise InputError(
                "the tokenizer's chat template takes no messages such as those of "
                f"{where}: {' '.join(str(error).split()) or type(error).__name__}; change the "
                "roles, or give rows with plain text"
            ) from error

    def read(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return a text's token ids, and where each begins and ends in it."""
        # the template wrote the special tokens itself
        choices = {"add_special_tokens": False, "return_offsets_mapping": True}
        found = encoding(self._tokenizer, text, **choices)
        return found["input_ids"], np.array(found["offset_mapping"], int).reshape(-1, 2)
