import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EMPTY = "# A page\n\nBefore.\n\n<!-- results -->\n<!-- /results -->\n\nAfter.\n"
OVERVIEW = EMPTY + "\n<!-- heads -->\n<!-- /heads -->\n"

OWN = Path(__file__).parents[2] / "recipes" / "tiny_code" / "results.json"
RESULTS: dict[str, Any] = json.loads(OWN.read_text())
KIND = RESULTS["head"]["kind"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout of two recipes, of which only tiny_code was run."""
    for name in ("granite_code", "tiny_code"):
        folder = tmp_path / "recipes" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").touch()
        (folder / "README.md").write_text(EMPTY)
    (tmp_path / "README.md").write_text(EMPTY)
    (tmp_path / "recipes" / "README.md").write_text(OVERVIEW)
    (tmp_path / "recipes" / "tiny_code" / "results.json").write_text(json.dumps(RESULTS))
    return tmp_path


def block(page: Path) -> str:
    text = page.read_text().partition("\n<!-- heads -->")[0]
    assert text.startswith("# A page\n\nBefore.\n\n<!-- results -->\n")
    assert text.endswith("\n<!-- /results -->\n\nAfter.\n")
    return text.partition("-->\n")[2].partition("\n<!-- /")[0]


def test_a_recipe_never_run_says_so_and_still_names_its_base(script: ModuleType, checkout: Path):
    script.main(["--root", str(checkout)])
    assert block(checkout / "recipes/granite_code/README.md") == "not yet run"
    granite = "`ibm-granite/granite-3b-code-base-2k` | `mlp_speculator` | not yet run | not yet run"
    first, second = block(checkout / "recipes/README.md").splitlines()[2:]
    assert first == f"| [granite_code](granite_code/README.md) | {granite} | |"
    figure = f"{RESULTS['online']['tokens_per_forward']:.2f}"
    assert (
        f"| [tiny_code](tiny_code/README.md) | `recipes/tiny_code/base` | `{KIND}` | {figure}"
        in second
    )
    assert block(checkout / "README.md") == "not yet run"


def test_check_finds_a_page_that_is_not_current_and_leaves_it(
    script: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--root", str(checkout)]
    assert script.main([*arguments, "--check"]) == 1
    script.main(arguments)
    assert script.main([*arguments, "--check"]) == 0
    newer = RESULTS | {"online": RESULTS["online"] | {"tokens_per_forward": 9.7}}
    (checkout / "recipes/tiny_code/results.json").write_text(json.dumps(newer))
    before = (checkout / "recipes/README.md").read_text()
    capsys.readouterr()
    assert script.main([*arguments, "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "not current: recipes/tiny_code/README.md",
        "not current: recipes/README.md",
    ]
    assert (checkout / "recipes/README.md").read_text() == before


def test_a_page_without_a_block_is_told_in_one_line(
    script: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
):
    (checkout / "README.md").write_text("# No block\n")
    assert script.main(["--root", str(checkout)]) == 2
    assert "README.md needs one block" in capsys.readouterr().err
    # nothing is half done
    assert (checkout / "recipes/README.md").read_text() == OVERVIEW


def test_this_repository_s_own_pages_are_current(script: ModuleType):
    assert script.main(["--check"]) == 0


def test_a_time_without_an_interval_gets_no_row(script):
    summary = [["a", "51 tokens/s", "", ""], ["b", "51 [50, 52] tokens/s", "", ""]]
    summary += [["c", "31.8 GiB measured", "", ""]]
    rows = script.gpu_rows({"summary": summary, "failed": {}, "skipped": {"d": "no time"}})
    assert [row[0] for row in rows] == ["b", "c", "d"]
