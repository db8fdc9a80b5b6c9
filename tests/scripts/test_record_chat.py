"""The recorder of conversations: what a terminal shows, and a picture of it that moves."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands import chat
from specheads.commands._dialogue import Answer, Dialogue
from specheads.commands._painting import style
from specheads.decoding.generate import generate
from specheads.decoding.loop import BASE_ORIGIN
from specheads.decoding.sampling import GREEDY
from specheads.decoding.trees.policies import chain
from specheads.heads.load import build_for
from specheads.measure.oracle import Oracle
from tests import tiny

ROOT = Path(__file__).parents[2]
COLUMNS = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def base(folder: Path) -> FrozenBase:
    return FrozenBase.load(folder, device="cpu")


class Recording:
    """A file that keeps what is written and when; a tenth of a second lies between two pieces."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.events.append((len(self.events) / 10, text.replace("\n", "\r\n")))
        return len(text)

    def flush(self) -> None:
        pass


def recorded(show: Callable[[Console], None]) -> list[tuple[float, str]]:
    recording = Recording()
    file = cast(TextIO, recording)
    console = Console(
        file=file,
        force_terminal=True,
        color_system="truecolor",
        width=COLUMNS,
        height=50,
        highlight=False,
        markup=False,
    )
    show(console)
    return recording.events


def answered(base: FrozenBase, *, alone: bool = False) -> Answer:
    """Return an answer that is yet to be written; its drafts are right four times of five."""
    assert base.tokenizer is not None
    prompt = Dialogue(base.tokenizer, "").ask("def add(first, second):\n")
    said = generate(base, None, [prompt], max_new_tokens=24).tokens[0]
    oracle = Oracle([prompt + said], 3, base.vocab_size, rate=0.8)
    drafter, tree = (None, None) if alone else (oracle, chain(3))
    return Answer(base, prompt, drafter, tree, 24, GREEDY)


def rows(picture: ElementTree.Element, *, at_end: bool = True) -> str:
    """Return the text of a picture by its rows; at its end, or all that is ever seen."""
    found: dict[float, list[tuple[float, str]]] = {}
    for group in picture.iterfind(".//{*}g"):
        if at_end and "x" in group.attrib["class"].split():
            continue
        for text in group.iterfind("{*}text"):
            place = float(text.attrib["x"])
            found.setdefault(float(text.attrib["y"]), []).append((place, text.text or ""))
    return "\n".join("".join(text for _, text in sorted(found[row])) for row in sorted(found))


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_an_answer_is_drawn_with_every_token_in_the_colour_of_how_it_came(
    script: ModuleType, base: FrozenBase
):
    answer = answered(base)
    events = recorded(lambda console: chat._write(console, answer))
    runs = script.film(events, COLUMNS)
    drawn = script.draw(events, COLUMNS, "a talk", 20.0)
    picture = ElementTree.fromstring(drawn)
    assert squeezed(answer.text) in squeezed(rows(picture))
    assert "24 tokens, " in rows(picture)
    assert {origin.kind for origin in answer.origins} == {"base", "drafted"}
    looks = {origin: style(origin) for origin in set(answer.origins) - {BASE_ORIGIN}}
    assert all(look.split()[0] in drawn for look in looks.values())
    # what was drafted stands there in its colour and nothing else does
    drafted = [piece for piece, origin in answer.painted if origin != BASE_ORIGIN]
    shown = [run.text for run in runs if run.style.color and run.style.color.name in drawn]
    assert squeezed("".join(shown)) == squeezed("".join(drafted))


def test_what_comes_later_is_seen_later_and_stays(script: ModuleType):
    events = [(0.0, "one "), (1.0, "\x1b[31mtwo\x1b[0m\r\n"), (2.5, "three")]
    runs = script.film(events, COLUMNS)
    assert [(run.text, run.start, run.end) for run in runs] == [
        *(("one", 0.0, None), ("two", 1.0, None), ("three", 2.5, None)),
    ]
    assert [(run.row, run.column) for run in runs] == [(0, 0), (0, 4), (1, 0)]
    drawn = script.draw(events, COLUMNS, "title", 20.0)
    # of 2.5 seconds, and the hold at the end
    begins = [f"{100 * run.start / (2.5 + script.HOLD_SECONDS):.2f}%" for run in runs[1:]]
    assert [f"hidden}}{begin}{{visibility:visible" in drawn for begin in begins] == [True, True]
    assert "times as fast" not in drawn


def test_a_long_conversation_is_played_faster_and_says_so(script: ModuleType):
    drawn = script.draw([(0.0, "a"), (50.0, "b")], COLUMNS, "title", 20.0)
    assert "title · played 2.5 times as fast" in drawn
    assert f"animation:{20 + script.HOLD_SECONDS:.2f}s step-end infinite" in drawn


def test_a_long_title_leaves_room_for_the_buttons_and_is_told_whole(script: ModuleType):
    long = "specheads chat " + "x" * COLUMNS
    drawn = script.draw([(0.0, "a")], COLUMNS, long, 20.0)
    assert f"<title>{long}</title>" in drawn
    assert drawn.count("x" * (COLUMNS - 10)) == 1
    assert f"{long[: COLUMNS - 15]}…</text>" in drawn


def test_pictures_are_at_most_so_many_a_second(script: ModuleType):
    events = [(place / 100, str(place % 10)) for place in range(100)]
    fewer = list(script.paced(events, 1 / script.PICTURES))
    assert len(fewer) == script.PICTURES
    assert "".join(text for _, text in fewer) == "0123456789" * 10
    # nothing is seen before it came
    assert fewer[-1][0] == events[-1][0]


def test_a_line_as_wide_as_the_terminal_goes_on_below(script: ModuleType):
    screen = script.Screen(4)
    # a wide character does not stand half on a line, an accent stands on its letter
    screen.write("abc\u4e2dd\r\ne\bf\u0301\x1b[?25l")
    lines = {(place[0], place[1]): cell.text for place, cell in screen.cells.items()}
    assert lines == {
        **{(0, 0): "a", (0, 1): "b", (0, 2): "c"},
        **{(1, 0): "\u4e2d", (1, 1): "", (1, 2): "d", (2, 0): "f\u0301"},
    }


def test_orders_that_come_in_two_pieces_are_one(script: ModuleType):
    screen = script.Screen(COLUMNS)
    for piece in ("first\r\nsecond\x1b[", "1A\r\x1b", "[2Kthird"):
        screen.write(piece)
    told = "".join(cell.text for _, cell in sorted(screen.cells.items()))
    assert told == "thirdsecond"


def test_two_answers_side_by_side_end_as_the_terminal_ends(
    script: ModuleType, base: FrozenBase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chat, "FRAMES", 10**6)
    answer, alone = answered(base), answered(base, alone=True)
    events = recorded(lambda console: chat._both(console, answer, alone))
    picture = ElementTree.fromstring(script.draw(events, COLUMNS, "two", 20.0))
    told = rows(picture)
    assert "with the head" in told
    assert "the base alone" in told
    assert told.count("24 tokens") == 2
    assert "the same text]" in told
    # pictures before the last come and go
    assert {run.end is None for run in script.film(events, COLUMNS)} == {True, False}


def test_a_picture_needs_no_script_and_asks_nobody(script: ModuleType):
    drawn = script.draw([(0.0, "<b>&")], COLUMNS, "<i>&", 20.0)
    picture = ElementTree.fromstring(drawn)
    assert rows(picture) == "<b>&"
    addresses = re.findall(r"https?://[^\s\"'<]+", drawn)
    assert addresses == ["http://www.w3.org/2000/svg"]
    tags = {element.tag.rpartition("}")[2] for element in picture.iter()}
    assert tags <= {"svg", "title", "style", "rect", "circle", "text", "g"}
    assert not re.search(r"@import|url\(|\bon\w+=", drawn)
    # with no animation, or less motion asked for, the end is seen
    before, _, rest = drawn.partition("@media (prefers-reduced-motion:no-preference){")
    moving, _, after = rest.partition("\n}\n")
    assert "animation:" in moving
    assert "animation:" not in before + after


@pytest.mark.slow
def test_the_command_itself_is_recorded(folder: Path, base: FrozenBase, tmp_path: Path):
    torch.manual_seed(0)
    build_for({"kind": "medusa", "depth": 2}, base).save_pretrained(tmp_path / "head")
    command = [sys.executable, str(ROOT / "scripts/record_chat.py"), "--head"]
    command += [str(tmp_path / "head"), "--base", str(folder), "--out", str(tmp_path / "talk.svg")]
    settings = ["base.device=cpu", "max_new_tokens=12"]
    subprocess.run([*command, "--say", "def add(", "--say", "class A", *settings], check=True)
    drawn = (tmp_path / "talk.svg").read_text()
    told = rows(ElementTree.fromstring(drawn))
    assert told.count("12 tokens, ") == 2
    assert squeezed("> def add(") in squeezed(told)
    assert "drafted at depth 2" in told
    for question in ("def add(", "class A"):
        prompt = Dialogue(cast(Any, base.tokenizer), "").ask(question)
        answer = Answer(base, prompt, None, None, 12, GREEDY)
        list(answer.rest())
        assert squeezed(answer.text) in squeezed(told)
    assert len(drawn) < 200_000


@pytest.mark.slow
def test_a_command_that_ends_early_leaves_no_picture(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts/record_chat.py"), "--head", str(tmp_path)]
    command += ["--base", str(tmp_path), "--say", "hello", "--out", str(tmp_path / "talk.svg")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the chat ended early, with code 2" in done.stderr
    assert not (tmp_path / "talk.svg").exists()


def test_the_recording_that_the_readme_shows_is_whole_and_small():
    drawn = (ROOT / "docs" / "chat.svg").read_text(encoding="utf-8")
    assert "tokens/s" in rows(ElementTree.fromstring(drawn))
    assert len(drawn) < 200_000
    assert "](docs/chat.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")
