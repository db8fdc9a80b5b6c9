import json
from collections.abc import Sequence
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


def test_further_prompt_sets_have_a_row_each_in_the_card(script: ModuleType, checkout: Path):
    recipe = checkout / "recipes" / "tiny_code"
    page = f"{EMPTY}\n<!-- sets -->\n<!-- /sets -->\n"
    (recipe / "README.md").write_text(page)
    drawn = RESULTS | {"settings": RESULTS["settings"] | {"temperature": 1.0}, "speed": None}
    for name, results in (("mt_bench", RESULTS), ("gsm8k", drawn | {"lossless": None})):
        (recipe / name).mkdir()
        (recipe / name / "results.json").write_text(json.dumps(results))
    assert script.main(["--root", str(checkout)]) == 0
    table = (recipe / "README.md").read_text().partition("<!-- sets -->\n")[2]
    rate = "40 | static, 6 nodes | 1.62 [1.55, 1.69]"
    assert table.splitlines()[2:4] == [
        f"| gsm8k | 1 | {rate} | not measured | not measured |",
        f"| mt_bench | 0 | {rate} | 1.20 [1.10, 1.31] | 39 of 40 |",
    ]
    assert script.main(["--root", str(checkout), "--check"]) == 0


def compared(first: float, temperatures: Sequence[float], **rest: Any) -> dict[str, Any]:
    """Return compare.json of two heads, redrafter ahead of medusa."""
    conditions = []
    for temperature in temperatures:
        factor = 1.0 - 0.1 * temperature
        drafters = {
            kind: {
                "tree": "x", "num_nodes": 6,
                "online": COUNTS | {
                    "tokens_per_forward": factor * rate,
                    "interval": [factor * rate - 0.1, factor * rate + 0.1],
                },
                "lossless": RESULTS["lossless"], "degenerate": RESULTS["degenerate"],
                "speed": RESULTS["speed"] | {"speedup": rate / 2},
                "accepted_over": {other: {"ratio": over, "interval": [over - 0.05, over + 0.05]}},
            }
            for kind, rate, other, over in (
                ("redrafter", 1.5 * first, "medusa", 1.5), ("medusa", first, "redrafter", 0.66),
            )
        }  # fmt: skip
        conditions.append(
            {"temperature": temperature, "batch_size": 1, "ranking": ["redrafter", "medusa"]}
            | {"drafters": drafters}
        )
    head = {"kind": "medusa", "depth": 3, "parameters": 1_770_240}
    heads = {"medusa": head, "redrafter": head | {"kind": "redrafter", "parameters": 80}}
    shared: dict[str, Any] = {name: RESULTS[name] for name in ("base", "prompts", "provenance")}
    shared["settings"] = {
        "max_new_tokens": 96, "draft_model": "", "draft_depth": 4, "copied_tokens": 10,
        "max_ngram": 3, "sinks": 4, "window": 60, "dtype": "float32", "device": "cpu", "seed": 0,
    }  # fmt: skip
    return shared | {"head": head, "heads": heads, "conditions": conditions} | rest


def test_ways_to_draft_have_a_row_each_in_the_card(script: ModuleType, checkout: Path):
    recipe = checkout / "recipes" / "tiny_code"
    (recipe / "README.md").write_text(f"{EMPTY}\n<!-- ways -->\n<!-- /ways -->\n")
    table = compared(1.2, [0.0, 1.0])
    for condition in table["conditions"]:
        rows = condition["drafters"]
        rows["hybrid"] = rows.pop("redrafter")
        rows["hybrid"]["over"] = {"medusa": {"ratio": 1.4, "interval": [1.3, 1.5]}}
        condition["ranking"] = ["hybrid", "medusa"]
    (recipe / "gsm8k").mkdir()
    (recipe / "gsm8k" / "compare.json").write_text(json.dumps({"schema": 2} | table))
    assert script.main(["--root", str(checkout)]) == 0
    lines = (recipe / "README.md").read_text().partition("<!-- ways -->\n")[2].splitlines()
    assert lines[2:6] == [
        "| gsm8k | 0 | hybrid | 1.80 [1.70, 1.90] | 0.90 [1.10, 1.31] | |",
        "| gsm8k | 0 | medusa | 1.20 [1.10, 1.30] | 0.60 [1.10, 1.31] | 1.40 [1.30, 1.50] |",
        "| gsm8k | 1 | hybrid | 1.62 [1.52, 1.72] | 0.90 [1.10, 1.31] | |",
        "| gsm8k | 1 | medusa | 1.08 [0.98, 1.18] | 0.60 [1.10, 1.31] | 1.40 [1.30, 1.50] |",
    ]


@pytest.mark.parametrize("name", ["speculators", "ablations"])
def test_heads_of_others_stand_beside_ours_in_the_card(
    script: ModuleType, checkout: Path, name: str
):
    recipe = checkout / "recipes" / "tiny_code"
    (recipe / "README.md").write_text(f"{EMPTY}\n<!-- {name} -->\n<!-- /{name} -->\n")
    table = compared(1.2, [0.0])
    (condition,) = table["conditions"]
    condition["ranking"] = ["redrafter", "medusa"]
    condition["drafters"]["redrafter"]["over"] = {"medusa": {"ratio": 1.4, "interval": [1.3, 1.5]}}
    (recipe / f"{name}.json").write_text(json.dumps({"schema": 2} | table))
    assert script.main(["--root", str(checkout)]) == 0
    text = (recipe / "README.md").read_text().partition(f"<!-- {name} -->\n")[2]
    lines = text.splitlines()
    assert lines[0] == (
        "40 prompts of 96 new tokens, float32; AMD EPYC, 2 threads, commit `f1fca6e00000` and "
        "uncommitted changes."
    )
    ours, theirs = lines[4:6]
    assert ours.startswith("| redrafter | `redrafter` | 80 | 0 | 1.80 [1.70, 1.90] | 0.90 ")
    assert ours.endswith(" | | |")
    assert theirs.endswith(" | 0.60 [1.10, 1.31] | 1.40 [1.30, 1.50] | 1.50 [1.45, 1.55] |")


def served(*rows: tuple[str, int, int, float]) -> str:
    """Return a serve.json of rows: prompts, batch, depth and speed-up."""
    counted = {"tokens_per_forward": 1.8, "interval": [1.7, 1.9], "forwards": 9, "accepted": [7, 4]}
    each = {
        "count": 24, "identical": 11, "alone_tokens_per_second": 246.6, "tokens_per_second": 220.0,
        "forward_overhead": 2.0, "served": counted,
        "replay": counted | {"tokens_per_forward": 1.75},
    }  # fmt: skip
    told = {"schema": 2, "engine": {"vllm": "0.32.0", "torch": "2.13.0"}, "dtype": "bfloat16"}
    told |= {"new_tokens": 96, "provenance": RESULTS["provenance"]}
    found = [
        {"prompts": prompts, "batch": batch, "depth": depth}
        | {"speedup": {"ratio": ratio, "interval": [ratio - 0.1, ratio + 0.1]}}
        for prompts, batch, depth, ratio in rows
    ]
    return json.dumps(told | {"rows": [row | each for row in found]})


def test_what_vllm_made_of_a_head_stands_in_its_card(script: ModuleType, checkout: Path):
    recipe = checkout / "recipes" / "tiny_code"
    (recipe / "README.md").write_text(f"{EMPTY}\n<!-- served -->\n<!-- /served -->\n")
    (recipe / "serve.json").write_text(served(("gsm8k", 8, 2, 0.9)))
    assert script.main(["--root", str(checkout)]) == 0
    lines = (recipe / "README.md").read_text().partition("<!-- served -->\n")[2].splitlines()
    assert lines[0] == (
        "vLLM 0.32.0, torch 2.13.0, bfloat16, 96 new tokens, T=0; AMD EPYC, 2 threads, commit "
        "`f1fca6e00000` and uncommitted changes."
    )
    assert lines[4] == (
        "| gsm8k | 8 | 2 | 1.80 [1.70, 1.90] | 1.75 [1.70, 1.90] | 246.6 | 220.0 | "
        "0.90 [0.80, 1.00] | 11 of 24 |"
    )


def test_the_readme_shows_the_published_head_here_and_in_vllm(script: ModuleType, checkout: Path):
    recipe = checkout / "recipes" / "smollm2_long"
    for name in ("gsm8k", "mt_bench"):
        (recipe / name).mkdir(parents=True)
        (recipe / name / "results.json").write_text(json.dumps(RESULTS))
    (recipe / "recipe.yaml").touch()
    (recipe / "README.md").write_text(
        f"{EMPTY}\n<!-- sets -->\n<!-- /sets -->\n<!-- served -->\n<!-- /served -->\n"
    )
    # the deeper chain is worth more on one set, and less where either is worth least
    deep, flat = [("gsm8k", 1, 4, 1.6), ("mt_bench", 1, 4, 1.1)], [("gsm8k", 1, 2, 1.5)]
    rows = (*deep, *flat, ("mt_bench", 1, 2, 1.3), ("gsm8k", 8, 2, 0.9), ("mt_bench", 8, 2, 2.0))
    (recipe / "serve.json").write_text(served(*rows))
    assert script.main(["--root", str(checkout)]) == 0
    card = "recipes/smollm2_long/README.md"
    engine = "published head in vLLM 0.32.0, chain of 2"
    assert block(checkout / "README.md").splitlines()[2:] == [
        f"| [published head]({card}) | GSM8K | 1.62 [1.55, 1.69] | 1.20 [1.10, 1.31] |",
        f"| [published head]({card}) | MT-Bench | 1.62 [1.55, 1.69] | 1.20 [1.10, 1.31] |",
        f"| [{engine}]({card}) | GSM8K | 1.80 [1.70, 1.90] | 1.50 [1.40, 1.60] |",
        f"| [{engine}]({card}) | MT-Bench | 1.80 [1.70, 1.90] | 1.30 [1.20, 1.40] |",
        "",
        f"{script.CONDITIONS} Hardware: AMD EPYC, 2 threads.",
    ]


def test_the_readme_table_starts_with_the_quickstart(script: ModuleType, checkout: Path):
    recipe = checkout / "recipes" / "smollm2"
    recipe.mkdir()
    (recipe / "recipe.yaml").touch()
    (recipe / "README.md").write_text(EMPTY)
    (recipe / "results.json").write_text(json.dumps(RESULTS))
    assert script.main(["--root", str(checkout)]) == 0
    assert block(checkout / "README.md").splitlines()[2] == (
        "| [`make quickstart`](recipes/smollm2/README.md) | 40 held-out prompts "
        "| 1.62 [1.55, 1.69] | 1.20 [1.10, 1.31] |"
    )


def test_all_kinds_of_head_stand_in_one_table_weakest_first(script: ModuleType, checkout: Path):
    training = {"tokens": 1_433_600, "tokens_per_second": 4012.4, "peak_gib": 1.284}
    few = RESULTS["prompts"] | {"count": 16}
    table = {"schema": 2, "recipe": "tiny_code"} | {
        "training": {"medusa": training, "redrafter": training | {"tokens_per_second": 900.0}},
        "chain": compared(1.2, [0.0, 1.0]),
        "tuned": compared(1.4, [0.0], prompts=few),
    }
    (checkout / "recipes/tiny_code/heads.json").write_text(json.dumps(table))
    assert script.main(["--root", str(checkout)]) == 0
    block = (checkout / "recipes/README.md").read_text().partition("<!-- heads -->\n")[2]
    lines = block.partition("\n<!-- /")[0].splitlines()
    assert lines[0] == (
        "`tiny_code` with each kind of head in turn: 1,433,600 training tokens, depth 3, 40 "
        "prompts, 16 of the tuned trees, float32; AMD EPYC, 2 threads, torch 2.13.0, commit "
        "`f1fca6e00000` and uncommitted changes."
    )
    medusa = (
        "1.20 [1.10, 1.30] | 1.08 [0.98, 1.18] | 1.40 [1.30, 1.50], 6 nodes | 0.70 [1.10, 1.31] |"
    )
    assert lines[4] == f"| `medusa` | 1,770,240 | 4,012 | 1.28 | {medusa}"
    (checkout / "recipes/tiny_code/heads.json").write_text(json.dumps(table | {"tuned": None}))
    assert script.main(["--root", str(checkout)]) == 0
    assert (
        "1.20 [1.10, 1.30] | 1.08 [0.98, 1.18] | not measured | not measured |"
        in (checkout / "recipes/README.md").read_text()
    )
    assert lines[5].startswith("| `redrafter` | 80 | 900 | 1.28 | 1.80 [1.70, 1.90] | ")
    assert lines[7:] == [
        "tokens per forward, row over column, chain, T=0:",
        "",
        "| head | redrafter | medusa |",
        "| --- | --- | --- |",
        "| redrafter | | 1.50 [1.45, 1.55] |",
        "| medusa | 0.66 [0.61, 0.71] | |",
    ]


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
