"""Pages are correct: their commands compose, their links and paths exist, their code runs."""

import re
import shlex
from pathlib import Path

import pytest

from specheads.__main__ import commands
from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.heads.load import build_for_base, configure

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("recipes/**/*.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def code(page: Path) -> list[str]:
    """Return the shell lines and the code spans of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for kind, body in FENCED.findall(text) if kind == "sh"]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", FENCED.sub("", text))


def called(text: str) -> tuple[str, ...] | None:
    """Return the command of this package that a piece of code calls, and its overrides."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        # text with an apostrophe, not a command line
        return None
    for place, word in enumerate(words):
        if word == "train.py" and len(words) > place + 1:
            return ("train", *words[place + 1 :])
        if Path(word).name == "specheads" and len(words) > place + 1:
            return tuple(word for word in words[place + 1 :] if word != "--help")
    return None


def calls(page: Path) -> list[tuple[str, ...]]:
    return [call for text in code(page) if (call := called(text)) is not None]


CALLS = sorted({call for page in PAGES for call in calls(page)})


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_command_is_one_of_ours_and_composes(call: tuple[str, ...]):
    name, *given = (word.replace("=foo", "=medusa") for word in call)
    assert name in commands()
    if not given:
        # the page only names the command
        return
    settings = compose.settings_of(name, given)
    if hasattr(settings, "schedule"):
        assert configure(settings.head).depth >= 1
    else:
        # an engine's times go into the folder of the head
        out = getattr(settings, "out", "") or getattr(settings, "engine", "")
        alone = out and getattr(settings, "head_path", "")
        assert settings.run or getattr(settings, "heads", ()) or alone


def test_every_relative_link_leads_to_a_file():
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(
            r"\]\(([^)#\s]+)[^)]*\)", FENCED.sub("", page.read_text(encoding="utf-8"))
        )
        if "://" not in link
    ]
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []


def test_every_path_a_page_names_exists():
    """Code spans that start with a folder of the checkout."""
    rooms = ("specheads/", "configs/", "recipes/", "scripts/", "tests/", "docs/")
    spans = [(page, span) for page in PAGES for span in code(page) if span.startswith(rooms)]
    kept = [(page, span) for page, span in spans if "NAME" not in span]
    assert [(page, span) for page, span in kept if not (ROOT / span).exists()] == []


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_the_makefile_has_every_target_that_a_page_names(page: Path):
    targets = set(re.findall(r"^([a-z_-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    blocks = FENCED.findall(page.read_text(encoding="utf-8"))
    lines = code(page) + [line for _, body in blocks for line in body.splitlines()]
    spoken = [shlex.split(line, comments=True) for line in lines if line.startswith("make ")]
    named = {word for words in spoken for word in words[1:] if "=" not in word}
    assert {"test"} <= named <= targets


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (example,) = [body for kind, body in FENCED.findall(PAGES[0].read_text()) if kind == "python"]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    base = FrozenBase.load(ROOT / "recipes/tiny_code/base", dtype="float32")
    untrained = build_for_base({"kind": "mlp_speculator"}, base)
    untrained.save_pretrained(tmp_path / "runs/tiny_code/head")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "forwards instead of 63" in capsys.readouterr().out
