r"""Record a conversation with `specheads chat` as a picture that moves: an SVG with no script.

    python scripts/record_chat.py --head DIR --base smollm2_135m_instruct \
        --say "What is a hash table?" --out docs/chat.svg side_by_side=true max_new_tokens=96

The command runs in a terminal of its own, questions are typed into it, and all that it writes is
kept with the time it came at. Nothing is cut but loading; what takes longer than `--seconds` is
played faster, and the title says by how much. Further words are settings of `specheads chat`.
Whoever asks for less motion, or shows no animations, sees the end.
"""

import argparse
import codecs
import html
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.color import blend_rgb
from rich.color_triplet import ColorTriplet
from rich.style import Style

from specheads.core.files import write_atomic

ROWS = 200
"""Rows of the terminal: so many that nothing scrolls away; the picture has those that are used."""

KEY_SECONDS, QUIET_SECONDS, PIECE_SECONDS, HOLD_SECONDS = 0.04, 0.6, 0.02, 6.0
"""Between two keys, before a question is typed, within one picture, and at the end of the last."""

PICTURES = 12
"""A second, as it is played: more of them make a larger file."""

HIDDEN = {"NO_COLOR", "COLUMNS", "LINES"}
"""Variables that would tell the command of another terminal."""

ASKS = re.compile(r"\n\n> $")
"""How the command ends what it has written when it waits for a question."""

WORKING = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|([\r\n\b\t])|([^\x1b\r\n\b\t]+)")
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]*)?$")

CELL, LINE, EDGE, BAR = 8.4, 19, 16, 34
"""Pixels: a column, a row, the margin, the window's title bar."""

BACK, FRONT = ColorTriplet(13, 17, 23), ColorTriplet(214, 220, 228)

TAB = 8

Event = tuple[float, str]
"""Seconds since the first of them, and what was written."""


class Cell(NamedTuple):
    """What stands at one place of a terminal."""

    text: str
    style: Style


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells of one look that come, and perhaps go, together."""

    row: int
    column: int
    text: str
    style: Style
    start: float
    end: float | None
    """None where it stays."""


class Terminal:
    """A command in a pseudo terminal, with what it wrote and when."""

    def __init__(self, command: Sequence[str], columns: int) -> None:
        self.events: list[Event] = []
        self._began, self._heard = 0.0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (ROWS, columns))
        looks = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        seen = {name: os.environ[name] for name in os.environ.keys() - HIDDEN}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, env={**seen, **looks}, start_new_session=True
        )
        os.close(theirs)

    def wait_for_prompt(self) -> None:
        """Listen until a question can be typed."""
        # an answer may look so too, but it goes on
        while self._hear(QUIET_SECONDS) or not ASKS.search(shown(self._heard)):
            if self._process.poll() is not None:
                raise SystemExit(f"the chat ended early, with code {self._process.returncode}")

    def type(self, text: str) -> None:
        """Press keys one by one."""
        self._heard = ""
        for key in f"{text}\r":
            os.write(self._ours, key.encode())
            self._hear(KEY_SECONDS)
            time.sleep(KEY_SECONDS)

    def close(self) -> None:
        """End the command as a user does, by Ctrl-D."""
        os.write(self._ours, b"\x04")
        self._process.wait()
        os.close(self._ours)

    def _hear(self, seconds: float) -> str:
        """Return what is written next, all that comes at once; nothing after so many seconds."""
        heard, until = "", time.monotonic() + seconds
        while select.select([self._ours], [], [], max(until - time.monotonic(), 0.0))[0]:
            try:
                new = os.read(self._ours, 65536)
            except OSError:
                # so Linux says that nobody holds the other end any more
                new = b""
            if not new:
                self._process.wait()
                break
            until = until if heard else time.monotonic() + PIECE_SECONDS
            heard += self._decoder.decode(new)
        if heard:
            now = time.monotonic()
            self._began = self._began or now
            self.events.append((now - self._began, heard))
            self._heard += heard
        return heard


def shown(text: str) -> str:
    """Return what was written without what steers the terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


class Screen:
    """The cells of a terminal: as much of one as rich steers, and no scrolling."""

    def __init__(self, columns: int) -> None:
        self.cells: dict[tuple[int, int], Cell] = {}
        self._columns, self._row, self._column, self._rest = columns, 0, 0, ""
        self._decoder = AnsiDecoder()

    def write(self, text: str) -> None:
        """Take what a command writes."""
        text = self._rest + text
        unfinished = UNFINISHED.search(text)
        self._rest = unfinished.group() if unfinished else ""
        for found in WORKING.finditer(text.removesuffix(self._rest)):
            numbers, order, control, plain = found.groups()
            if plain:
                self._put(plain)
            elif control:
                self._move(control)
            elif order == "m":
                self._decoder.decode_line(found.group())
            else:
                self._steer(order, int(numbers) if numbers.isdecimal() else None)

    def _put(self, text: str) -> None:
        for character in text:
            width = cell_len(character)
            if not width:
                self._join(character)
                continue
            if self._column + width > self._columns:
                self._row, self._column = self._row + 1, 0
            for place in range(width):
                # the second half of a wide character is there, and empty
                cell = Cell("" if place else character, self._decoder.style)
                self.cells[self._row, self._column + place] = cell
            self._column += width

    def _join(self, accent: str) -> None:
        before = (self._row, self._column - 1)
        if before in self.cells:
            text, style = self.cells[before]
            self.cells[before] = Cell(text + accent, style)

    def _move(self, control: str) -> None:
        if control == "\n":
            self._row += 1
        elif control == "\r":
            self._column = 0
        elif control == "\b":
            self._column = max(self._column - 1, 0)
        else:
            self._column = min(self._column // TAB * TAB + TAB, self._columns - 1)

    def _steer(self, order: str, number: int | None) -> None:
        if order == "A":
            self._row = max(self._row - (number or 1), 0)
        elif order == "K":
            first = 0 if number == 2 else self._column
            for column in range(first, self._columns):
                self.cells.pop((self._row, column), None)


def paced(events: Iterable[Event], seconds: float) -> Iterator[Event]:
    """Yield what comes within so many seconds as one, when the last of it is there."""
    for _, group in groupby(events, lambda event: int(event[0] / seconds)):
        times, texts = zip(*group, strict=True)
        yield times[-1], "".join(texts)


def film(events: Iterable[Event], columns: int) -> list[Run]:
    """Return what stood on the screen, where, and from when to when."""
    screen = Screen(columns)
    standing: dict[tuple[int, int], tuple[float, Cell]] = {}
    cells: list[tuple[float, float | None, int, int, Cell]] = []
    for now, text in events:
        screen.write(text)
        for place in standing.keys() | screen.cells.keys():
            since, old = standing.get(place, (now, None))
            new = screen.cells.get(place)
            if new == old:
                continue
            if old is not None:
                cells.append((since, now, *place, old))
                del standing[place]
            if new is not None:
                standing[place] = (now, new)
    cells += [(since, None, *place, cell) for place, (since, cell) in standing.items()]
    return list(_runs(cells))


def _runs(cells: list[tuple[float, float | None, int, int, Cell]]) -> Iterator[Run]:
    """Join neighbours, and leave out what cannot be seen."""
    cells.sort(key=lambda one: (one[0], one[1] or float("inf"), one[2], one[3]))
    numbered = enumerate(cells)

    def together(item: tuple[int, tuple[float, float | None, int, int, Cell]]) -> tuple:
        place, (start, end, row, column, cell) = item
        return start, end, row, column - place, cell.style

    for (start, end, row, _, style), group in groupby(numbered, together):
        members = [one for _, one in group]
        column, text = members[0][3], "".join(cell.text for *_, cell in members)
        if not style.underline:
            column, text = column + len(text) - len(text.lstrip(" ")), text.strip(" ")
        if text:
            yield Run(row, column, text, style, start, end)


def draw(events: Sequence[Event], columns: int, title: str, seconds: float) -> str:
    """Return the moving picture, not longer than so many seconds but for the hold at its end."""
    last = events[-1][0]
    speed = max(last / seconds, 1.0)
    runs = film(paced(events, speed / PICTURES), columns)
    if speed > 1.0:
        title += f" · played {speed:.1f} times as fast"
    period = last / speed + HOLD_SECONDS
    width = round(columns * CELL + 2 * EDGE)
    # the bar has buttons too
    room = columns - 14
    called = title if len(title) <= room else title[: room - 1] + "…"
    height = BAR + EDGE + LINE * (1 + max((run.row for run in runs), default=0))
    looks = _named("s", (run.style for run in runs))
    times = _named("t", ((run.start, run.end) for run in runs))
    body = []
    for when, group in groupby(runs, lambda run: (run.start, run.end)):
        gone = "" if when[1] is None else " x"
        texts = "".join(_text(run, looks[run.style]) for run in group)
        body.append(f'<g class="{times[when]}{gone}">{texts}</g>')
    rules = [f".{name}{{animation-name:{name}}}" for name in times.values()]
    frames = [_frames(name, start, end, speed * period) for (start, end), name in times.items()]
    colours = [f".{name}{{{_css(style)}}}" for style, name in looks.items()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" xml:space="preserve">',
            f"<title>{html.escape(title)}</title>",
            "<style>",
            "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',"
            f"monospace;white-space:pre;fill:{FRONT.hex}}}",
            ".x{visibility:hidden}",
            *colours,
            "@media (prefers-reduced-motion:no-preference){",
            f"g{{animation:{period:.2f}s step-end infinite}}",
            *rules,
            "}",
            *frames,
            "</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{BACK.hex}" stroke="#30363d"/>',
            _buttons(),
            f'<text x="{width // 2}" y="{BAR // 2 + 5}" text-anchor="middle" fill-opacity=".6">'
            f"{html.escape(called)}</text>",
            *body,
            "</svg>\n",
        ]
    )


def _buttons() -> str:
    """Return the three of a window's bar."""
    return "".join(
        f'<circle cx="{EDGE + 4 + 20 * place}" cy="{BAR // 2}" r="6" fill="{colour}"/>'
        for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )


def _named(letter: str, things: Iterable) -> dict:
    """Return a short name for each thing, in their order."""
    return {thing: f"{letter}{place}" for place, thing in enumerate(dict.fromkeys(things))}


def _text(run: Run, look: str) -> str:
    x, y = EDGE + run.column * CELL, BAR + (run.row + 1) * LINE - 5
    # fonts are not equally wide everywhere, columns are
    long = f' textLength="{cell_len(run.text) * CELL:.5g}"' if len(run.text) > 1 else ""
    return f'<text class="{look}" x="{x:.5g}" y="{y}"{long}>{html.escape(run.text)}</text>'


def _frames(name: str, start: float, end: float | None, period: float) -> str:
    """Return when something is seen; without an animation it is what is there at the end."""
    come, gone = f"{100 * start / period:.2f}%", f"{100 * (end or 0) / period:.2f}%"
    last = "100%{visibility:visible}" if end is None else f"{gone},100%{{visibility:hidden}}"
    # what is there from the beginning on
    first = "" if not start else "0%{visibility:hidden}"
    return f"@keyframes {name}{{{first}{come}{{visibility:visible}}{last}}}"


def _css(style: Style) -> str:
    colour = style.color.get_truecolor() if style.color else FRONT
    if style.dim:
        colour = blend_rgb(colour, BACK, 0.35)
    bold = ";font-weight:bold" if style.bold else ""
    return f"fill:{colour.hex}{bold}" + (";text-decoration:underline" if style.underline else "")


def main() -> None:
    """Talk, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", required=True, help="folder of the head")
    parser.add_argument("--base", required=True, help="its base, as base= takes it")
    parser.add_argument("--say", action="append", required=True, help="a question; may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="the SVG that is written")
    parser.add_argument("--title", help="what the window is called; the command, if left out")
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest it may play")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("settings", nargs="*", help="of specheads chat, as side_by_side=true")
    asked = parser.parse_args()
    words = ["chat", f"head={asked.head}", f"base={asked.base}", *asked.settings]
    terminal = Terminal([sys.executable, "-m", "specheads", *words], asked.columns)
    for question in asked.say:
        terminal.wait_for_prompt()
        terminal.type(question)
    terminal.wait_for_prompt()
    terminal.close()
    title = asked.title or " ".join(["specheads", *words])
    drawn = draw(terminal.events, asked.columns, title, asked.seconds)
    write_atomic(asked.out, drawn.encode())


if __name__ == "__main__":
    main()
