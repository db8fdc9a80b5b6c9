"""Render every recipe's results.json into its card, into recipes/README.md and into README.md.

    python scripts/results_table.py            write what is not current
    python scripts/results_table.py --check    write nothing; exit 1 when something is not current

Only what stands between `<!-- results -->` and `<!-- /results -->` is written, and in
recipes/README.md what stands between `<!-- heads -->` and `<!-- /heads -->`: the table of
scripts/bench_heads.py, from a recipe's heads.json, and between `<!-- coupling -->` and
`<!-- /coupling -->` that of scripts/bench_coupling.py, from its coupling.json. A recipe that was
measured on further sets, each in a folder of its own beside results.json, has a row for each in its
card between `<!-- sets -->` and `<!-- /sets -->`; where such a folder has a compare.json too, of
`specheads compare`, each way to draft has one between `<!-- ways -->` and `<!-- /ways -->`. What a
real engine made of its head, serve.json of scripts/bench_serve.py, stands between `<!-- served -->`
and `<!-- /served -->`. Heads that others trained on the same text, speculators.json of `specheads
compare`, stand between `<!-- speculators -->` and `<!-- /speculators -->`, and those of
`scripts/bench_heads.py --ablate`, ablations.json, between `<!-- ablations -->` and
`<!-- /ablations -->`. The tables of recipes/gpu/README.md, between
`<!-- gpu -->` and `<!-- /gpu -->`, come from the JSON files of scripts/gpu.py in that folder.
README.md begins with the verdict of the quickstart, between
`<!-- verdict -->` and `<!-- /verdict -->`, and that of the published head, between
`<!-- published -->` and `<!-- /published -->`, and shows what its console said between
`<!-- console -->` and `<!-- /console -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console
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

from specheads.commands import _compose
from specheads.config import data_dir
from specheads.measure.report import show, verdict
from specheads.measure.results import Lossless, Results
from specheads.measure.store import from_json, read
from specheads.runs.provenance import Provenance

ROOT = Path(__file__).resolve().parents[1]
HEADER = ("recipe", "base", "head", "tokens per forward", "speed-up", "hardware")
SHOWN = "smollm2"
"""The recipe of the quickstart, whose verdict the README begins with."""
PUBLISHED = "smollm2_long"
"""The recipe of the head that lies in this tree."""
SETS = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench"}
"""What the prompt sets that it was measured on are called."""


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
    blocks[root / "README.md"] = {"results": overview(measured, "recipes/")}
    if (shown := measured.get(SHOWN)) is not None:
        blocks[root / "README.md"] |= {"verdict": headline(shown), "console": said(shown)}
    if (file := root / "recipes" / PUBLISHED / "serve.json").is_file():
        blocks[root / "README.md"]["published"] = published(file)
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


def overview(measured: Mapping[str, Results | None], folder: str = "") -> str:
    """Return the table of all recipes, one row each.

    Args:
        measured: What results.json says of each recipe, None where it was never run.
        folder: What links to cards begin with.
    """
    rows: Rows = []
    for name, results in measured.items():
        link = f"[{name}]({folder}{name}/README.md)"
        if results is None:
            rows.append((link, *_planned(name), NOT_YET, NOT_YET, ""))
            continue
        shown = (base_name(results.base.name), f"`{results.head.kind}`")
        figures = rate(results.online), speedup(results.speed)
        rows.append((link, *shown, *figures, str(results.provenance.hardware)))
    return table(HEADER, rows)


def headline(results: Results) -> str:
    """Return what a measurement came to, in a paragraph."""
    checked, given = results.lossless, results.prompts
    same = _same(checked) if checked else ""
    what = f"{base_name(results.base.name)}, {given.count} prompts of {given.name}"
    card = f"[card](recipes/{SHOWN}/README.md)"
    told = f"{what}; {results.provenance.hardware}; {card}"
    return f"**{verdict(results)}**{same} ({told})"


def published(file: Path) -> str:
    """Return what the published head is worth, one request at a time: here, and in vLLM.

    Of vLLM's chains that is shown which is worth most where it is worth least.
    """
    told = json.loads(file.read_text(encoding="utf-8"))
    single = [row for row in told["rows"] if row["batch"] == 1]
    depth = max(
        {row["depth"] for row in single},
        key=lambda one: min(row["speedup"]["ratio"] for row in single if row["depth"] == one),
    )
    there = {row["prompts"]: row["speedup"] for row in single if row["depth"] == depth}
    here = {name: read(Results, file.parent / name / "results.json") for name in there}
    ours = (f"{speedup(some.speed)} on {SETS[name]}" for name, some in here.items() if some)
    theirs = (f"{figure(gain, 'ratio')} on {SETS[name]}" for name, gain in there.items())
    made = from_json(Provenance, told["provenance"]).hardware
    return (
        f"**The head that lies in this tree, times the speed of the base alone at batch 1: "
        f"{', '.join(ours)}. Served by vLLM {told['engine']['vllm']}, as a chain of {depth}: "
        f"{', '.join(theirs)}.** ({made}; [card](recipes/{PUBLISHED}/README.md))"
    )


def _same(checked: Lossless) -> str:
    """Return how many texts were the base's own, what of the others, and of all in float32."""
    same, parted = checked.identical, checked.compared - checked.identical
    out = f" Of {checked.compared} texts {same} were the same"
    if parted:
        tied = "the other" if checked.tied == parted else f"{checked.tied} of the other"
        out += f", {tied} {parted} parted at a tie within {checked.dtype}'s rounding"
        if wide := checked.float32:
            out += f", and in float32 {wide.identical} of {wide.compared} were the same"
    return f"{out}."


def said(results: Results) -> str:
    """Return what `specheads evaluate` prints of a measurement, in 80 columns."""
    printed = StringIO()
    show(results, Console(file=printed, width=80, color_system=None))
    lines = (line.rstrip() for line in printed.getvalue().splitlines())
    return "\n".join(["```", *lines, "```"])


def _planned(name: str) -> tuple[str, str]:
    """Return base and head of a recipe that was never run, from its settings."""
    _compose.register()
    folder = str(data_dir("configs"))
    with initialize_config_dir(version_base="1.3", config_dir=folder):
        settings = compose("train", [f"recipe={name}"])
    return base_name(settings.base.model), f"`{settings.head.kind}`"


if __name__ == "__main__":
    raise SystemExit(main())
