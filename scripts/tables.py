"""Tables of what was measured, as Markdown: results_table.py puts them where they belong."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.core.files import from_json
from specheads.measure.compare import ratios
from specheads.measure.results import Comparison, Condition, Rate, Results, Speed, read
from specheads.runs.provenance import Git, Provenance

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
    *("speed-up over it alone", "identical"),
)
ENGINES = {"vllm": "vLLM"}
"""What is called another name than its package."""
GPU_HEADER = ("what", "measured", "aim")
GPU_STAGES = ("tests", "decode", "train", "smollm2", "engine")
NOT_YET = "not yet run"
NOT_MEASURED = "not measured"
Rows = list[tuple[str, ...]]


def sets(files: Sequence[Path]) -> str:
    """Return the table of prompt sets that one head was measured on, a row each."""
    rows: Rows = []
    for file in files:
        results = read(Results, file)
        assert results is not None
        how, same = results.settings, results.lossless
        what = file.parent.name, f"{how.temperature:g}", str(results.prompts.count)
        figures = rate(results.online), speedup(results.speed)
        identical = f"{same.identical} of {same.compared}" if same else NOT_MEASURED
        rows.append((*what, f"{how.tree}, {how.num_nodes} nodes", *figures, identical))
    return table(SETS_HEADER, rows)


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
                rows.append((*what, name, rate(row.online), speedup(row.speed), over))
    return table(WAYS_HEADER, rows)


def served(measured: Mapping[str, Any]) -> str:
    """Return the table of what an engine does with a head and without, and what measured it."""
    rows = [
        (
            *(row["prompts"], str(row["batch"]), str(row["depth"])),
            *(figure(row[counted], "tokens_per_forward") for counted in ("served", "replay")),
            *(f"{row[speed]:.1f}" for speed in ("alone_tokens_per_second", "tokens_per_second")),
            figure(row["speedup"], "ratio"),
            f"{row['identical']} of {row['count']}",
        )
        for row in measured["rows"]
    ]
    made, engine = from_json(Provenance, measured["provenance"]), measured["engine"]
    versions = ", ".join(f"{ENGINES.get(name, name)} {engine[name]}" for name in engine)
    origin = f"{versions}, {measured['dtype']}"
    return (
        f"{origin}, {measured['new_tokens']} new tokens, T=0; {made.hardware}, commit "
        f"{_commit(made.git)}.\n\n{table(SERVED_HEADER, rows)}"
    )


def gpu(folder: Path) -> str:
    """Return the tables of scripts/gpu.py, one for each JSON file, stage after stage."""
    tables = []
    for file in [file for stage in GPU_STAGES for file in sorted(folder.glob(f"{stage}*.json"))]:
        found = json.loads(file.read_text(encoding="utf-8"))
        made = from_json(Provenance, found["provenance"])
        versions = ", ".join(f"{name} {made.versions[name]}" for name in ("torch", "transformers"))
        origin = f"{made.hardware}, {versions}, commit {_commit(made.git)}"
        tables.append(f"**{file.stem}**: {origin}.\n\n{table(GPU_HEADER, gpu_rows(found))}")
    return "\n\n".join(tables) or NOT_YET


def gpu_rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what a stage of scripts/gpu.py measured, what failed and what was skipped."""
    rows = [(what, measured, aim) for what, measured, aim in found["summary"]]
    rows += [(part, f"failed: {why}", "") for part, why in found["failed"].items()]
    return rows + [(part, f"skipped: {why}", "") for part, why in found["skipped"].items()]


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
            rows.append((*what, rate(row.online), speedup(row.speed), *over))
    how, made = compared.settings, compared.provenance
    common = f"{compared.prompts.count} prompts of {how.max_new_tokens} new tokens, {how.dtype}"
    origin = f"{made.hardware}, commit {_commit(made.git)}"
    return f"{common}; {origin}.\n\n{table(RIVALS_HEADER, rows)}"


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
                rate(_reached(greedy, kind)),
                rate(_reached(drawn, kind)),
                *_by_the_clock(tuned, kind),
            )
        )
    tokens = next(iter(compared["training"].values()))["tokens"]
    of_trees = f", {tuned.prompts.count} of the tuned trees" if tuned else ""
    common = (
        f" with each kind of head in turn: {tokens:,} training tokens, depth {chain.head.depth}, "
        f"{chain.prompts.count} prompts{of_trees}, "
        f"{chain.settings.dtype}; {chain.provenance.hardware},"
    )
    pairs = ratios(greedy, [*chain.heads], "forward")
    told = f"{pairs.title}, chain, T=0:\n\n{table(pairs.header, pairs.rows)}"
    origin = {"recipe": compared["recipe"], "provenance": compared["chain"]["provenance"]}
    shown = _below(common, origin, table(HEADS_HEADER, rows))
    return f"{shown}\n\n{told}"


def _reached(condition: Condition, kind: str) -> Rate:
    return condition.drafters[kind].online


def _by_the_clock(tuned: Comparison | None, kind: str) -> tuple[str, str]:
    """Return what a head's own tree reached, and how much faster than the base alone."""
    if tuned is None:
        return NOT_MEASURED, NOT_MEASURED
    row = tuned.drafters[kind]
    return f"{rate(row.online)}, {row.num_nodes} nodes", speedup(row.speed)


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
                figure(row["rejection"], "tokens_per_forward"),
                f"{' and '.join(map(str, same))} of {row['prompts']}",
            )
        )
    common = (
        f", {measured['prompts']['count']} prompts of {measured['new_tokens']} new tokens, "
        f"trees of {measured['nodes']} nodes;"
    )
    return _below(common, measured, table(COUPLING_HEADER, rows))


def _below(common: str, measured: Mapping[str, Any], shown: str) -> str:
    """Return a table below its recipe, what its rows share and what measured them."""
    made = from_json(Provenance, measured["provenance"])
    origin = f"torch {made.versions['torch']}, commit {_commit(made.git)}"
    return f"`{measured['recipe']}`{common} {origin}.\n\n{shown}"


def _gain(pair: Mapping[str, Any]) -> str:
    """Return tokens per forward without the noise and with it, and their ratio."""
    before, after = (pair[way]["tokens_per_forward"] for way in ("uncoupled", "coupled"))
    return f"{before:.2f} to {after:.2f}: {figure(pair['gain'], 'ratio')}"


def base_name(name: str) -> str:
    """Return a base's Hub id, or its folder as seen from the checkout."""
    before, found, inner = name.rpartition("recipes/")
    return f"`recipes/{inner}`" if found and (not before or before.endswith("/")) else f"`{name}`"


def card(results: Results | None) -> str:
    """Return the table of one recipe."""
    if results is None:
        return NOT_YET
    return table(("what", "measured"), [*_acceptance(results), *_cost(results), *_origin(results)])


def _acceptance(results: Results) -> Rows:
    rows: Rows = [("tokens per forward", rate(results.online))]
    if loops := results.degenerate:
        label = f"the same without the {loops.flagged} of {loops.compared} that loop"
        rows.append((label, rate(loops.without)))
    for phase in results.phases:
        rows.append((f"after phase {phase.phase}, chain replayed offline", rate(phase)))
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
    rows: Rows = [("speed-up over the base alone", speedup(speed))]
    if speed:
        rates = f"{speed.base_tokens_per_second:.1f}, {speed.tokens_per_second:.1f}"
        step = speed.step_overhead
        rows += [
            ("tokens per second: base alone, with head", rates),
            ("time of a step over the base's", "no second step" if step is None else f"{step:.2f}"),
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
        ("hardware", str(made.hardware)),
        ("versions", versions),
        ("commit", _commit(made.git)),
    ]


def _commit(git: Git | None) -> str:
    if git is None:
        return "outside a checkout"
    return f"`{git.commit[:12]}`" + (" and uncommitted changes" if git.dirty else "")


def rate(found: Rate | None) -> str:
    """Return tokens per forward and their interval."""
    return _interval(found.tokens_per_forward, found.interval) if found else NOT_MEASURED


def speedup(speed: Speed | None) -> str:
    """Return how many times faster than the base alone, and the interval."""
    return _interval(speed.speedup, speed.interval) if speed else NOT_MEASURED


def figure(section: Mapping[str, Any], name: str) -> str:
    """Return a number of a section of JSON and its interval."""
    return _interval(section[name], section["interval"])


def _interval(value: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in lines)
