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
    """Return a checkout of two recipes; results of tiny_code are recorded."""
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


def test_a_recipe_without_results_gets_no_row(script: ModuleType, checkout: Path):
    script.main(["--root", str(checkout)])
    assert (checkout / "recipes/granite_code/README.md").read_text() == EMPTY
    first, _, last = block(checkout / "recipes/README.md").splitlines()[2:]
    assert last == "Without recorded results: [granite_code](granite_code/README.md)."
    figure = f"{RESULTS['online']['tokens_per_forward']:.2f}"
    row = f"| [tiny_code](tiny_code/README.md) | `recipes/tiny_code/base` | `{KIND}` | {figure}"
    assert first.startswith(row)
    assert "2 threads, commit `eceec440388f`" in first
    assert block(checkout / "README.md") == "not yet run"


def publish(checkout: Path, **changes: Any) -> Path:
    """Add a recipe with a head and with what it was measured to be; return its folder."""
    folder = checkout / "recipes" / "smollm2_long"
    (folder / "head").mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    (folder / "README.md").write_text(EMPTY + "\n<!-- served -->\n<!-- /served -->\n")
    (folder / "head" / "config.json").write_text('{"kind": "eagle_gru", "depth": 5}')
    (folder / "head" / "model.safetensors").write_bytes(b"weights")
    (folder / "gsm8k").mkdir()
    head = RESULTS["head"] | {"kind": "eagle_gru", "depth": 5} | changes
    (folder / "gsm8k" / "results.json").write_text(json.dumps(RESULTS | {"head": head}))
    pages = folder / "README.md"
    pages.write_text(pages.read_text() + "\n<!-- sets -->\n<!-- /sets -->\n")
    return folder


def test_a_row_names_head_engine_prompts_intervals_machine_and_commit(script, checkout):
    publish(checkout)
    assert script.main(["--root", str(checkout)]) == 0
    head, engine, prompts, *figures, machine = (
        (checkout / "README.md").read_text().splitlines()[7].strip("| ").split(" | ")
    )
    assert head == "[published head](recipes/smollm2_long/README.md)"
    assert (engine, prompts) == ("specheads", "40 GSM8K")
    assert all("[" in figure for figure in figures)
    assert machine == "AMD EPYC, 2 threads, commit `eceec440388f`"


def test_a_measurement_of_another_head_is_refused(script, checkout, capsys):
    publish(checkout, kind="redrafter")
    assert script.main(["--root", str(checkout)]) == 2
    message = "is not of the published head, which is eagle_gru of depth 5"
    assert message in capsys.readouterr().err


def test_a_served_head_with_other_weights_is_refused(script, checkout, capsys):
    (publish(checkout) / "serve.json").write_text('{"weights": "0", "rows": []}')
    assert script.main(["--root", str(checkout)]) == 2
    assert "serve.json is not of the head in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provenance": RESULTS["provenance"] | {"git": None}}, "needs its commit"),
        ({"provenance": RESULTS["provenance"] | {"hardware": {}}}, "needs its machine"),
        ({"head": RESULTS["head"] | {"kind": "medusa"}}, f"its recipe trains {KIND}"),
    ],
)
def test_results_of_an_unknown_origin_are_refused(changes, message, script, checkout, capsys):
    (checkout / "recipes/tiny_code/results.json").write_text(json.dumps(RESULTS | changes))
    assert script.main(["--root", str(checkout)]) == 2
    assert message in capsys.readouterr().err


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
