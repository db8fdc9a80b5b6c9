"""Render every recipe's results into its card, into recipes/README.md and into README.md.

    python scripts/results_table.py            rewrite pages that are out of date
    python scripts/results_table.py --check    write nothing; exit 1 when a page is out of date

Only the text between `<!-- NAME -->` and `<!-- /NAME -->` is written:

    page                NAME          source
    a recipe's card     results       results.json
                        sets          */results.json, one row per further prompt set
                        ways          */compare.json of `specheads compare`, one row per drafter
                        served        serve.json of scripts/bench_serve.py
                        speculators   speculators.json, heads trained by another library
                        ablations     ablations.json of `scripts/bench_heads.py --ablate`
    recipes/README.md   results       results.json of every recipe
                        heads         heads.json of scripts/bench_heads.py
                        coupling      coupling.json, recorded on 2026-11-22
    recipes/gpu         gpu           *.json of scripts/gpu.py
    README.md           results       the quickstart, the published head, and the same head in vLLM
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import hydra
from tables import (
    NOT_YET,
    Rows,
    base_name,
    card,
    coupling,
    figure,
    gpu,
    heads,
    rate,
    rivals,
    served,
    sets,
    speedup,
    table,
    ways,
)

from specheads.config import compose, data_dir
from specheads.core.files import from_json
from specheads.measure.results import Results, read
from specheads.runs.provenance import Provenance

ROOT = Path(__file__).resolve().parents[1]
HEADER = ("recipe", "base", "head", "tokens per forward", "speed-up", "hardware")
WORTH_HEADER = ("head", "prompts", "tokens per forward", "speed-up over the base alone")
CONDITIONS = "One request at a time, temperature 0. Brackets are 95 % intervals over prompts."
QUICKSTART = "smollm2"
"""Recipe of the quickstart."""
PUBLISHED = "smollm2_long"
"""Recipe of the head that is part of this repository."""
SETS = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench"}
"""Names of the public prompt sets that the published head was measured on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout")
    options = parser.parse_args(arguments)
    try:
        wanted = render(options.root)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    stale = [file for file, text in wanted.items() if file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{'not current' if options.check else 'wrote'}: {file.relative_to(options.root)}")
        if not options.check:
            file.write_text(wanted[file], encoding="utf-8")
    return int(options.check and bool(stale))


def render(root: Path) -> dict[Path, str]:
    """Return the text each file should have: what it has, with its block up to date.

    Raises:
        ValueError: A file is missing, or has no block, or more than one.
    """
    folders = sorted(path.parent for path in root.glob("recipes/*/recipe.yaml"))
    measured = {folder.name: read(Results, folder / "results.json") for folder in folders}
    blocks = {folder / "README.md": {"results": card(measured[folder.name])} for folder in folders}
    for folder in folders:
        if further := sorted(folder.glob("*/results.json")):
            blocks[folder / "README.md"]["sets"] = sets(further)
        if beside := sorted(folder.glob("*/compare.json")):
            blocks[folder / "README.md"]["ways"] = ways(beside)
        if (file := folder / "serve.json").is_file():
            blocks[folder / "README.md"]["served"] = served(json.loads(file.read_text("utf-8")))
        for name in ("speculators", "ablations"):
            if (file := folder / f"{name}.json").is_file():
                blocks[folder / "README.md"][name] = rivals(file)
    compared, drawn = (
        [
            json.loads(file.read_text(encoding="utf-8"))
            for folder in folders
            if (file := folder / name).is_file()
        ]
        for name in ("heads.json", "coupling.json")
    )
    blocks[root / "recipes" / "README.md"] = {
        "results": overview(measured),
        "heads": "\n\n".join(map(heads, compared)) or NOT_YET,
        "coupling": "\n\n".join(map(coupling, drawn)) or NOT_YET,
    }
    if (measured_on_gpu := root / "recipes" / "gpu").is_dir():
        blocks[measured_on_gpu / "README.md"] = {"gpu": gpu(measured_on_gpu)}
    blocks[root / "README.md"] = {"results": worth(root)}
    return {file: _replace(file, wanted) for file, wanted in blocks.items()}


def _replace(file: Path, blocks: Mapping[str, str]) -> str:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for name, block in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, found = pattern.subn(lambda match, new=block: f"{match[1]}{new}\n{match[2]}", text)
        if found != 1:
            raise ValueError(
                f"{file} needs one block from <!-- {name} --> to <!-- /{name} -->, it has {found}; "
                "put both lines where the table belongs"
            )
    return text


def overview(measured: Mapping[str, Results | None]) -> str:
    """Return the table of all recipes, one row each; a recipe without results maps to None."""
    rows: Rows = []
    for name, results in measured.items():
        link = f"[{name}]({name}/README.md)"
        if results is None:
            rows.append((link, *_planned(name), NOT_YET, NOT_YET, ""))
            continue
        shown = (base_name(results.base.name), f"`{results.head.kind}`")
        figures = rate(results.online), speedup(results.speed)
        rows.append((link, *shown, *figures, str(results.provenance.hardware)))
    return table(HEADER, rows)


def worth(root: Path) -> str:
    """Return the table of what the quickstart's head and the published head are worth.

    One row per measurement that the tree holds, at batch 1 and temperature zero. Of the chains
    that vLLM served, the table shows the one whose smallest speed-up is largest.
    """
    recipes, rows, hardware = root / "recipes", [], set()
    for file in (recipes / QUICKSTART / "results.json", *_sets(recipes / PUBLISHED)):
        if (results := read(Results, file)) is None:
            continue
        quick = file.parent.name == QUICKSTART
        what = "`make quickstart`" if quick else "published head"
        named = f"{results.prompts.count} held-out prompts" if quick else SETS[file.parent.name]
        figures = rate(results.online), speedup(results.speed)
        rows.append((_card(what, QUICKSTART if quick else PUBLISHED), named, *figures))
        hardware.add(str(results.provenance.hardware))
    if (file := recipes / PUBLISHED / "serve.json").is_file():
        measured = json.loads(file.read_text(encoding="utf-8"))
        single = [row for row in measured["rows"] if row["batch"] == 1]
        depth = max(
            {row["depth"] for row in single},
            key=lambda one: min(row["speedup"]["ratio"] for row in single if row["depth"] == one),
        )
        engine = f"published head in vLLM {measured['engine']['vllm']}, chain of {depth}"
        for row in single:
            if row["depth"] == depth:
                what = _card(engine, PUBLISHED), SETS[row["prompts"]]
                rate_there = figure(row["served"], "tokens_per_forward")
                rows.append((*what, rate_there, figure(row["speedup"], "ratio")))
        hardware.add(str(from_json(Provenance, measured["provenance"]).hardware))
    if not rows:
        return NOT_YET
    machines = "; ".join(sorted(hardware))
    return f"{table(WORTH_HEADER, rows)}\n\n{CONDITIONS} Hardware: {machines}."


def _sets(folder: Path) -> list[Path]:
    """Return the results of a recipe on public prompt sets."""
    return [folder / name / "results.json" for name in SETS]


def _card(text: str, recipe: str) -> str:
    return f"[{text}](recipes/{recipe}/README.md)"


def _planned(name: str) -> tuple[str, str]:
    """Return base and head of a recipe that was never run, from its settings."""
    compose.register()
    folder = str(data_dir("configs"))
    with hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
        settings = hydra.compose("train", [f"recipe={name}"])
    return base_name(settings.base.model), f"`{settings.head.kind}`"


if __name__ == "__main__":
    raise SystemExit(main())
