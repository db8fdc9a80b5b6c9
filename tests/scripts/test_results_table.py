import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specheads.core.files import from_json
from specheads.measure.results import Results

EMPTY = "# A page\n\nBefore.\n\n<!-- results -->\n<!-- /results -->\n\nAfter.\n"
OVERVIEW = EMPTY + "\n<!-- heads -->\n<!-- /heads -->\n"

COUNTED = {"forwards": 5, "per_depth": [], "tokens_per_forward": 1.617}
COUNTS = {"tokens_per_forward_without_bonus": 0.617, "per_depth": [], "by_category": {}} | {
    "forwards": 5,
    "new_tokens": 9,
}
CANDIDATE = {"num_nodes": 1, "depth": 0, "tokens_per_forward": 1.0, "step_overhead": 1.0} | {
    "speedup": 1.0,
    "paths": [],
}
RESULTS: dict[str, Any] = {
    "head": {"kind": "mlp_speculator", "depth": 3, "parameters": 4_325_888},
    "base": {"name": "/home/me/specheads/recipes/tiny_code/base", "revision": "main"}
    | {"fingerprint": "f", "parameters": 6_450_432},
    "prompts": {"name": "python_stdlib", "version": "b32c24cc66d6", "count": 40},
    "settings": {
        "temperature": 0.0,
        "max_new_tokens": 128,
        "tree": "static",
        "num_nodes": 6,
        "batch_size": 1,
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
    },
    "online": {"tokens_per_forward": 1.617, "interval": [1.55, 1.694]} | COUNTS,
    "speed": {
        "base_tokens_per_second": 150.04,
        "tokens_per_second": 180.06,
        "speedup": 1.2,
        "interval": [1.101, 1.309],
        "step_overhead": 1.347,
        "step_milliseconds": 2.0,
        "base_step_milliseconds": 1.0,
        "new_tokens": 9,
        "forwards": 5,
        "peak_gib": 1.25,
    },
    "lossless": {"compared": 40, "identical": 39, "first_divergence_logit_gap": 2.4e-6},
    "degenerate": {
        "flagged": 9,
        "compared": 40,
        "with": {"tokens_per_forward": 1.617, "interval": [1.55, 1.694]},
        "without": {"tokens_per_forward": 1.5, "interval": [1.44, 1.56]},
        "only": None,
    },
    "replay": {"equal": True, "offline": COUNTED, "online": COUNTED},
    "phases": [
        {"phase": "corpus", "tokens_per_forward": 1.4, "interval": [1.3, 1.5]},
        {"phase": "distilled", "tokens_per_forward": 1.6, "interval": [1.5, 1.7]},
    ],
    "tree_candidates": [CANDIDATE | {"tree": name} for name in ("none", "chain", "static")],
    "provenance": {
        "versions": {"specheads": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        "git": {"commit": "f1fca6e" + "0" * 33, "dirty": True},
        "hardware": {"processor": "AMD EPYC", "threads": 2, "gpu": None},
    },
}

CARD = """\
| what | measured |
| --- | --- |
| tokens per forward | 1.62 [1.55, 1.69] |
| the same without the 9 of 40 that loop | 1.50 [1.44, 1.56] |
| after phase corpus, chain replayed offline | 1.40 [1.30, 1.50] |
| after phase distilled, chain replayed offline | 1.60 [1.50, 1.70] |
| identical to the base alone | 39 of 40 prompts; largest logit gap at a first difference 2.4e-06 |
| offline replay equals decoding, chain | yes |
| speed-up over the base alone | 1.20 [1.10, 1.31] |
| tokens per second: base alone, with head | 150.0, 180.1 |
| time of a step over the base's | 1.35 |
| peak memory | 1.25 GiB |
| head | mlp_speculator, depth 3, 4,325,888 parameters |
| base | `recipes/tiny_code/base`, 6,450,432 parameters |
| tree | static, 6 nodes; best of 2 |
| prompts | 40 of python_stdlib, version b32c24cc66d6 |
| decoding | 128 new tokens, temperature 0, float32, batch 1, seed 0 |
| hardware | AMD EPYC, 2 threads |
| versions | specheads 0.1.0, torch 2.13.0, transformers 5.23.0 |
| commit | `f1fca6e00000` and uncommitted changes |"""


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


def test_a_card_says_all_that_was_measured_and_where(script: ModuleType, checkout: Path):
    assert script.main(["--root", str(checkout)]) == 0
    assert block(checkout / "recipes/tiny_code/README.md") == CARD


def test_a_recipe_never_run_says_so_and_still_names_its_base(script: ModuleType, checkout: Path):
    script.main(["--root", str(checkout)])
    assert block(checkout / "recipes/granite_code/README.md") == "not yet run"
    granite = "`ibm-granite/granite-3b-code-base-2k` | `mlp_speculator` | not yet run | not yet run"
    tiny = "`recipes/tiny_code/base` | `mlp_speculator` | 1.62 [1.55, 1.69] | 1.20 [1.10, 1.31]"
    assert block(checkout / "recipes/README.md").splitlines()[2:] == [
        f"| [granite_code](granite_code/README.md) | {granite} | |",
        f"| [tiny_code](tiny_code/README.md) | {tiny} | AMD EPYC, 2 threads |",
    ]
    assert block(checkout / "README.md") == "not yet run"


def test_what_was_not_measured_is_named_and_not_made_up(script: ModuleType):
    nothing = dict.fromkeys(("online", "speed", "lossless", "degenerate"))
    results = from_json(Results, RESULTS | nothing | {"phases": [], "replay": None})
    rows = script.card(results).splitlines()[2:5]
    assert rows == [
        "| tokens per forward | not measured |",
        "| speed-up over the base alone | not measured |",
        "| head | mlp_speculator, depth 3, 4,325,888 parameters |",
    ]


def test_where_every_prompt_loops_there_is_no_figure_without_them(script: ModuleType):
    loops = RESULTS["degenerate"] | {"flagged": 40, "compared": 40, "without": None}
    card = script.card(from_json(Results, RESULTS | {"degenerate": loops}))
    assert "| the same without the 40 of 40 that loop | not measured |" in card


def test_check_finds_a_page_that_is_not_current_and_leaves_it(
    script: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--root", str(checkout)]
    assert script.main([*arguments, "--check"]) == 1
    script.main(arguments)
    assert script.main([*arguments, "--check"]) == 0
    newer = RESULTS | {"online": {"tokens_per_forward": 1.7, "interval": [1.6, 1.8]} | COUNTS}
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
