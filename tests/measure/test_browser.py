"""The report in headless Chromium: phone and desktop width, light and dark mode."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from specheads.measure import report
from tests.measure.test_measure import HISTORY
from tests.measure.texts import hybrid, nasty, results_of

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
QUIET = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--no-sandbox",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
"""Turn off the browser's own requests; root has no sandbox."""


@dataclass
class Watched:
    """An open page with its console messages and requests."""

    page: Page
    file: Path
    messages: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"step": step, "phase": "corpus", "tokens": 32 * step, "hours": step / 100}
        | {"validation/loss": 60 / step, "validation/accept/depth_0": step / 60}
        for step in (20, 40, 60)
    ]
    results = results_of(*hybrid()[2], nasty())
    return report.write_report(tmp_path_factory.mktemp("report"), results, [*HISTORY, *rows])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(params=[(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")], ids=str)
def watched(request: pytest.FixtureRequest, browser: Browser, file: Path) -> Iterator[Watched]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    watched = Watched(context.new_page(), file)
    watched.page.on("console", lambda message: watched.messages.append(message.text))
    watched.page.on("pageerror", lambda error: watched.messages.append(str(error)))
    watched.page.on("request", lambda request: watched.urls.append(request.url))
    watched.page.goto(file.as_uri())
    yield watched
    # after every test
    assert watched.messages == []
    assert watched.urls == [file.as_uri()]
    context.close()


def test_plots_verdict_and_texts_are_visible(watched: Watched):
    page = watched.page
    for name in ("acceptance", "loss", "validation", "learning"):
        plot = page.locator(f"#plot-{name} img")
        assert plot.is_visible()
        box = plot.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 150
    assert page.locator(".verdict").is_visible()
    assert page.locator(".headline").count() == 3
    assert page.locator(".text").count() == 4
    ground = "span => getComputedStyle(span).background"
    grounds = {
        look: page.locator(f".tokens .{look}").first.evaluate(ground)
        for look in ("b", "d1", "d2", "d6", "c")
    }
    assert len(set(grounds.values())) == 5, "each origin has a background of its own"


def test_click_draws_the_tree_of_a_step(watched: Watched):
    page, text = watched.page, watched.page.locator(".text").first
    steps = hybrid()[2][0].steps
    token = text.locator(".t[data-step='3']").first
    token.click()
    assert text.locator(".tree strong").inner_text() == f"Step 3 of {len(steps)}"
    present = 1 + sum(parent >= 0 for parent in steps[2].parents)
    assert text.locator(".tree svg g").count() == present + 1, "the tree and the base's own token"
    assert text.locator(".tree svg g.kept:not(.bonus)").count() == len(steps[2].path)
    assert text.locator(".tree svg path.kept").count() == len(steps[2].path)
    assert text.locator(".t.on").count() == len(steps[2].path)
    assert token.evaluate("span => span === document.activeElement")
    assert page.locator(".tree svg").first.is_visible()


def test_arrow_keys_and_buttons_step_through_a_text(watched: Watched):
    page, text = watched.page, watched.page.locator(".text").first
    steps = hybrid()[2][0].steps
    heading, tokens = text.locator(".tree strong"), text.locator(".t")
    tokens.first.click()
    assert heading.inner_text() == "Before the first step"
    page.keyboard.press("ArrowRight")
    assert heading.inner_text() == f"Step 1 of {len(steps)}"
    for _ in steps[0].path:
        page.keyboard.press("ArrowRight")
    assert heading.inner_text() == f"Step 2 of {len(steps)}"
    page.keyboard.press("ArrowLeft")
    assert heading.inner_text() == f"Step 1 of {len(steps)}"
    page.keyboard.press("End")
    assert heading.inner_text() == f"Step {len(steps)} of {len(steps)}"
    assert text.get_by_label("next step").is_disabled()
    text.get_by_label("previous step").click()
    assert heading.inner_text() == f"Step {len(steps) - 1} of {len(steps)}"
    # exactly one token is in the tab order
    assert text.locator(".t[tabindex='0']").count() == 1


def test_token_text_in_the_tree_is_not_markup(watched: Watched):
    text = watched.page.locator(".text").last
    text.locator(".t[data-step='1']").first.click()
    assert "</script>" in text.locator(".tree").inner_text()
    assert watched.page.evaluate("document.scripts.length") == 2
    assert text.locator(".tree img, .tree script").count() == 0
