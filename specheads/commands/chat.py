"""Chat with the base in the terminal; colors show which tokens were drafted.

specheads chat run=runs/smollm2
specheads chat head=HEAD base=MODEL side_by_side=true
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.base.selfcheck import make_exact
from specheads.commands._library import load_base_and_head
from specheads.config.commands import Chat
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError, printable
from specheads.data.chat import Template
from specheads.data.conversations import Message
from specheads.data.encode import encode_prompt
from specheads.decoding import detokenize
from specheads.decoding.engine import Engine, default_tree
from specheads.decoding.loop import BASE_ORIGIN, Origin, step_origins
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.suffix_decoding import SuffixAutomaton
from specheads.decoding.trees.policies import TreePolicy
from specheads.decoding.trees.tuned import fixed_policy

MIN_COLUMNS = 80
"""Narrower terminals show two answers one after the other."""
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends"
DEPTH_COLOURS = ("#7cc48d", "#4fb06b", "#2e9f55", "#1f8a6d", "#1a7f86")
"""Colors of drafted tokens by depth; deeper ones have the last color."""
LOOKUP_COLOUR = "#c58af9"


def run(settings: Chat) -> None:
    """Answer each line of standard input."""
    base, head = load_base_and_head(settings)
    tokenizer = base.tokenizer_for("a chat")
    if settings.side_by_side:
        make_exact(base.forwards)
    tree = fixed_policy(settings.tree, head.depth)
    memory = SuffixAutomaton()
    dialogue = Dialogue(tokenizer, settings.system)
    console = Console(highlight=False, markup=False)
    limit, sampling = settings.max_new_tokens, Sampling.of(settings, settings.seed)
    if console.is_terminal:
        console.print(f"{base.name} with a {head.kind} head of depth {head.depth}; {HELP}")
        copies = (tree or default_tree(head, base)).lookup_length > 0
        console.print(legend(head.depth, copies=copies))
    with suppress(KeyboardInterrupt):
        for turn, text in enumerate(_lines(console, dialogue)):
            turn_sampling = replace(sampling, seed=sampling.seed + turn)
            try:
                prompt = dialogue.prompt_for(text)
                answer = ChatAnswer(base, prompt, head, tree, limit, turn_sampling, memory)
            except InputError as error:
                sys.stderr.write(f"error: {error}\n")
                continue
            if settings.side_by_side:
                base_answer = ChatAnswer(base, prompt, None, None, limit, turn_sampling)
                _show_both(console, answer, base_answer)
            else:
                _show(console, answer)
            dialogue.add_answer(prompt, answer.stream.tokens)


# --- questions and answers ---------------------------------------------------------------------


class Dialogue:
    """The messages so far. A base without a chat template continues each line by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str = "") -> None:
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
        self._messages = self._open = self._system
        self._tokens: list[int] = []

    def prompt_for(self, text: str) -> list[int]:
        """Return the prompt for an answer; an earlier question without an answer is forgotten."""
        if self._template is None:
            return encode_prompt(self._tokenizer, text)
        self._open = [*self._messages, {"role": "user", "content": text}]
        if self._tokens:
            return self._template.extend_prompt(self._tokens, self._open)
        return self._template.encode_prompt(self._open)

    def add_answer(self, prompt: list[int], tokens: list[int]) -> None:
        """Add the tokens of an answer to the conversation."""
        if self._template:
            self._messages = [*self._open, self._template.parse_answer(tokens)]
            self._tokens = [*prompt, *tokens]


class ChatAnswer:
    """One answer, generated step by step with a drafter or by the base alone."""

    def __init__(
        self,
        base: FrozenBase,
        prompt: list[int],
        drafter: Drafter | None,
        tree: TreePolicy | None,
        max_new_tokens: int,
        sampling: Sampling,
        memory: SuffixAutomaton | None = None,
    ) -> None:
        if len(prompt) >= base.max_length:
            raise InputError(
                f"a conversation must fit into the context of {base.max_length} tokens, got "
                f"{len(prompt)}; type /reset"
            )
        length = min(len(prompt) + max_new_tokens, base.max_length)
        self._engine = Engine(
            base, drafter, tree=tree, max_batch=1, max_length=length, memory=memory
        )
        request = Request(prompt=prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        self.stream = self._engine.submit(request)
        self._text = detokenize.TextStream(base.tokenizer_for("a chat"), prompt)
        self._origins = [BASE_ORIGIN]
        self.pieces: list[tuple[str, Origin]] = []
        """Texts of consecutive tokens so far, each with the origin of its token."""
        self.seconds = 0.0
        """Time of the steps, without the forward of the prompt."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete."""
        return self.stream.finish_reason is not None

    def step(self) -> Text:
        """Decode one step and return its text in colors."""
        num_steps, num_pieces = len(self.stream.steps), len(self.pieces)
        start = time.perf_counter()
        self._engine.step()
        for step in self.stream.steps[num_steps:]:
            self._origins += step_origins(step)
            self.seconds += time.perf_counter() - (start if num_steps else step.times.began)
        # an end token has no text
        tokens = self.stream.tokens[: -1 if self.stream.finish_reason == "eos" else None]
        for index in range(self._text.num_tokens, len(tokens)):
            self._write(lambda token=tokens[index]: self._text.push(token), self._origins[index])
        if self.is_over:
            self._write(self._text.close, BASE_ORIGIN)
        return coloured(self.pieces[num_pieces:])

    def _write(self, write: Callable[[], None], origin: Origin) -> None:
        before = len(self._text.written)
        write()
        self.pieces.append((self._text.written[before:], origin))

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, without the prompt's forward and its token."""
        return (len(self.stream.tokens) - 1) / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """Return tokens per forward and per second."""
        per_forward = (len(self.stream.tokens) - 1) / max(len(self.stream.steps), 1)
        return f"{per_forward:.2f} tokens per forward, {self.tokens_per_second:.1f} tokens/s"


def _lines(console: Console, dialogue: Dialogue) -> Iterator[str]:
    """Yield the questions; lines of a pipe are printed too."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = console.input("\n> ")
        except EOFError:
            console.print()
            return
        if not sys.stdin.isatty():
            console.print(printable(line), soft_wrap=True)
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                dialogue.clear()
            case _:
                yield line


# --- the screen --------------------------------------------------------------------------------


def style(origin: Origin) -> str:
    """Return rich's style of a token; tokens of the base have none."""
    if origin.kind == "base":
        return ""
    if origin.kind == "copied":
        return LOOKUP_COLOUR
    depth = min(origin.depth, len(DEPTH_COLOURS))
    # deeper tokens are underlined too, for readers who do not see colors
    return DEPTH_COLOURS[depth - 1] + (" underline" if depth > 1 else "")


def coloured(pieces: Sequence[tuple[str, Origin]]) -> Text:
    """Return a text with colors, which rich leaves out where there is no terminal."""
    return Text.assemble(*((printable(piece), style(origin)) for piece, origin in pieces))


def legend(depth: int, *, copies: bool = False) -> Text:
    """Return the meaning of the colors."""
    origins = [Origin("drafted", level) for level in range(1, depth + 1)]
    entries = [("the base's own", ""), *((f"{origin}", style(origin)) for origin in origins)]
    if copies:
        entries.append(("copied", LOOKUP_COLOUR))
    return Text(" · ", "dim").join(Text(*entry) for entry in entries)


def _show(console: Console, answer: ChatAnswer, title: str = "") -> None:
    """Print an answer while it is generated."""
    if title:
        console.print(f"{title}:", style="bold")
    while not answer.is_over:
        console.print(answer.step(), end="", soft_wrap=True)
        console.file.flush()
    console.print(f"\n[{answer.summary()}]", style="dim", soft_wrap=True)


def _show_both(console: Console, answer: ChatAnswer, base_answer: ChatAnswer) -> None:
    """Print two answers, each at its own speed, and their ratio."""
    if not console.is_terminal or console.width < MIN_COLUMNS:
        _show(console, answer, "with the head")
        _show(console, base_answer, "the base alone")
    else:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            # step the answer with the smaller clock, so that both appear to run in parallel
            while unfinished := [text for text in (answer, base_answer) if not text.is_over]:
                min(unfinished, key=lambda text: text.seconds).step()
                table = _columns(console, answer, base_answer, console.height - 4)
                live.update(table, refresh=True)
        console.print(_columns(console, answer, base_answer, 10**6))
    is_equal = answer.stream.tokens == base_answer.stream.tokens
    if base_answer.seconds and answer.seconds:
        speedup = answer.tokens_per_second / max(base_answer.tokens_per_second, 1e-9)
        text = "the same text" if is_equal else "another text"
        console.print(f"[{speedup:.1f}x the base alone, {text}]", style="dim")


def _columns(console: Console, answer: ChatAnswer, base_answer: ChatAnswer, lines: int) -> Table:
    """Return the last lines of both answers, next to each other."""
    table = Table(expand=True, box=None, padding=(0, 2, 0, 0))
    width, answers = (console.width - 4) // 2, (answer, base_answer)
    for title in ("with the head", "the base alone"):
        table.add_column(title, width=width, vertical="top")
    texts = [coloured(answer.pieces).wrap(console, width) for answer in answers]
    table.add_row(*(Text("\n").join(text[-lines:]) for text in texts))
    table.add_row(*(answer.summary() for answer in answers), style="dim")
    return table
