"""Chat with the base in the terminal; colours show which tokens were drafted.

specheads chat run=runs/smollm2
specheads chat head=HEAD base=MODEL side_by_side=true
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from rich.console import Console
from rich.live import Live
from rich.table import Table

from specheads.base.model import FrozenBase
from specheads.commands._dialogue import (
    Answer,
    Dialogue,
    coloured,
    has_colour,
    legend,
    plain,
    summary,
    tail,
)
from specheads.commands._library import head_of, load_base, objects, own
from specheads.config import Chat, compose
from specheads.core.drafter import Head
from specheads.core.errors import InputError, printable
from specheads.decoding.engine import default_tree
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees.named import fixed_policy

MIN_COLUMNS = 80
"""Narrower terminals show two answers one after the other."""

FRAMES_PER_SECOND = 12

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends"


def run(settings: Chat, overrides: Sequence[str]) -> None:
    """Answer each line of standard input."""
    base, head = _load(settings, overrides)
    if base.tokenizer is None:
        raise InputError(f"a chat needs a base with a tokenizer, got {base.name!r}; add its files")
    tree = fixed_policy(head_depth=head.depth, **asdict(settings.tree))
    dialogue = Dialogue(base.tokenizer, settings.system)
    console = Console(highlight=False, markup=False)
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
    )
    if console.is_terminal:
        console.print(f"{base.name} with a {head.kind} head of depth {head.depth}; {HELP}")
    if has_colour(console):
        grown = tree or default_tree(head, base)
        console.print(legend(head.depth, copies=grown.copied > 0))
    with suppress(KeyboardInterrupt):
        for turn, text in enumerate(_lines(console, dialogue)):
            one = replace(sampling, seed=sampling.seed + turn)
            limit = settings.max_new_tokens
            try:
                prompt = dialogue.ask(text)
                answer = Answer(base, prompt, head, tree, limit, one)
            except InputError as error:
                sys.stderr.write(compose.message(error))
                continue
            if settings.side_by_side:
                _show_both(console, answer, Answer(base, prompt, None, None, limit, one))
            else:
                _show(console, answer)
            dialogue.answered([*prompt, *answer.stream.tokens], answer.text)


def _load(settings: Chat, overrides: Sequence[str]) -> tuple[FrozenBase, Head]:
    """Return the base that answers and the head that drafts."""
    if not settings.run:
        return objects(settings, None, None, "chat with")
    made, trained = own(settings, overrides)
    made.refuse_unfinished("used in a chat")
    base = load_base(trained)
    return base, head_of(made, base, force=settings.force)


def _lines(console: Console, dialogue: Dialogue) -> Iterator[str]:
    """Yield the questions; lines of a pipe are printed too."""
    is_typed, piped = sys.stdin.isatty(), _piped()
    while True:
        try:
            line = console.input("\n> ") if is_typed else next(piped)
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
                if not is_typed:
                    console.print(f"> {printable(line)}", soft_wrap=True)
                yield line


def _piped() -> Iterator[str]:
    """Yield the lines of a pipe; skip those that are not UTF-8, with a message."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            sys.stderr.write(f"error: questions must be UTF-8, skipped line {number}: {error}\n")


def _show(console: Console, answer: Answer, title: str = "") -> None:
    """Print an answer while it is generated."""
    if title:
        console.print(f"{title}:", style="bold")
    for new in answer.rest():
        shown = coloured(new) if has_colour(console) else plain(new)
        console.print(shown, end="", soft_wrap=True)
        console.file.flush()
    console.print(f"\n[{summary(answer)}]", style="dim", soft_wrap=True)


def _show_both(console: Console, answer: Answer, alone: Answer) -> None:
    """Print two answers, each at its own speed, and their ratio."""
    if not console.is_terminal or console.width < MIN_COLUMNS:
        _show(console, answer, "with the head")
        _show(console, alone, "the base alone")
    else:
        with Live(
            console=console, transient=True, auto_refresh=False, vertical_overflow="crop"
        ) as live:
            shown = 0.0
            # step the answer with the smaller clock, so that both appear to run in parallel
            while running := [one for one in (answer, alone) if not one.is_over]:
                one = min(running, key=lambda one: one.seconds)
                one.step()
                if one.seconds > shown + 1 / FRAMES_PER_SECOND:
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
    table.add_row(*(tail(coloured(one.pieces), console, width, lines) for one in both))
    table.add_row(*(f"[{summary(one)}]" for one in both), style="dim")
    return table
