"""texts.json contains the decoded texts, and the page shows them as text."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest

from specheads.decoding.loop import node_origins
from specheads.measure import report
from specheads.measure.generation import NUM_TEXTS
from specheads.measure.report import visible, wilson
from specheads.measure.results import DecodedText, Results, read_results
from tests.decoding.test_detokenize import tokenizer
from tests.measure.test_measure import HISTORY
from tests.measure.texts import NEW_TOKENS, RTL, hybrid, nasty, results_of

BROKEN = "\N{REPLACEMENT CHARACTER}"


def pieces(text: DecodedText) -> list[str]:
    tokens = [text.first]
    for step in text.steps:
        tokens += [*(step.tokens[node] for node in step.path[1:]), step.bonus]
    return tokens[: text.num_tokens]


def test_texts_equal_the_base_alone_and_have_drafted_and_copied_tokens():
    prompts, continuations, texts = hybrid()
    assert len(texts) == NUM_TEXTS < len(prompts)
    for prompt, tokens, text in zip(prompts, continuations, texts, strict=False):
        assert text.num_tokens == NEW_TOKENS
        assert text.prompt == tokenizer().decode(prompt.tokens)
        # parts of characters and the end have names; the rest is the text except broken bytes
        letters = re.sub("⟨.*?⟩", "", "".join(pieces(text)))
        base_text = str(tokenizer().decode(tokens, skip_special_tokens=True))
        assert letters.replace(BROKEN, "") == base_text.replace(BROKEN, "")
        kinds = {
            origin.kind
            for step in text.steps
            for origin in node_origins(step.parents, step.num_copied)
        }
        assert kinds == {"base", "drafted", "copied"}


def test_texts_round_trip_through_their_own_file(tmp_path):
    results = results_of(nasty(), *hybrid()[2])
    page = report.write_report(tmp_path, results, [])
    stored = json.loads((tmp_path / "texts.json").read_text())
    assert stored == {"schema": 1, "texts": [asdict(text) for text in results.texts]}
    assert "texts" not in json.loads((tmp_path / "results.json").read_text())
    stored = read_results(Results, tmp_path / "results.json")
    assert stored is not None
    assert stored == replace(results, texts=[])
    assert page.is_file()


class Reader(HTMLParser):
    """The page as a browser parses it: elements with attributes, and token texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[str] = []
        self.open: list[str] = []
        self.is_token = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)
        if tag == "span":
            self.is_token = "data-step" in dict(attrs)
        if self.is_token and tag == "span":
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.is_token and self.open[-1:] in (["span"], ["i"]):
            self.tokens[-1] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    results = results_of(nasty(), *hybrid()[2])
    return report.write_report(folder, results, HISTORY).read_text(encoding="utf-8")


def test_token_text_cannot_add_elements_or_scripts(page: str):
    elements = Reader(page).elements
    assert sum(tag == "script" for tag, _ in elements) == 2
    assert {tag for tag, _ in elements} & {"iframe", "object", "nasty", "habit"} == set()
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    urls = [attributes.get(name) for _, attributes in elements for name in ("src", "href")]
    allowed = "#", "data:,", "data:image/png;base64,"
    assert all(url.startswith(allowed) for url in urls if url is not None)
    assert not re.search(r"url\((?!#)|@import", page)
    assert not any(letter in page for letter in (RTL, "\x00", "\x1b", "\u2028", "\ud800"))


def test_every_token_is_shown_with_its_origin(page: str):
    reader = Reader(page)
    spans = [span for tag, span in reader.elements if tag == "span" and "data-step" in span]
    texts = [nasty(), *hybrid()[2]]
    assert reader.tokens == [visible(piece) for text in texts for piece in pieces(text)]
    titles = {(str(span["class"]), re.sub(r"\d+", "N", str(span["title"]))) for span in spans}
    assert titles >= {
        ("t b", "the base's own, while the prompt was read"),
        ("t b", "the base's own, step N"),
        ("t d1", "drafted at depth N, step N"),
        ("t d2", "drafted at depth N, step N"),
        ("t d6", "drafted at depth N, step N"),
        ("t c", "copied at depth N, step N"),
    }


def test_content_policy_allows_only_the_script(page: str):
    policy = next(
        attributes["content"]
        for tag, attributes in Reader(page).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")


def test_wilson_interval_matches_textbooks():
    # Brown, Cai and DasGupta 2001: 0 of n is z^2 / (n + z^2)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-5)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=5e-5)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
