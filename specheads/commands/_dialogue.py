"""A conversation as the base reads it, and its answers as people do."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.data.chat import Template
from specheads.data.conversations import Message
from specheads.data.encode import token_ids
from specheads.decoding.detokenize import TextStream
from specheads.decoding.engine import Engine
from specheads.decoding.loop import BASE_ORIGIN, Origin, step_origins
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees.policies import TreePolicy

Painted = list[tuple[str, Origin]]
"""Texts of tokens, in order, and how each came."""


class Dialogue:
    """What was asked and answered. A base without a chat template continues each text by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str) -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer) if tokenizer.chat_template else None
        if system and not self._template:
            raise InputError(
                f"system is for bases with a chat template, got {system[:40]!r}; leave it out"
            )
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forget what was said."""
        self._messages, self._tokens = self._system, list[int]()
        self._asked = self._messages

    def ask(self, text: str) -> list[int]:
        """Return the prompt behind which the base answers; what it does not answer is forgotten."""
        if self._template is None:
            return token_ids(self._tokenizer, text)
        self._asked = [*self._messages, {"role": "user", "content": text}]
        if not self._tokens:
            return self._template.prompt(self._asked)
        return self._template.next_prompt(self._tokens, self._asked)

    def answered(self, tokens: list[int], text: str) -> None:
        """Remember an answer, by the prompt and answer that the base has read."""
        self._messages = [*self._asked, {"role": "assistant", "content": text}]
        self._tokens = tokens


@dataclass
class Answer:
    """One answer while it is written, with a drafter or by the base alone."""

    base: FrozenBase
    prompt: list[int]
    drafter: Drafter | None
    tree: TreePolicy | None
    max_new_tokens: int
    sampling: Sampling
    painted: Painted = field(default_factory=list)
    """What is written so far."""
    seconds: float = 0.0
    """What its steps took, without reading the prompt."""

    def __post_init__(self) -> None:
        room = min(len(self.prompt) + self.max_new_tokens, self.base.max_length)
        if len(self.prompt) >= self.base.max_length:
            raise InputError(
                f"a conversation must fit the context: {len(self.prompt)} tokens exceed "
                f"{self.base.max_length}; say /reset"
            )
        self._engine = Engine(
            self.base, self.drafter, tree=self.tree, max_batch=1, max_length=room, timed=True
        )
        request = Request(
            prompt=self.prompt, max_new_tokens=self.max_new_tokens, sampling=self.sampling
        )
        self.stream = self._engine.submit(request)
        assert self.base.tokenizer is not None
        self._text, self._origins = TextStream(self.base.tokenizer, self.prompt), [BASE_ORIGIN]

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.stream.finish_reason is not None

    def step(self) -> Painted:
        """Take one step; return what it wrote."""
        known = len(self.stream.steps)
        began = time.perf_counter()
        self._engine.step()
        for step in self.stream.steps[known:]:
            self._origins += step_origins(step)
            self.seconds += time.perf_counter() - (began if known else step.times.began)
        new = self._painted()
        self.painted += new
        return new

    def rest(self) -> Iterator[Painted]:
        """Write it to its end, step by step."""
        while not self.is_over:
            yield self.step()

    def _painted(self) -> Painted:
        tokens, text = self.stream.tokens, self._text
        # the token that ends a text is none of it
        end, new = len(tokens) - (self.stream.finish_reason == "eos"), []
        for place in range(text.num_tokens, end):
            before = len(text.written)
            text.push(tokens[place])
            new.append((text.written[before:], self._origins[place]))
        if self.is_over:
            before = len(text.written)
            text.close()
            new.append((text.written[before:], BASE_ORIGIN))
        return [(piece, origin) for piece, origin in new if piece]

    @property
    def text(self) -> str:
        """What is written so far."""
        return "".join(piece for piece, _ in self.painted)

    @property
    def origins(self) -> list[Origin]:
        """How each of its tokens came."""
        return self._origins[: len(self.stream.tokens)]

    @property
    def tokens_per_forward(self) -> float:
        """New tokens for each forward of the base; the first comes with reading the prompt."""
        return (len(self.stream.tokens) - 1) / max(len(self.stream.steps), 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, without reading the prompt."""
        return (len(self.stream.tokens) - 1) / self.seconds if self.seconds else 0.0
