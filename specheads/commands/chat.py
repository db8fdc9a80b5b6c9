"""Talk with the base in the terminal, every token coloured by how it came.

specheads chat run=runs/smollm2
specheads chat head=HEAD base=MODEL side_by_side=true
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.table import Table

from specheads.base.model import FrozenBase
from specheads.commands import _compose, _library
from specheads.commands._dialogue import Answer, Dialogue
from specheads.commands._painting import has_colour, legend, lit, plain, tail, told
from specheads.config import Chat
from specheads.core.drafter import Head
from specheads.core.errors import InputError, printable
from specheads.decoding.engine import default_tree
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees.named import fixed_policy

WIDE = 80
"""Columns from which on two answers stand side by side."""

FRAMES = 12
"""Pictures a second of two answers that are written side by side."""

HELP = "/reset forgets what was said, /quit or Ctrl-D ends"


def run(settings: Chat, overrides: Sequence[str]) -> None:
    """Read lines, and answer each."""
    base, head = _opened(settings, overrides)
    if base.tokenizer is None:
        raise InputError(f"a chat needs a base with a tokenizer, and {base.name!r} has none")
    tree = fixed_policy(settings.tree, head.depth)
    dialogue = Dialogue(base.tokenizer, settings.system)
    console = Console(highlight=False, markup=False)
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
    )
    if console.is_terminal:
        console.print(f"{base.name}, its head: {head.kind} of depth {head.depth}; {HELP}")
    if has_colour(console):
        grown = tree or default_tree(head, base)
        console.print(legend(head.depth, copies=grown.copied > 0))
    with suppress(KeyboardInterrupt):
        for turn, asked in enumerate(_lines(console, dialogue)):
            said = replace(sampling, seed=sampling.seed + turn)
            limit = settings.max_new_tokens
            try:
                prompt = dialogue.ask(asked)
                answer = Answer(base, prompt, head, tree, limit, said)
            except InputError as error:
                sys.stderr.write(_compose.message(error))
                continue
            if settings.side_by_side:
                alone = Answer(base, prompt, None, None, limit, said)
                _both(console, answer, alone)
            else:
                _write(console, answer)
            dialogue.answered([*prompt, *answer.stream.tokens], answer.text)


def _opened(settings: Chat, overrides: Sequence[str]) -> tuple[FrozenBase, Head]:
    """Return the base that answers, and the head that drafts for it."""
    if not settings.run:
        return _library.objects(settings, None, None, "talk to")
    made, trained = _library.own(settings, overrides)
    made.refuse_unfinished("talked to")
    base = _library.load_base(trained)
    return base, _library.head_of(made, base, force=settings.force)


def _lines(console: Console, dialogue: Dialogue) -> Iterator[str]:
    """Yield what is asked; what comes through a pipe is shown too, so that it can be read."""
    typed, piped = sys.stdin.isatty(), _piped()
    while True:
        try:
            line = console.input("\n> ") if typed else next(piped)
        except (EOFError, StopIteration):
            return
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                dialogue.clear()
            case _:
                if not typed:
                    console.print(f"> {printable(line)}", soft_wrap=True)
                yield line


def _piped() -> Iterator[str]:
    """Yield the lines of a pipe; one that is no text is told."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            told = f"line {number} is not and is passed over: {error}"
            sys.stderr.write(f"error: what is asked must be UTF-8; {told}\n")


def _write(console: Console, answer: Answer, title: str = "") -> None:
    """Write an answer as it comes."""
    if title:
        console.print(f"{title}:", style="bold")
    for new in answer.rest():
        shown = lit(new) if has_colour(console) else plain(new)
        console.print(shown, end="", soft_wrap=True)
        console.file.flush()
    console.print(f"\n[{told(answer)}]", style="dim", soft_wrap=True)


def _both(console: Console, answer: Answer, alone: Answer) -> None:
    """Write two answers, each in its own time, and say which was faster."""
    if not console.is_terminal or console.width < WIDE:
        _write(console, answer, "with the head")
        _write(console, alone, "the base alone")
    else:
        with Live(
            console=console, transient=True, auto_refresh=False, vertical_overflow="crop"
        ) as live:
            shown = 0.0
            # whoever is behind in its own time goes on: so they run as if side by side
            while racing := [one for one in (answer, alone) if not one.is_over]:
                one = min(racing, key=lambda one: one.seconds)
                one.step()
                if one.seconds > shown + 1 / FRAMES:
                    shown = one.seconds
                    live.update(_columns(console, answer, alone, console.height - 4), refresh=True)
        console.print(_columns(console, answer, alone, 10**6))
    same = "the same text" if answer.stream.tokens == alone.stream.tokens else "another text"
    if alone.seconds and answer.seconds:
        faster = answer.tokens_per_second / max(alone.tokens_per_second, 1e-9)
        console.print(f"[{faster:.2f} times the base alone, {same}]", style="dim")


def _columns(console: Console, answer: Answer, alone: Answer, lines: int) -> Table:
    table = Table(expand=True, box=None, padding=(0, 2, 0, 0))
    width = (console.width - 4) // 2
    for title in ("with the head", "the base alone"):
        table.add_column(title, width=width, vertical="top")
    both = (answer, alone)
    table.add_row(*(tail(lit(one.painted), console, width, lines) for one in both))
    table.add_row(*(f"[{told(one)}]" for one in both), style="dim")
    return table
