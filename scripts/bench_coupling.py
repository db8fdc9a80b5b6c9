"""Count what drafts gain by seeing the noise that the base draws with, above temperature zero.

    python scripts/bench_coupling.py --heads runs/heads/*/head            heads that lie in folders
    python scripts/bench_coupling.py --heads ... --temperature 1.0 --prompts 40
    python scripts/bench_coupling.py --heads ... --record                 and into recipes/README.md

Each head drafts a chain and the static tree that suits it best on validation text, with the noise
and without, and a chain of drawn tokens that is tested by rejection. All
continue the same prompts, and ratios are paired by prompt. Nothing is timed, so a busy machine
changes no number. What is in --out already, of the same prompts, is not measured again.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.commands import _compose
from specheads.config import Train
from specheads.core.drafter import Head
from specheads.core.records import to_json
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.heads.load import load_head
from specheads.measure.counts import paired_gain, rate
from specheads.measure.evaluation import named_prompts
from specheads.measure.generation import Decoded, GenerationSettings, decode_prompts, write_alone
from specheads.measure.methods import sampling_methods
from specheads.measure.speed import DraftMethod
from specheads.measure.tune import TUNING_TOKENS, tuning_prompts
from specheads.measure.tune_texts import write_texts
from specheads.measure.tune_trees import candidate_trees, replayed
from specheads.runs.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; return the exit code."""
    options = _parse(arguments)
    words = [f"recipe={options.recipe}", f"evaluation.num_prompts={options.prompts}"]
    words += [f"base.model={options.base}"] if options.base else []
    settings = _compose.settings_of("train", words)
    base = FrozenBase.load(**asdict(settings.base))
    prompts = named_prompts(settings, base)
    asked = {
        "recipe": options.recipe,
        "base": base.fingerprint,
        "prompts": {"version": prompts.version, "count": len(prompts.prompts)},
        "new_tokens": options.new_tokens,
        "nodes": options.nodes,
        "seed": settings.seed,
    }
    rows = _kept(options.out, asked)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    # folders are named alike, and moved: a head is known by its weights
    heads = {_digest(folder): folder for folder in options.heads}
    for temperature in options.temperature:
        how = GenerationSettings(
            max_new_tokens=options.new_tokens,
            sampling=Sampling(temperature=temperature, seed=settings.seed),
            batch_size=options.max_batch,
            progress=True,
        )
        known = {(row["head"], row["temperature"]) for row in rows}
        missing = {one: at for one, at in heads.items() if (one, temperature) not in known}
        alone = write_alone(base, tokens, how) if missing else []
        for digest, folder in missing.items():
            head = load_head(folder, base)
            named = {"head": digest, "kind": head.kind, "temperature": temperature}
            arms = trees(base, head, settings, how, options.nodes)
            rows.append(named | measure(base, arms, tokens, alone, how))
            _write(options.out, {"schema": 1, **asked, "rows": rows})
            print(json.dumps(rows[-1]), flush=True)
    print(f"wrote {options.out}")
    if not options.record:
        return 0
    kept = ROOT / "recipes" / options.recipe / "coupling.json"
    kept.write_text(options.out.read_text(encoding="utf-8"), encoding="utf-8")
    return subprocess.call([sys.executable, str(ROOT / "scripts" / "results_table.py")])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--heads", nargs="+", type=Path, required=True, help="folders of trained heads")
    add("--recipe", default="tiny_code", help="whose base, prompts and validation text")
    add("--base", default="", help="in place of the recipe's: a folder or Hub id")
    add("--temperature", nargs="+", type=float, default=[0.6, 0.8, 1.0])
    add("--prompts", type=int, default=200, help="continued at each temperature")
    add("--new-tokens", type=int, default=128, help="after each prompt")
    add("--nodes", type=int, default=8, help="of the trees, root included")
    add("--max-batch", type=int, default=16, help="prompts decoded together")
    add("--out", type=Path, default=ROOT / "runs" / "coupling.json")
    add("--record", action="store_true", help="write recipes/README.md's table")
    return parser.parse_args(arguments)


def _digest(head: Path) -> str:
    with (head / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _kept(file: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that were measured before, where they are of the same prompts."""
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    return found["rows"] if {name: found.get(name) for name in asked} == asked else []


def _write(file: Path, table: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    made = table | {"provenance": to_json(provenance())}
    file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


Pair = tuple[DraftMethod, DraftMethod]
"""How a tree is decoded with the noise, and without."""


def trees(
    base: FrozenBase, head: Head, settings: Train, how: GenerationSettings, num_nodes: int
) -> dict[str, Pair | DraftMethod]:
    """Return what is drafted: pairs of one tree with and without the noise, and rejection."""
    texts = [one.tokens for one in tuning_prompts(settings, base)]
    how = replace(how, max_new_tokens=TUNING_TOKENS)
    # each way has the tree that is best for it
    with_noise, without = (
        _best(base, head, texts, replace(how, coupled=coupled), num_nodes)
        for coupled in (True, False)
    )
    chain = sampling_methods(head, policies.chain(head.depth))
    return {
        "chain": (chain["coupled"], chain["uncoupled"]),
        "tuned": (
            sampling_methods(head, with_noise)["coupled"],
            sampling_methods(head, without)["uncoupled"],
        ),
        "rejection": chain["rejection"],
    }


def _best(
    base: FrozenBase, head: Head, prompts: list[list[int]], how: GenerationSettings, num_nodes: int
) -> policies.Static:
    """Return the tree of at most so many nodes that gives most tokens a forward after prompts."""
    ranks = write_texts(base, head, prompts, 1, how).ranks
    found = candidate_trees(ranks, head.depth, num_nodes)
    return max(found[1:], key=lambda tree: replayed(tree, ranks))


def measure(
    base: FrozenBase,
    arms: dict[str, Pair | DraftMethod],
    prompts: list[list[int]],
    alone: list[list[int]],
    how: GenerationSettings,
) -> dict[str, Any]:
    """Return what one head gives at one temperature."""

    def decode(arm: DraftMethod) -> list[Decoded]:
        return decode_prompts(base, arm.drafter, prompts, arm.settings(how))

    def told(arm: DraftMethod, decoded: list[Decoded]) -> dict[str, Any]:
        same = sum(one.tokens == text for one, text in zip(decoded, alone, strict=True))
        paths = [list(path) for path in getattr(arm.tree, "paths", ())]
        found = to_json(rate([one.counts for one in decoded]))
        return {**found, "identical": same, "num_nodes": arm.tree.num_nodes, "paths": paths}

    row: dict[str, Any] = {"prompts": len(prompts)}
    for name, arm in arms.items():
        if isinstance(arm, DraftMethod):
            row[name] = told(arm, decode(arm))
            continue
        ours, theirs = map(decode, arm)
        gain = paired_gain([one.counts for one in ours], [one.counts for one in theirs])
        row[name] = {
            "coupled": told(arm[0], ours),
            "uncoupled": told(arm[1], theirs),
            "gain": to_json(gain),
        }
    return row


if __name__ == "__main__":
    raise SystemExit(main())
