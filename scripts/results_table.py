"""Write the tables of cards, README.md and docs/export_matrix.md from what was measured.

    python scripts/results_table.py            rewrite pages that are out of date
    python scripts/results_table.py --check    write nothing; exit 1 when a page is out of date

A row names its machine, commit, prompts and interval, and is of a head that is in this repository
or that a recipe here trains; other files are refused, or give no row. Only the text between
`<!-- NAME -->` and `<!-- /NAME -->` is written:

    a recipe's card     results (results.json), sets (*/results.json), ways (*/compare.json), served
                        (serve.json of bench_serve.py), speculators and ablations (NAME.json),
                        contexts (contexts*.json of `specheads evaluate contexts=[...]`)
    recipes/README.md   results (of every recipe), heads (heads.json and more_tokens.json)
    recipes/gpu         gpu (*.json of gpu.py)
    docs/load.md        load (serve.json of the published head)
    docs/mistakes.md    curves (metrics.jsonl of the quickstart)
    docs/export_matrix  matrix (the layouts of specheads/export/layouts/)
    README.md           results: the quickstart, the published head, and the same head in vLLM
"""

import argparse
import hashlib
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specheads.config import compose
from specheads.core.files import from_json
from specheads.export.layouts import engine_module, engines
from specheads.heads.load import kinds
from specheads.measure.compare import ratios
from specheads.measure.plots import BLUE, curve, draw_depths
from specheads.measure.results import Comparison, Results, read_results
from specheads.measure.summary import context_rows, summary_rows, with_interval
from specheads.runs.provenance import Provenance
from specheads.runs.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONDITIONS = "One request at a time, temperature 0. Brackets are 95 % intervals over prompts."
HERE = "specheads"
"""Engine of measurements in our own loop."""
QUICKSTART, PUBLISHED = "smollm2", "smollm2_long"
"""Recipes of the quickstart, and of the head that is part of this repository."""
SETS = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench"}
"""Names of the public prompt sets that the published head was measured on."""
GPU_STAGES = ("tests", "decode", "engine", "train", "smollm2", "chain_8b")
NOT_YET, NOT_MEASURED = "not yet run", "not measured"
NOT_PUBLISHED = "The published head was not measured."
Rows = list[tuple[str, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout")
    options = parser.parse_args(arguments)
    try:
        pages = render(options.root)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    stale = [file for file, text in pages.items() if file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{'not current' if options.check else 'wrote'}: {file.relative_to(options.root)}")
        if not options.check:
            file.write_text(pages[file], encoding="utf-8")
            recipes = options.root / "recipes"
            if file.name == "load.md" and (measured := _served(recipes)):
                plot(measured, file.with_suffix(".png"))
            if file.name == "mistakes.md":
                plot_curves(_metrics(recipes), file.with_name("curves.png"))
    return int(options.check and bool(stale))


def render(root: Path) -> dict[Path, str]:
    """Return the text each file should have: what it has, with its block up to date.

    Raises:
        ValueError: A file is missing, or has no block, or more than one.
    """
    recipes = root / "recipes"
    folders = sorted(path.parent for path in recipes.glob("*/recipe.yaml"))
    measured = {folder.name: read_results(Results, folder / "results.json") for folder in folders}
    blocks: dict[Path, dict[str, str]] = {}
    for folder in folders:
        results = measured[folder.name]
        if results and results.head.kind != _kind(folder.name):
            raise ValueError(
                f"{folder / 'results.json'} is of {results.head.kind}, and its recipe trains "
                f"{_kind(folder.name)}; measure the recipe again, or remove the file"
            )
        tables = blocks[folder / "README.md"] = {"results": card(results)} if results else {}
        patterns = {"*/results.json": sets, "*/compare.json": ways, "contexts*.json": contexts}
        for pattern, describe in patterns.items():
            if files := sorted(folder.glob(pattern)):
                tables[describe.__name__] = describe(files)
        if (file := folder / "serve.json").is_file():
            tables["served"] = served(
                _served(recipes) or {} if folder.name == PUBLISHED else _json(file)
            )
        for name in ("speculators", "ablations"):
            if (file := folder / f"{name}.json").is_file():
                tables[name] = rivals(file)
    compared = [
        file for name in ("heads", "more_tokens") for file in sorted(recipes.glob(f"*/{name}.json"))
    ]
    blocks[recipes / "README.md"] = {
        "results": overview(measured),
        "heads": "\n\n".join(map(heads, map(_json, compared))) or NOT_YET,
    }
    if (recipes / "gpu").is_dir():
        blocks[recipes / "gpu" / "README.md"] = {"gpu": gpu(recipes / "gpu")}
    pages = {
        "export_matrix": ("matrix", matrix),
        "load": ("load", lambda: load(recipes)),
        "mistakes": ("curves", lambda: curves(recipes)),
    }
    page_blocks = {root / "docs" / f"{page}.md": block for page, block in pages.items()}
    blocks |= {file: {name: make()} for file, (name, make) in page_blocks.items() if file.is_file()}
    blocks[root / "README.md"] = {"results": worth(recipes)}
    return {file: with_tables(file, tables_by_name) for file, tables_by_name in blocks.items()}


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def with_tables(file: Path, blocks: Mapping[str, str]) -> str:
    """Return the text of a page with new tables between its marks."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for name, block in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, num_replaced = pattern.subn(
            lambda match, new=block: f"{match[1]}{new}\n{match[2]}", text
        )
        if num_replaced != 1:
            raise ValueError(
                f"{file} needs one block from <!-- {name} --> to <!-- /{name} -->, it has "
                f"{num_replaced}; "
                "put both lines where the table belongs"
            )
    return text


def overview(measured: Mapping[str, Results | None]) -> str:
    """Return the table of all recipes, one row each; a recipe without results maps to None."""
    rows: Rows = []
    links = {name: f"[{name}]({name}/README.md)" for name in measured}
    for name, results in measured.items():
        if results:
            cells = (base_name(results.base.name), f"`{results.head.kind}`")
            figures = rate(results.online), speedup(results.speed)
            rows.append((links[name], *cells, *figures, _machine(results.provenance)))
    header = ("recipe", "base", "head", "tokens per forward", "speed-up", "machine")
    absent = [links[name] for name, results in measured.items() if results is None]
    note = f"\n\nWithout recorded results: {', '.join(absent)}." if absent else ""
    return f"{table(header, rows)}{note}"


def worth(recipes: Path) -> str:
    """Return the table of what the quickstart's head and the published head are worth.

    One row per measurement that the tree holds, at batch 1 and temperature zero. Of the chains
    that vLLM served, the table shows the one whose smallest speed-up is largest.
    """
    rows, head = list[tuple[str, ...]](), published_head(recipes)
    quick = recipes / QUICKSTART / "results.json"
    for file in (quick, *(recipes / PUBLISHED / name / "results.json" for name in SETS)):
        if (results := read_results(Results, file)) is None:
            continue
        if file == quick:
            link, prompts = _card("`make quickstart`", QUICKSTART), "held-out prompts"
        else:
            link, prompts = _card("published head", PUBLISHED), SETS[file.parent.name]
            if (results.head.kind, results.head.depth) != (head.get("kind"), head.get("depth")):
                raise ValueError(
                    f"{file} is not of the published head, which is {head.get('kind')} of depth "
                    f"{head.get('depth')}; measure that, or remove the file"
                )
        figures = rate(results.online), speedup(results.speed), _machine(results.provenance)
        rows.append((link, HERE, f"{results.prompts.count} {prompts}", *figures))
    if measured := _served(recipes):
        single = [row for row in measured["rows"] if row["batch"] == 1]
        depth = max(
            {row["depth"] for row in single},
            key=lambda candidate: min(
                row["speedup"]["ratio"] for row in single if row["depth"] == candidate
            ),
        )
        engine = f"vLLM {measured['engine']['vllm']}, {_method(depth)}"
        link = _card("published head", PUBLISHED)
        machine = _machine(from_json(Provenance, measured["provenance"]))
        for row in single:
            if row["depth"] == depth:
                prompts = f"{row['count']} {SETS[row['prompts']]}"
                figures = figure(row["served"], "tokens_per_forward"), figure(row["speedup"])
                rows.append((link, engine, prompts, *figures, machine))
    # a figure without an interval is no row
    rows = [row for row in rows if "[" in row[3] and "[" in row[4]]
    if not rows:
        return NOT_YET
    header = ("head", "engine", "prompts", "tokens per forward", "speed-up", "machine")
    return f"{table(header, rows)}\n\n{CONDITIONS} The speed-up is over the base alone."


def published_head(recipes: Path) -> dict[str, Any]:
    """Return `kind` and `depth` of the head in this repository; empty if there is none."""
    file = recipes / PUBLISHED / "head" / "config.json"
    return _json(file) if file.is_file() else {}


def _card(text: str, recipe: str) -> str:
    return f"[{text}](recipes/{recipe}/README.md)"


def _kind(name: str) -> str:
    """Return the kind of head that a recipe trains."""
    return compose.settings_of("train", [f"recipe={name}"]).head["kind"]


def sets(files: Sequence[Path]) -> str:
    """Return the table of prompt sets that one head was measured on, a row each."""
    rows: Rows = []
    for file in files:
        results = read_results(Results, file)
        assert results is not None
        settings, lossless = results.settings, results.lossless
        first_cells = file.parent.name, f"{settings.temperature:g}", str(results.prompts.count)
        identical = f"{lossless.identical} of {lossless.compared}" if lossless else NOT_MEASURED
        figures = rate(results.online), speedup(results.speed), identical
        rows.append((*first_cells, f"{settings.tree}, {settings.num_nodes} nodes", *figures))
    header = ("set", "T", "prompts", "tree", "tokens per forward", "speed-up", "identical")
    return table(header, rows)


def contexts(files: Sequence[Path]) -> str:
    """Return the table by context length of each measured head, and what measured it."""
    tables = []
    for file in files:
        results = read_results(Results, file)
        assert results is not None
        settings, header, *rows = results.settings, *context_rows(results)
        method = f"`{results.head.kind}`, {settings.tree}, {settings.num_nodes} nodes"
        prompts = f"{results.prompts.count} prompts of {results.prompts.name}"
        length = f"{settings.max_new_tokens} new tokens, {settings.dtype}"
        origin = f"{method}, {prompts}, {length}; {_machine(results.provenance)}"
        tables.append(f"{origin}.\n\n{table(header, rows)}")
    return "\n\n".join(tables)


def ways(files: Sequence[Path]) -> str:
    """Return the table of ways to draft on prompt sets, a row each, the fastest of a set first."""
    rows: Rows = []
    for file in files:
        compared = read_results(Comparison, file)
        assert compared is not None
        for condition in compared.conditions:
            first_cells = file.parent.name, f"{condition.temperature:g}"
            hybrid = condition.drafters.get("hybrid")
            for name in condition.ranking:
                row = condition.drafters[name]
                over = figure(hybrid.over.get(name) if hybrid else None)
                rows.append((*first_cells, name, rate(row.online), speedup(row.speed), over))
    header = ("set", "T", "way", "tokens per forward", "speed-up", "hybrid over it")
    return table(header, rows)


def served(measured: Mapping[str, Any]) -> str:
    """Return the table of what an engine does with a head and without, and what measured it."""
    rows = [
        (
            *(row["prompts"], str(row["batch"]), str(row["depth"])),
            # a budget has no replay: its drafts depend on the load
            *(figure(row.get(source), "tokens_per_forward") for source in ("served", "replay")),
            *(f"{row[speed]:.1f}" for speed in ("alone_tokens_per_second", "tokens_per_second")),
            figure(row["speedup"]),
            f"{row['identical']} of {row['count']}",
        )
        for row in _by_batch(measured)
    ]
    provenance, engine = from_json(Provenance, measured["provenance"]), measured["engine"]
    versions = ", ".join(f"{name} {engine[name]}" for name in engine).replace("vllm", "vLLM")
    length = f"`{measured['kind']}`, {measured['dtype']}, {measured['new_tokens']} new tokens, T=0"
    header = (
        *("set", "batch", "chain", "tokens per forward", "in our replay", "tokens/s alone"),
        *("with head", "speed-up over it alone", "identical"),
    )
    return f"{versions}, {length}; {_machine(provenance)}.\n\n{table(header, rows)}"


def _by_batch(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of batches, smaller ones first."""
    rows = [row for row in measured["rows"] if row["batch"] != "load"]
    return sorted(rows, key=lambda row: row["batch"])


def _served(recipes: Path) -> dict[str, Any] | None:
    """Return what vLLM did with the published head; None if that was not measured.

    Raises:
        ValueError: The file is of another head.
    """
    file, head = recipes / PUBLISHED / "serve.json", recipes / PUBLISHED / "head"
    if not file.is_file():
        return None
    measured = _json(file)
    weights = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    if measured.get("weights") != weights:
        raise ValueError(
            f"{file} is not of the head in {head}, whose weights are {weights[:12]}; measure that "
            "with scripts/bench_serve.py, or remove the file"
        )
    return measured


def load(recipes: Path) -> str:
    """Return the tables of the published head in vLLM by batch, and on a load."""
    if (measured := _served(recipes)) is None:
        return NOT_PUBLISHED
    methods = list(dict.fromkeys(row["depth"] for row in measured["rows"]))
    rows = _by_batch(measured) + [row for row in measured["rows"] if row["batch"] == "load"]
    by_condition = {(row["prompts"], row["batch"], row["depth"]): row for row in rows}
    cells, requests = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for name, batch in dict.fromkeys(condition[:2] for condition in by_condition):
        condition_rows = [by_condition[name, batch, method] for method in methods]
        if batch != "load":
            cells.append((name, str(batch), *(figure(row["speedup"]) for row in condition_rows)))
            continue
        alone = condition_rows[0]["requests_alone"], "vLLM alone", ""
        drafted = [
            (row["requests"], _method(row["depth"]), figure(row["speedup"]))
            for row in condition_rows
        ]
        for times, method, gain in (alone, *drafted):
            seconds = (f"{times[statistic]:.2f} s" for statistic in ("mean", "p50", "p95"))
            requests.append((name, method, *seconds, f"{1e3 * times['per_token']:.1f} ms", gain))
    provenance, engine = from_json(Provenance, measured["provenance"]), measured["engine"]
    about = f"vLLM {engine['vllm']}, {measured['dtype']}, {measured['new_tokens']} new tokens, T=0"
    tables = [table(("set", "batch", *map(_method, methods)), cells)] if cells else []
    if requests:
        times = ("mean latency", "p50", "p95", "per token", "speed-up over vLLM alone")
        tables.append(table(("set", "method", *times), requests))
    picture = "![Speed-up over vLLM alone by batch size](load.png)"
    return "\n\n".join([picture, f"{about}; {_machine(provenance)}.", *tables])


def _method(depth: int | str) -> str:
    return depth if isinstance(depth, str) else f"chain of {depth}"


def plot(measured: Mapping[str, Any], file: Path) -> None:
    """Draw the speed-up over batch size: geometric means over the prompt sets."""
    rows = _by_batch(measured)
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(6.0, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="requests in flight", ylabel="speed-up over vLLM alone")
    for depth in dict.fromkeys(row["depth"] for row in rows):
        ratios = [
            [row["speedup"]["ratio"] for row in rows if (row["depth"], row["batch"]) == condition]
            for condition in ((depth, batch) for batch in batches)
        ]
        means, width = [*map(statistics.geometric_mean, ratios)], 3 if depth == "budget" else 1.5
        axes.plot(range(len(batches)), means, marker="o", linewidth=width, label=_method(depth))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(batches)), [*map(str, batches)])
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def _metrics(recipes: Path) -> list[dict[str, Any]]:
    return read_metrics(recipes / QUICKSTART / "metrics.jsonl")


def curves(recipes: Path) -> str:
    """Return the table of a run's losses and acceptance, and its picture."""
    metrics = _metrics(recipes)
    depths = range(sum(name.startswith("accept/depth_") for name in metrics[0]))
    rows: Rows = []
    for row in metrics:
        rates = [f"{row[f'accept/depth_{depth}']:.2f}" for depth in depths]
        rows.append((f"{row['step']}", f"{row['tokens']:,}", f"{row['loss']:.1f}", *rates))
    titles = ("step", "tokens read", "`loss`", *(f"`accept/depth_{depth}`" for depth in depths))
    return f"![Loss and acceptance of the quickstart](curves.png)\n\n{table(titles, rows)}"


def plot_curves(metrics: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the loss and the acceptance at each depth over the steps of a run."""
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    losses.plot(*curve(metrics, "loss"), color=BLUE, marker=".")
    losses.set(xlabel="step", ylabel="loss, sum of all depths", ylim=(0, None))
    draw_depths(rates, metrics, "accept/depth_", ".")
    rates.set(xlabel="step", ylabel="share accepted", ylim=(0, 1))
    rates.legend(frameon=False, loc="upper left")
    figure.savefig(file, dpi=110)


def _machine(provenance: Provenance) -> str:
    if provenance.hardware.processor == "unknown" and not provenance.hardware.gpu:
        raise ValueError("a measurement needs its machine, one has none; measure again")
    return f"{provenance.hardware}, commit {_commit(provenance.git)}"


def gpu(folder: Path) -> str:
    """Return the tables of scripts/gpu.py, one for each JSON file, stage after stage."""
    tables = []
    for file in [file for stage in GPU_STAGES for file in sorted(folder.glob(f"{stage}*.json"))]:
        record = _json(file)
        provenance = from_json(Provenance, record["provenance"])
        versions = ", ".join(
            f"{name} {provenance.versions[name]}" for name in ("torch", "transformers")
        )
        origin = f"{provenance.hardware}, {versions}, commit {_commit(provenance.git)}"
        rows = table(("what", "measured", "aim", "of the datasheet"), gpu_rows(record))
        tables.append(f"**{file.stem}**: {origin}.\n\n{rows}")
    return "\n\n".join(tables) or NOT_YET


TIME = re.compile(r"tokens/s|\bms\b|MFU|speed-up|/ bare|over the base|over alone")
"""Figures that vary from one measurement to the next: those without an interval are left out."""


def gpu_rows(record: Mapping[str, Any]) -> Rows:
    """Return what a stage of scripts/gpu.py measured, what failed and what was skipped."""
    rows: Rows = [
        tuple(row)
        for row in record["summary"]
        if "[" in row[1] or not TIME.search(f"{row[0]} {row[1]}")
    ]
    for verb in ("failed", "skipped"):
        rows += [(part_name, f"{verb}: {why}", "", "") for part_name, why in record[verb].items()]
    return rows


def rivals(file: Path) -> str:
    """Return the table of several heads on the same prompts, a row each, the fastest first."""
    record = _json(file)
    # bench_heads writes several comparisons, the chain first
    compared = from_json(Comparison, record.get("chain", record))
    rows: Rows = []
    for condition in compared.conditions:
        first = condition.drafters[condition.ranking[0]]
        for name in condition.ranking:
            row, head = condition.drafters[name], compared.heads[name]
            first_cells = (
                name,
                f"`{head.kind}`",
                f"{head.parameters:,}",
                f"{condition.temperature:g}",
            )
            over = (
                figure(ratios_by_head.get(name))
                for ratios_by_head in (first.over, first.accepted_over)
            )
            rows.append((*first_cells, rate(row.online), speedup(row.speed), *over))
    settings = compared.settings
    length = f"{settings['max_new_tokens']} new tokens, {settings['dtype']}"
    origin = f"{compared.prompts.count} prompts of {length}; {_machine(compared.provenance)}"
    header = (
        *("head", "kind", "parameters", "T", "tokens per forward", "speed-up"),
        *("first over it, tokens/s", "first over it, tokens per forward"),
    )
    return f"{origin}.\n\n{table(header, rows)}"


def heads(compared: Mapping[str, Any]) -> str:
    """Return the tables of all kinds of head on one recipe, and what they have in common."""
    chain = from_json(Comparison, compared["chain"])
    tuned, clock = (
        from_json(Comparison, compared[name]) if compared.get(name) else None
        for name in ("tuned", "clock")
    )
    greedy, sampled = (condition.drafters for condition in chain.conditions)
    rows: Rows = []
    for kind in sorted(chain.heads, key=lambda kind: greedy[kind].online.tokens_per_forward):
        training, parameters = compared["training"][kind], chain.heads[kind].parameters
        figures = f"{training['tokens_per_second']:,.0f}", f"{training['peak_gib']:.2f}"
        rates = rate(greedy[kind].online), rate(sampled[kind].online)
        timed_cells = NOT_MEASURED, NOT_MEASURED
        if tuned:
            row = tuned.conditions[0].drafters[kind]
            timed_cells = f"{rate(row.online)}, {row.num_nodes} nodes", speedup(row.speed)
        elif clock and (speed := clock.conditions[0].drafters[kind].speed):
            timed_cells = f"{speed.step_overhead:.2f}", speedup(speed)
        rows.append((f"`{kind}`", f"{parameters:,}", *figures, *rates, *timed_cells))
    tokens = next(iter(compared["training"].values()))["tokens"]
    of_times = f", {clock.prompts.count} of the times" if clock else ""
    of_times = f", {tuned.prompts.count} of the tuned trees" if tuned else of_times
    provenance = chain.provenance
    common = (
        f"`{compared['recipe']}` with each kind of head in turn: {tokens:,} training tokens, depth "
        f"{chain.head.depth}, {chain.prompts.count} prompts{of_times}, {chain.settings['dtype']}; "
        f"{provenance.hardware}, torch {provenance.versions['torch']}, commit "
        f"{_commit(provenance.git)}"
    )
    header = (
        *("head", "parameters", "training tokens/s", "peak GiB", "chain, T=0", "chain, T=1"),
        *(
            ("time of a step over the base's", "speed-up, chain, T=0")
            if clock
            else ("tuned tree, T=0", "speed-up, tuned tree")
        ),
    )
    pairs = ratios(chain.conditions[0], [*chain.heads], "forward")
    paired = f"{pairs.title}, chain, T=0:\n\n{table(pairs.header, pairs.rows)}"
    return f"{common}.\n\n{table(header, rows)}\n\n{paired}"


def base_name(name: str) -> str:
    """Return a base's Hub id, or its folder as seen from the checkout."""
    before, folder, inner = name.rpartition("recipes/")
    return f"`recipes/{inner}`" if folder and (not before or before.endswith("/")) else f"`{name}`"


def card(results: Results) -> str:
    """Return the table of one recipe."""
    settings, provenance = results.settings, results.provenance
    versions = ", ".join(
        f"{x} {provenance.versions[x]}" for x in ("specheads", "torch", "transformers")
    )
    length = f"{settings.max_new_tokens} new tokens"
    decoding = f"{length}, temperature {settings.temperature:g}, {settings.dtype}"
    rows = summary_rows(
        replace(results, base=replace(results.base, name=base_name(results.base.name)))
    )
    if speed := results.speed:
        rows.append(("peak memory", f"{speed.peak_gib:.2f} GiB"))
    rows += [
        ("decoding", f"{decoding}, batch {settings.batch_size}, seed {settings.seed}"),
        ("measured on", f"{_machine(provenance)}; {versions}"),
    ]
    return table(("what", "measured"), rows)


def _commit(git: Mapping[str, Any] | None) -> str:
    if git is None:
        raise ValueError("a measurement needs its commit, one has none; measure in a checkout")
    return f"`{git['commit'][:12]}`" + (" and uncommitted changes" if git["dirty"] else "")


def figure(section: Any, name: str = "ratio", missing: str = "") -> str:
    """Return a number of a section, JSON or not, with its interval; `missing` if there is none."""
    if not section:
        return missing
    value_of = section.__getitem__ if isinstance(section, Mapping) else partial(getattr, section)
    return with_interval(value_of(name), value_of("interval"))


rate = partial(figure, name="tokens_per_forward", missing=NOT_MEASURED)
speedup = partial(figure, name="speedup", missing=NOT_MEASURED)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in lines)


def matrix() -> str:
    """Return every head on every engine, and how each layout was verified."""
    engine_names = engines()
    cells: Rows = []
    for kind in kinds():
        layouts = (engine_module(engine).LAYOUTS.get(kind) for engine in engine_names)
        cells.append((kind, *("no" if layout is None else layout.verified for layout in layouts)))
    details = [
        (f"`{engine}`: {module.ABOUT}", kind, f"{layout.verified}: {layout.note}")
        for engine in engine_names
        for module in [engine_module(engine)]
        for kind, layout in sorted(module.LAYOUTS.items())
    ]
    header = ("engine", "head", "verified")
    return f"{table(('head', *engine_names), cells)}\n\n{table(header, details)}"


if __name__ == "__main__":
    raise SystemExit(main())
