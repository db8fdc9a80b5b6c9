"""A conversation with a base: its prompts, its answers step by step, and their colours."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError, printable
from specheads.data.chat import Template
from specheads.data.conversations import Message
from specheads.data.encode import prompt_ids
from specheads.decoding import detokenize
from specheads.decoding.engine import Engine
from specheads.decoding.loop import BASE_ORIGIN, Origin, step_origins
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees.policies import TreePolicy

Pieces = list[tuple[str, Origin]]
"""Texts of consecutive tokens, each with the origin of its token."""

DEPTH_COLOURS = ("#7cc48d", "#4fb06b", "#2e9f55", "#1f8a6d", "#1a7f86")
"""Colours of drafted tokens by depth; deeper ones have the last colour."""

COPIED, DIM = "#c58af9", "dim"

ORDER = ("base", "drafted", "copied")
"""Order of the origins in a summary."""


class Dialogue:
    """The messages so far. A base without a chat template continues each line by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str) -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer) if tokenizer.chat_template else None
        if system and not self._template:
            raise InputError(
                f"system needs a base with a chat template, got {system[:40]!r}; leave it out"
            )
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forget all messages but the system prompt."""
        self._messages, self._tokens = self._system, list[int]()
        self._open = self._messages

    def ask(self, text: str) -> list[int]:
        """Return the prompt for an answer; an earlier question without an answer is forgotten."""
        if self._template is None:
            return prompt_ids(self._tokenizer, text)
        self._open = [*self._messages, {"role": "user", "content": text}]
        if not self._tokens:
            return self._template.prompt(self._open)
        return self._template.next_prompt(self._tokens, self._open)

    def answered(self, tokens: list[int], text: str) -> None:
        """Add an answer; `tokens` are its prompt and its tokens."""
        self._messages = [*self._open, {"role": "assistant", "content": text}]
        self._tokens = tokens


@dataclass
class Answer:
    """One answer, generated step by step with a drafter or by the base alone."""

    base: FrozenBase
    prompt: list[int]
    drafter: Drafter | None
    tree: TreePolicy | None
    max_new_tokens: int
    sampling: Sampling
    pieces: Pieces = field(default_factory=list)
    """The text so far."""
    seconds: float = 0.0
    """Time of the steps, without the forward of the prompt."""

    def __post_init__(self) -> None:
        room = min(len(self.prompt) + self.max_new_tokens, self.base.max_length)
        if len(self.prompt) >= self.base.max_length:
            raise InputError(
                f"a conversation must fit into the context of {self.base.max_length} tokens, got "
                f"{len(self.prompt)}; type /reset"
            )
        self._engine = Engine(
            self.base, self.drafter, tree=self.tree, max_batch=1, max_length=room, timed=True
        )
        request = Request(
            prompt=self.prompt, max_new_tokens=self.max_new_tokens, sampling=self.sampling
        )
        self.stream = self._engine.submit(request)
        assert self.base.tokenizer is not None
        self._text = detokenize.TextStream(self.base.tokenizer, self.prompt)
        self._origins = [BASE_ORIGIN]

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete."""
        return self.stream.finish_reason is not None

    def step(self) -> Pieces:
        """Decode one step and return its text."""
        known = len(self.stream.steps)
        start = time.perf_counter()
        self._engine.step()
        for step in self.stream.steps[known:]:
            self._origins += step_origins(step)
            self.seconds += time.perf_counter() - (start if known else step.times.began)
        new = self._new_pieces()
        self.pieces += new
        return new

    def rest(self) -> Iterator[Pieces]:
        """Yield the text of every step to the end."""
        while not self.is_over:
            yield self.step()

    def _new_pieces(self) -> Pieces:
        tokens, text = self.stream.tokens, self._text
        # an end token has no text
        end, new = len(tokens) - (self.stream.finish_reason == "eos"), []
        for index in range(text.num_tokens, end):
            before = len(text.written)
            text.push(tokens[index])
            new.append((text.written[before:], self._origins[index]))
        if self.is_over:
            before = len(text.written)
            text.close()
            new.append((text.written[before:], BASE_ORIGIN))
        return [(piece, origin) for piece, origin in new if piece]

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(piece for piece, _ in self.pieces)

    @property
    def origins(self) -> list[Origin]:
        """Origin of each token so far."""
        return self._origins[: len(self.stream.tokens)]

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward of the base, without the prompt's forward and its token."""
        return (len(self.stream.tokens) - 1) / max(len(self.stream.steps), 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, without the prompt's forward and its token."""
        return (len(self.stream.tokens) - 1) / self.seconds if self.seconds else 0.0


def style(origin: Origin) -> str:
    """Return rich's style of a token; tokens of the base have none."""
    if origin.kind == "base":
        return ""
    if origin.kind == "copied":
        return COPIED
    depth = min(origin.depth, len(DEPTH_COLOURS))
    # deeper tokens are underlined too, for readers who do not see colours
    return DEPTH_COLOURS[depth - 1] + (" underline" if depth > 1 else "")


def coloured(pieces: Pieces) -> Text:
    """Return a text with colours."""
    out = Text()
    for piece, origin in pieces:
        out.append(printable(piece), style(origin))
    return out


def plain(pieces: Pieces) -> str:
    """Return a text without colours."""
    return printable("".join(piece for piece, _ in pieces))


def legend(depth: int, *, copies: bool = False) -> Text:
    """Return the meaning of the colours."""
    out = Text("the base's own", "")
    for level in range(1, min(depth, len(DEPTH_COLOURS)) + 1):
        more = "+" if level == len(DEPTH_COLOURS) < depth else ""
        out.append(" · ", DIM)
        out.append(f"drafted at depth {level}{more}", style(Origin("drafted", level)))
    if copies:
        out.append(" · ", DIM)
        out.append("copied", COPIED)
    return out


def summary(answer: Answer) -> str:
    """Return the numbers of an answer: tokens, speed, and shares of the origins."""
    return (
        f"{len(answer.origins)} tokens, {answer.tokens_per_forward:.2f} per forward, "
        f"{answer.tokens_per_second:.1f} tokens/s"
        + (f"; {shares(answer.origins)}" if answer.drafter else "")
    )


def shares(origins: Sequence[Origin]) -> str:
    """Return the share of each origin."""
    counts = Counter(origins)
    ordered = sorted(counts, key=lambda origin: (ORDER.index(origin.kind), origin.depth))
    return ", ".join(f"{origin} {counts[origin] / len(origins):.0%}" for origin in ordered)


def tail(text: Text, console: Console, width: int, lines: int) -> Text:
    """Return the last lines of a text at this width."""
    return Text("\n").join(text.wrap(console, width)[-lines:])


def has_colour(console: Console) -> bool:
    """Return whether a console shows colours."""
    return console.is_terminal and not console.no_color
