"""Pages are correct: their commands compose, their links and paths exist, their code runs."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from specheads import config
from specheads.__main__ import commands
from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.heads.load import build_for, configure

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
            return ("train", *overrides(words[place + 1 :]))
        if Path(word).name == "specheads" and len(words) > place + 1:
            return tuple(overrides(words[place + 1 :]))
    return None


def overrides(words: list[str]) -> list[str]:
    return [word for word in words if word != "--help"]


def calls(page: Path) -> list[tuple[str, ...]]:
    return [call for text in code(page) if (call := called(text)) is not None]


CALLS = sorted({call for page in PAGES for call in calls(page)})


def concrete(call: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the placeholder `foo` by a kind of head that exists."""
    return tuple(word.replace("=foo", "=medusa") for word in call)


def test_the_readme_shows_how_to_train_and_to_evaluate():
    shown = [call[0] for call in calls(PAGES[0])]
    assert shown.count("train") >= 2
    assert shown.count("evaluate") >= 2


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_command_is_one_of_ours_and_composes(call: tuple[str, ...]):
    name, *given = concrete(call)
    assert name in commands()
    if not given:
        # the page only names the command
        return
    if name in ("train", "distill"):
        settings = compose.from_command_line(name, compose.lengthen(name, given))
        assert settings.schedule.phases
    else:
        compose.register()
        folder = str(config.data_dir("configs"))
        with hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
            composed = hydra.compose(name, compose.lengthen(name, given))
        settings: Any = OmegaConf.to_object(composed)
        assert isinstance(settings, compose.SCHEMAS[name])
        several = getattr(settings, "heads", ())
        # a simulation with computed times needs no head
        alone = getattr(settings, "out", "") and (name == "simulate" or settings.head_path)
        assert getattr(settings, "run", "") or several or alone


TRAININGS = [call for call in CALLS if call[0] == "train" and call[1:]]


@pytest.mark.parametrize("call", TRAININGS, ids=" ".join)
def test_a_command_s_head_takes_its_settings(call: tuple[str, ...]):
    compose.register()
    folder = str(config.data_dir("configs"))
    with hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
        settings: Any = OmegaConf.to_object(hydra.compose("train", list(concrete(call)[1:])))
    assert configure(settings.head).depth >= 1


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


TEXTS = [*PAGES, *sorted(ROOT.glob("configs/**/*.yaml"))] + [
    path for folder in ("specheads", "scripts") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]


def test_every_page_that_a_text_mentions_exists():
    named = {
        (text, page)
        for text in TEXTS
        for page in re.findall(r"\bdocs/\w+\.md", text.read_text(encoding="utf-8"))
    }
    assert [(text, page) for text, page in named if not (ROOT / page).exists()] == []


MODULES = [
    path.relative_to(ROOT)
    for folder in ("specheads", "scripts", "tests")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]
PARTS = [path.with_suffix("").parts for path in MODULES]
ROOMS = {part for path in MODULES for part in path.parts[:-1]}
OTHERS = {"convert_hf_to_gguf", "prefix_mlp_head", "foo"}
"""Files of engines, and of a head that is an example."""

OBJECTS = (
    *("adapter", "base", "head", "stream", "layers", "replay", "settings", "tree", "evaluation"),
    *("model", "nn", "torch", "datasets", "transformers", "hydra", "specheads", "joint"),
    *("time", "json", "degenerate"),
)
"""Words before a dot that are not modules of this package: objects, settings, libraries."""


def missing(text: str) -> Iterator[str]:
    """Yield modules, and names in modules, that a text mentions and that do not exist."""
    for named in re.findall(r"(?<![\w./-])((?:\w+/)*\w+)\.py\b", text):
        parts = tuple(named.split("/"))
        ours = len(parts) == 1 or parts[0] in ROOMS
        there = named == "train" or any(one[-len(parts) :] == parts for one in PARTS)
        if ours and not there and not {parts[-1], parts[0]} & (OTHERS | {"server", "models"}):
            yield f"{named}.py"
    for named in re.findall(r"\bspecheads(?:\.[a-z]\w*)+", text):
        if find(named) is None and not named.endswith(".json"):
            yield named
    for module, name in re.findall(r"`([a-z_]+)\.([A-Za-z]\w*)[`(]", text):
        files = [path for path in MODULES if path.stem == module and path.parts[0] == "specheads"]
        words = [word for path in files for word in re.findall(r"\w+", (ROOT / path).read_text())]
        words += [path.stem for path in MODULES if path.parts[-2] == module]
        suffixes = ("py", "md", "json", "jsonl", "yaml", "txt", "png", "html", "safetensors")
        if name not in (*suffixes, *words) and module not in OBJECTS:
            yield f"{module}.{name}"


def find(named: str) -> Any:
    """Return the object of a dotted name of the package, or None."""
    parts = named.split(".")
    for size in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:size])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            found: Any = importlib.import_module(".".join(parts[:size]))
            for part in parts[size:]:
                found = getattr(found, part, None)
            return found
    return None


def test_every_module_that_a_text_mentions_exists():
    spoken = {(text, name) for text in TEXTS for name in missing(text.read_text(encoding="utf-8"))}
    assert spoken == set()


def test_names_that_do_not_exist_are_found():
    gone = "see weights.py, heads/weights.py, `graft.Lookup`, `counts.nowhere`, specheads.base.none"
    assert list(missing(gone)) == [
        *("weights.py", "heads/weights.py", "specheads.base.none"),
        *("graft.Lookup", "counts.nowhere"),
    ]
    assert list(missing("see masks.py, base/masks.py, `hybrid.Lookup`, specheads.generate")) == []


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_the_makefile_has_every_target_that_a_page_names(page: Path):
    targets = set(re.findall(r"^([a-z_-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    blocks = FENCED.findall(page.read_text(encoding="utf-8"))
    lines = code(page) + [line for _, body in blocks for line in body.splitlines()]
    spoken = [shlex.split(line, comments=True) for line in lines if line.startswith("make ")]
    named = {word for words in spoken for word in words[1:] if "=" not in word}
    assert {"test"} <= named <= targets


def test_every_extra_is_of_use():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    code = "".join(path.read_text() for path in ROOT.glob("specheads/**/*.py"))
    for extra in extras.keys() - {"dev"}:
        names = [re.split("[<>=[]", name)[0].replace("-", "_") for name in extras[extra]]
        assert [name for name in names if name not in code] == [], extra


def test_contributing_has_a_table_of_at_most_25_rows():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## To change X, go to Y")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert 16 <= len(rows) <= 25


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (example,) = [body for kind, body in FENCED.findall(PAGES[0].read_text()) if kind == "python"]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    base = FrozenBase.load(ROOT / "recipes/tiny_code/base", dtype="float32")
    untrained = build_for({"kind": "mlp_speculator"}, base)
    untrained.save_pretrained(tmp_path / "runs/tiny_code/head")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "forwards instead of 63" in capsys.readouterr().out
