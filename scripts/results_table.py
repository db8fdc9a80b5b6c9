"""Render every recipe's results.json into its card, into recipes/README.md and into README.md.

    python scripts/results_table.py            write what is not current
    python scripts/results_table.py --check    write nothing; exit 1 when something is not current

Only what stands between `<!-- results -->` and `<!-- /results -->` is written, and in
recipes/README.md what stands between `<!-- heads -->` and `<!-- /heads -->`: the table of
scripts/bench_heads.py, from a recipe's heads.json, and between `<!-- coupling -->` and
`<!-- /coupling -->` that of scripts/bench_coupling.py, from its coupling.json. A recipe that was
measured on further sets, each in a folder of its own beside results.json, has a row for each in its
card between `<!-- sets -->` and `<!-- /sets -->`; where such a folder has a compare.json too, of
`specheads compare`, each way to draft has one between `<!-- ways -->` and `<!-- /ways -->`. What
real vLLM made of its head, serve.json of scripts/bench_serve.py, stands between `<!-- served -->`
and `<!-- /served -->`. Heads that others trained on the same text, speculators.json of `specheads
compare`, stand between `<!-- speculators -->` and `<!-- /speculators -->`, and those of
`scripts/bench_heads.py --ablate`, ablations.json, between `<!-- ablations -->` and
`<!-- /ablations -->`. README.md begins with the verdict of the quickstart, between
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
from typing import Any

from hydra import compose, initialize_config_dir
from rich.console import Console

from specheads.commands import _compose
from specheads.config import data_dir
from specheads.measure.compare.table import accepted_against
from specheads.measure.comparison import Comparison, Condition
from specheads.measure.report import show, verdict
from specheads.measure.results import Lossless, Rate, Results, Speed
from specheads.measure.store import from_json, read
from specheads.runs.provenance import Git, Provenance

ROOT = Path(__file__).resolve().parents[1]
HEADER = ("recipe", "base", "head", "tokens per forward", "speed-up", "hardware")
HEADS_HEADER = (
    "head",
    "parameters",
    "training tokens/s",
    "peak GiB",
    "chain, T=0",
    "chain, T=1",
    "tuned tree, T=0",
    "speed-up, tuned tree",
)
COUPLING_HEADER = (
    "head",
    "T",
    "chain",
    "tuned tree",
    "chain, by rejection",
    "identical, chain without and with",
)
SETS_HEADER = ("set", "T", "prompts", "tree", "tokens per forward", "speed-up", "identical")
WAYS_HEADER = ("set", "T", "way", "tokens per forward", "speed-up", "hybrid over it")
RIVALS_HEADER = (
    *("head", "kind", "parameters", "T", "tokens per forward", "speed-up"),
    *("first over it, tokens/s", "first over it, tokens per forward"),
)
SERVED_HEADER = (
    *(
        "set",
        "batch",
        "chain",
        "tokens per forward",
        "in our replay",
        "tokens/s alone",
        "with head",
    ),
    *("speed-up over vLLM alone", "identical"),
)
SHOWN = "smollm2"
"""The recipe of the quickstart, whose verdict the README begins with."""
PUBLISHED = "smollm2_long"
"""The recipe of the head that lies in this tree."""
SETS = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench"}
"""What the prompt sets that it was measured on are called."""
NOT_YET = "not yet run"
NOT_MEASURED = "not measured"

Rows = list[tuple[str, ...]]


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
        figures = _rate(results.online), _speedup(results.speed)
        rows.append((link, *shown, *figures, hardware(results.provenance)))
    return _table(HEADER, rows)


def sets(files: Sequence[Path]) -> str:
    """Return the table of prompt sets that one head was measured on, a row each."""
    rows: Rows = []
    for file in files:
        results = read(Results, file)
        assert results is not None
        how, same = results.settings, results.lossless
        what = file.parent.name, f"{how.temperature:g}", str(results.prompts.count)
        figures = _rate(results.online), _speedup(results.speed)
        identical = f"{same.identical} of {same.compared}" if same else NOT_MEASURED
        rows.append((*what, f"{how.tree}, {how.num_nodes} nodes", *figures, identical))
    return _table(SETS_HEADER, rows)


def ways(files: Sequence[Path]) -> str:
    """Return the table of ways to draft on prompt sets, a row each, the fastest of a set first."""
    rows: Rows = []
    for file in files:
        compared = read(Comparison, file)
        assert compared is not None
        for condition in compared.conditions:
            what = file.parent.name, f"{condition.temperature:g}"
            both = condition.drafters.get("hybrid")
            for name in condition.ranking:
                row = condition.drafters[name]
                gain = both.over.get(name) if both else None
                over = _interval(gain.ratio, gain.interval) if gain else ""
                rows.append((*what, name, _rate(row.online), _speedup(row.speed), over))
    return _table(WAYS_HEADER, rows)


def served(measured: Mapping[str, Any]) -> str:
    """Return the table of what vLLM does with a head and without, and what measured it."""
    rows = [
        (
            *(row["prompts"], str(row["batch"]), str(row["depth"])),
            *(_figure(row[counted], "tokens_per_forward") for counted in ("vllm", "replay")),
            *(f"{row[speed]:.1f}" for speed in ("alone_tokens_per_second", "tokens_per_second")),
            _figure(row["speedup"], "ratio"),
            f"{row['identical']} of {row['count']}",
        )
        for row in measured["rows"]
    ]
    made, engine = from_json(Provenance, measured["provenance"]), measured["engine"]
    origin = f"vLLM {engine['vllm']}, torch {engine['torch']}, {measured['dtype']}"
    return (
        f"{origin}, {measured['new_tokens']} new tokens, T=0; {hardware(made)}, commit "
        f"{_commit(made.git)}.\n\n{_table(SERVED_HEADER, rows)}"
    )


def rivals(file: Path) -> str:
    """Return the table of several heads on the same prompts, a row each, the fastest first."""
    compared = read(Comparison, file)
    assert compared is not None
    rows: Rows = []
    for condition in compared.conditions:
        first = condition.drafters[condition.ranking[0]]
        for name in condition.ranking:
            row, head = condition.drafters[name], compared.heads[name]
            what = name, f"`{head.kind}`", f"{head.parameters:,}", f"{condition.temperature:g}"
            gains = (found.get(name) for found in (first.over, first.accepted_over))
            over = (_interval(gain.ratio, gain.interval) if gain else "" for gain in gains)
            rows.append((*what, _rate(row.online), _speedup(row.speed), *over))
    how, made = compared.settings, compared.provenance
    common = f"{compared.prompts.count} prompts of {how.max_new_tokens} new tokens, {how.dtype}"
    origin = f"{hardware(made)}, commit {_commit(made.git)}"
    return f"{common}; {origin}.\n\n{_table(RIVALS_HEADER, rows)}"


def headline(results: Results) -> str:
    """Return what a measurement came to, in a paragraph."""
    checked, given = results.lossless, results.prompts
    same = _same(checked) if checked else ""
    what = f"{base_name(results.base.name)}, {given.count} prompts of {given.name}"
    card = f"[card](recipes/{SHOWN}/README.md)"
    told = f"{what}; {hardware(results.provenance)}; {card}"
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
    ours = (f"{_speedup(some.speed)} on {SETS[name]}" for name, some in here.items() if some)
    theirs = (f"{_figure(gain, 'ratio')} on {SETS[name]}" for name, gain in there.items())
    made = hardware(from_json(Provenance, told["provenance"]))
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


def heads(compared: Mapping[str, Any]) -> str:
    """Return the tables of all kinds of head on one recipe, and what they have in common."""
    chain = from_json(Comparison, compared["chain"])
    tuned = from_json(Comparison, compared["tuned"]) if compared.get("tuned") else None
    greedy, drawn = chain.conditions
    rows: Rows = []
    for kind in sorted(chain.heads, key=lambda kind: _reached(greedy, kind).tokens_per_forward):
        training = compared["training"][kind]
        rows.append(
            (
                f"`{kind}`",
                f"{chain.heads[kind].parameters:,}",
                f"{training['tokens_per_second']:,.0f}",
                f"{training['peak_gib']:.2f}",
                _rate(_reached(greedy, kind)),
                _rate(_reached(drawn, kind)),
                *_by_the_clock(tuned, kind),
            )
        )
    tokens = next(iter(compared["training"].values()))["tokens"]
    of_trees = f", {tuned.prompts.count} of the tuned trees" if tuned else ""
    common = (
        f" with each kind of head in turn: {tokens:,} training tokens, depth {chain.head.depth}, "
        f"{chain.prompts.count} prompts{of_trees}, "
        f"{chain.settings.dtype}; {hardware(chain.provenance)},"
    )
    pairs = accepted_against(greedy, [*chain.heads])
    told = f"{pairs.title}, chain, T=0:\n\n{_table(pairs.header, pairs.rows)}"
    origin = {"recipe": compared["recipe"], "provenance": compared["chain"]["provenance"]}
    table = _below(common, origin, _table(HEADS_HEADER, rows))
    return f"{table}\n\n{told}"


def _reached(condition: Condition, kind: str) -> Rate:
    return condition.drafters[kind].online


def _by_the_clock(tuned: Comparison | None, kind: str) -> tuple[str, str]:
    """Return what a head's own tree reached, and how much faster than the base alone."""
    if tuned is None:
        return NOT_MEASURED, NOT_MEASURED
    row = tuned.drafters[kind]
    return f"{_rate(row.online)}, {row.num_nodes} nodes", _speedup(row.speed)


def coupling(measured: Mapping[str, Any]) -> str:
    """Return the table of drafts with and without the base's noise, and what its rows share."""
    rows: Rows = []
    for row in sorted(measured["rows"], key=lambda row: (row["kind"], row["temperature"])):
        same = (row["chain"][way]["identical"] for way in ("uncoupled", "coupled"))
        rows.append(
            (
                f"`{row['kind']}`",
                f"{row['temperature']:g}",
                *(_gain(row[name]) for name in ("chain", "tuned")),
                _figure(row["rejection"], "tokens_per_forward"),
                f"{' and '.join(map(str, same))} of {row['prompts']}",
            )
        )
    common = (
        f", {measured['prompts']['count']} prompts of {measured['new_tokens']} new tokens, "
        f"trees of {measured['nodes']} nodes;"
    )
    return _below(common, measured, _table(COUPLING_HEADER, rows))


def _below(common: str, measured: Mapping[str, Any], table: str) -> str:
    """Return a table below its recipe, what its rows share and what measured them."""
    made = from_json(Provenance, measured["provenance"])
    origin = f"torch {made.versions['torch']}, commit {_commit(made.git)}"
    return f"`{measured['recipe']}`{common} {origin}.\n\n{table}"


def _gain(pair: Mapping[str, Any]) -> str:
    """Return tokens per forward without the noise and with it, and their ratio."""
    before, after = (pair[way]["tokens_per_forward"] for way in ("uncoupled", "coupled"))
    return f"{before:.2f} to {after:.2f}: {_figure(pair['gain'], 'ratio')}"


def _planned(name: str) -> tuple[str, str]:
    """Return base and head of a recipe that was never run, from its settings."""
    _compose.register()
    folder = str(data_dir("configs"))
    with initialize_config_dir(version_base="1.3", config_dir=folder):
        settings = compose("train", [f"recipe={name}"])
    return base_name(settings.base.model), f"`{settings.head.kind}`"


def base_name(name: str) -> str:
    """Return a base's Hub id, or its folder as seen from the checkout."""
    before, found, inner = name.rpartition("recipes/")
    return f"`recipes/{inner}`" if found and (not before or before.endswith("/")) else f"`{name}`"


def card(results: Results | None) -> str:
    """Return the table of one recipe."""
    if results is None:
        return NOT_YET
    return _table(("what", "measured"), [*_acceptance(results), *_cost(results), *_origin(results)])


def _acceptance(results: Results) -> Rows:
    rows: Rows = [("tokens per forward", _rate(results.online))]
    if loops := results.degenerate:
        label = f"the same without the {loops.flagged} of {loops.compared} that loop"
        rows.append((label, _rate(loops.without)))
    for phase in results.phases:
        rows.append((f"after phase {phase.phase}, chain replayed offline", _rate(phase)))
    if same := results.lossless:
        gap = same.first_divergence_logit_gap
        tie = "" if gap is None else f"; largest logit gap at a first difference {gap:.2g}"
        text = f"{same.identical} of {same.compared} prompts{tie}"
        rows.append(("identical to the base alone", text))
    if replay := results.replay:
        rows.append(("offline replay equals decoding, chain", "yes" if replay.equal else "no"))
    return rows


def _cost(results: Results) -> Rows:
    speed = results.speed
    rows: Rows = [("speed-up over the base alone", _speedup(speed))]
    if speed:
        rates = f"{speed.base_tokens_per_second:.1f}, {speed.tokens_per_second:.1f}"
        rows += [
            ("tokens per second: base alone, with head", rates),
            ("time of a step over the base's", f"{speed.step_overhead:.2f}"),
            ("peak memory", f"{speed.peak_gib:.2f} GiB"),
        ]
    return rows


def _origin(results: Results) -> Rows:
    head, base, how = results.head, results.base, results.settings
    prompts, made = results.prompts, results.provenance
    tried = len(results.tree_candidates)
    # the first candidate is the base alone
    tree = f"{how.tree}, {how.num_nodes} nodes" + (f"; best of {tried - 1}" if tried else "")
    packages = ("specheads", "torch", "transformers")
    versions = ", ".join(f"{name} {made.versions[name]}" for name in packages)
    decoding = f"{how.max_new_tokens} new tokens, temperature {how.temperature:g}, "
    return [
        ("head", f"{head.kind}, depth {head.depth}, {head.parameters:,} parameters"),
        ("base", f"{base_name(base.name)}, {base.parameters:,} parameters"),
        ("tree", tree),
        ("prompts", f"{prompts.count} of {prompts.name}, version {prompts.version}"),
        ("decoding", decoding + f"{how.dtype}, batch {how.batch_size}, seed {how.seed}"),
        ("hardware", hardware(made)),
        ("versions", versions),
        ("commit", _commit(made.git)),
    ]


def hardware(made: Provenance) -> str:
    """Return the GPU, or processor and threads."""
    machine = made.hardware
    return machine.gpu or f"{machine.processor}, {machine.threads} threads"


def _commit(git: Git | None) -> str:
    if git is None:
        return "outside a checkout"
    return f"`{git.commit[:12]}`" + (" and uncommitted changes" if git.dirty else "")


def _rate(rate: Rate | None) -> str:
    return _interval(rate.tokens_per_forward, rate.interval) if rate else NOT_MEASURED


def _speedup(speed: Speed | None) -> str:
    return _interval(speed.speedup, speed.interval) if speed else NOT_MEASURED


def _figure(section: Mapping[str, Any], name: str) -> str:
    return _interval(section[name], section["interval"])


def _interval(value: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
