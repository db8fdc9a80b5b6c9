"""Measure a head: offline replay, online decoding, speed beside the base alone, and a report."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers.utils import logging as transformers_logging

from specheads.base.model import FrozenBase
from specheads.commands import _compose
from specheads.config import Base, Data, Evaluate, Evaluation, Train
from specheads.core.drafter import Head
from specheads.data.corpora import load_corpus
from specheads.data.prompts import PromptSet, cut_windows, load_prompts
from specheads.decoding.acceptance.rules import LOSSY, acceptance_rule
from specheads.decoding.acceptance.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.named import fixed_policy
from specheads.export.hub import card
from specheads.heads.load import load_head
from specheads.measure import report
from specheads.measure.offline import measure_offline
from specheads.measure.online import decode_prompts, measure_online
from specheads.measure.quality import compare, measure_quality
from specheads.measure.speed import measure_speed
from specheads.measure.tune.trees import pick_tree
from specheads.runs.directory import RunDirectory, write_atomic
from specheads.runs.provenance import provenance
from specheads.runs.trackers import read_metrics

MODES = ("offline", "online", "all")
SHORT = {"head": "head_path", "base": "base.model"} | {
    name: f"evaluation.{name}"
    for name in ("prompts", "num_prompts", "max_new_tokens", "temperature", "mode")
}
"""The names that docs and scripts use on the command line, and the settings they stand for."""

QUALITY_TOKENS = 512
"""Of a window that the base's own quality is measured on, where documents are long enough."""


@_compose.command("evaluate", SHORT)
def main(settings: Evaluate) -> None:
    """Evaluate a run, or any head on the base it was made for."""
    transformers_logging.disable_progress_bar()
    if settings.run:
        run = RunDirectory(Path(settings.run))
        trained = _compose.read_run(run.config, Train)
        trained.tree = settings.tree
        _compose.overlay(trained, settings, SHORT)
        results = evaluate_run(run, trained, load_base(trained.base), out=settings.out)
    elif settings.head_path and settings.base.model:
        if not settings.out:
            raise ValueError("a head without a run needs out=FOLDER for its report")
        base = load_base(settings.base)
        head = load_head(settings.head_path, base, force=settings.force)
        results = _evaluate(base, head, settings, None)
        _write(Path(settings.out), results, [])
    else:
        raise ValueError("name what to evaluate: run=DIR, or head=PATH and base=PATH")
    if settings.record:
        _record(Path(settings.record), results)


def evaluate_run(
    run: RunDirectory, settings: Train, base: FrozenBase, *, out: str = ""
) -> dict[str, Any]:
    """Evaluate a finished run's head and write its report; return what was measured.

    Args:
        run: Finished.
        settings: Its own.
        base: As it was before the run. Where the run trained an adapter, that is merged into it.
        out: Where the report goes; empty is the run's own report/.

    Raises:
        ValueError: The run is not finished.
    """
    run.refuse_unfinished("evaluated")
    quality = None
    if run.adapter.is_dir():
        windows = quality_windows(settings, base)
        before = measure_quality(base, windows, progress=True)
        base.merge(run.adapter)
        quality = compare(before, measure_quality(base, windows, progress=True))
    head = load_head(run.head, base)
    results = _evaluate(base, head, settings, run) | {"base_quality": quality}
    _write(Path(out) if out else run.report, results, read_metrics(run.metrics))
    if not out:
        card.write_card(run, asdict(settings), head, base)
    return results


def check(settings: Train | Evaluate, base: FrozenBase, head_depth: int) -> PromptSet:
    """Refuse an evaluation that could only fail later; return the prompts it would use.

    Raises:
        ValueError: The mode, the tree or the prompts are unknown, or do not fit the context.
    """
    how = settings.evaluation
    if how.mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {how.mode!r}")
    sampling_of(how, settings.seed)
    acceptance_rule(how.acceptance)
    if how.temperature > 0 and how.mode == "offline":
        raise ValueError(f"temperature must be 0 for mode=offline, got {how.temperature}")
    fixed_policy(settings.tree, head_depth)
    if base.tokenizer is None:
        raise ValueError(f"evaluation reads text: the base {base.name} needs a tokenizer")
    prompts = load_prompts(
        how.prompts, base.tokenizer, num_prompts=how.num_prompts, prompt_tokens=how.prompt_tokens
    )
    longest = max(len(prompt.tokens) for prompt in prompts.prompts)
    if longest + how.max_new_tokens > base.max_length:
        raise ValueError(
            f"prompts and new tokens must fit the context: {longest} + {how.max_new_tokens} "
            f"exceed {base.max_length}; lower evaluation.max_new_tokens or choose other prompts"
        )
    return prompts


def load_base(settings: Base, device: str = "auto") -> FrozenBase:
    """Load the base that the settings name; `device` is what their auto stands for."""
    return FrozenBase.load(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=device if settings.device == "auto" else settings.device,
        attention=settings.attention,
        adapter=settings.adapter,
        compile=settings.compile,
    )


def quality_windows(settings: Train, base: FrozenBase) -> list[list[int]]:
    """Cut the validation text that the base's own quality is measured on.

    Raises:
        ValueError: The corpus has none.
    """
    assert base.tokenizer is not None
    documents = load_documents(settings.data, "validation", settings.seed)
    length = min(QUALITY_TOKENS, base.max_length)
    while length > 1:
        windows = cut_windows(documents, base.tokenizer, length, settings.seed)
        if found := list(islice(windows, settings.evaluation.quality_windows)):
            return found
        # every document is shorter
        length //= 2
    raise ValueError(
        "the base's quality is measured on validation text, and there is none; raise "
        "evaluation.quality_windows above 0, or give longer documents"
    )


def sampling_of(how: Evaluation, seed: int) -> Sampling:
    """Return how the settings of an evaluation want tokens chosen.

    Raises:
        ValueError: One of them lies outside its range.
    """
    return Sampling(
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        repetition_penalty=how.repetition_penalty,
        seed=seed,
    )


def load_documents(data: Data, split: str, seed: int) -> Dataset:
    """Load one split of the corpus that the settings name."""
    return load_corpus(data, split, seed)


def _evaluate(
    base: FrozenBase, head: Head, settings: Train | Evaluate, run: RunDirectory | None
) -> dict[str, Any]:
    how = settings.evaluation
    prompts = check(settings, base, head.depth)
    sampling = sampling_of(how, settings.seed)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    alone = [
        one.tokens
        for one in decode_prompts(
            base,
            None,
            tokens,
            max_new_tokens=how.max_new_tokens,
            settings=sampling,
            batch_size=8,
            progress=True,
        )
    ]
    tree, candidates = choose_tree(base, head, settings, progress=True)
    results = _describe(base, head, prompts, how, tree, settings.seed)
    results["draft_vocabulary"] = _draft_vocabulary(head, run)
    # a tree that is not the same in every step has no replay; the chain stands for it
    static = tree if isinstance(tree, policies.Static) else policies.chain(head.depth)
    if how.temperature == 0:
        results["offline"] = measure_offline(base, head, tokens, alone, tree=static, progress=True)
    if how.mode != "offline":
        categories = [prompt.category for prompt in prompts.prompts]
        results |= measure_online(
            base,
            head,
            tokens,
            alone,
            tree=tree,
            categories=categories,
            max_new_tokens=how.max_new_tokens,
            batch_size=how.batch_size,
            settings=sampling,
            acceptance=how.acceptance,
            progress=True,
        )
        if how.temperature == 0:
            results["replay"] = _replay(base, head, tokens, alone, how.max_new_tokens, sampling)
    if how.mode == "all":
        results["speed"] = measure_speed(
            base,
            head,
            tokens[: how.speed_prompts],
            tree=tree,
            max_new_tokens=how.max_new_tokens,
            repetitions=how.repeats,
            batch_size=how.batch_size,
            settings=sampling,
            acceptance=how.acceptance,
            progress=True,
        )
    results["tree_candidates"] = candidates
    results["phases"] = _phases(base, run, settings, tokens, alone)
    return results


def choose_tree(
    base: FrozenBase, head: Head, settings: Train | Evaluate, *, progress: bool
) -> tuple[policies.TreePolicy, list[dict[str, Any]]]:
    """Return the tree that was asked for, and what was tried where one is to be picked."""
    how = settings.evaluation
    if (tree := fixed_policy(settings.tree, head.depth)) is not None:
        return tree, []
    assert base.tokenizer is not None
    documents = load_documents(settings.data, "validation", settings.seed)
    windows = cut_windows(documents, base.tokenizer, how.prompt_tokens, settings.seed)
    prompts = list(islice(windows, how.tune_prompts))
    choice = pick_tree(base, head, prompts, progress=progress)
    return choice.tree, choice.table


def _describe(
    base: FrozenBase,
    head: Head,
    prompts: PromptSet,
    how: Evaluation,
    tree: policies.TreePolicy,
    seed: int,
) -> dict[str, Any]:
    """Return the sections of results.json that say what was measured, all others null."""
    paths = tree.paths if isinstance(tree, policies.Static) else ()
    return {
        "schema": 1,
        "head": {
            "kind": head.kind,
            "depth": head.depth,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
        },
        "base": {
            "name": base.name,
            "revision": base.revision,
            "adapter": base.adapter,
            "fingerprint": base.fingerprint,
            "parameters": base.num_parameters,
        },
        "prompts": {
            "name": prompts.name,
            "version": prompts.version,
            "count": len(prompts.prompts),
        },
        "settings": {
            "temperature": how.temperature,
            "top_k": how.top_k,
            "top_p": how.top_p,
            "min_p": how.min_p,
            "repetition_penalty": how.repetition_penalty,
            "acceptance": how.acceptance,
            "lossless": how.temperature == 0 or how.acceptance not in LOSSY,
            "max_new_tokens": how.max_new_tokens,
            "tree": tree.name,
            "num_nodes": tree.num_nodes,
            "paths": [list(path) for path in paths],
            "batch_size": how.batch_size,
            "dtype": str(base.dtype).removeprefix("torch."),
            "device": base.device.type,
            "seed": seed,
        },
        "offline": None,
        "online": None,
        "speed": None,
        "lossless": None,
        "degenerate": None,
        "provenance": provenance(),
    }


def _draft_vocabulary(head: Head, run: RunDirectory | None) -> dict[str, Any]:
    """Return how many tokens the head can draft, and their share of its training text."""
    if head.draft_ids is None:
        return {"size": head.vocab_size, "coverage": 1.0}
    known = json.loads(run.provenance.read_text(encoding="utf-8")) if run is not None else {}
    return known.get("draft_vocabulary") or {"size": head.drafted_size, "coverage": None}


def _replay(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    alone: list[list[int]],
    limit: int,
    sampling: Sampling,
) -> dict[str, Any]:
    """Hold the offline replay of a chain against the same chain decoded for real."""
    chain = policies.chain(head.depth)
    offline = measure_offline(base, head, prompts, alone, tree=chain)
    online = measure_online(
        base,
        head,
        prompts,
        alone,
        tree=chain,
        max_new_tokens=limit,
        settings=sampling,
        batch_size=8,
    )["online"]
    counted = ("forwards", "per_depth", "tokens_per_forward")
    return {
        "offline": {name: offline[name] for name in counted},
        "online": {name: online[name] for name in counted},
        "equal": all(offline[name] == online[name] for name in counted),
    }


def _phases(
    base: FrozenBase,
    run: RunDirectory | None,
    settings: Train | Evaluate,
    prompts: list[list[int]],
    alone: list[list[int]],
) -> list[dict[str, Any]]:
    """Replay a chain with the head as it was at the end of each phase."""
    if run is None or not isinstance(settings, Train):
        return []
    rows = []
    for name in settings.schedule.phases:
        # joint training has changed the base since an earlier phase
        head = load_head(run.phases / name, base, force=True)
        measured = measure_offline(base, head, prompts, alone, tree=policies.chain(head.depth))
        rows.append(
            {
                "phase": name,
                "tokens_per_forward": measured["tokens_per_forward"],
                "interval": measured["interval"],
            }
        )
    return rows


def _write(folder: Path, results: dict[str, Any], history: list[dict[str, Any]]) -> None:
    page = report.write_report(folder, results, history)
    report.show(results)
    Console().print(f"report: {page}")


def _record(folder: Path, results: dict[str, Any]) -> None:
    """Keep what was measured with the recipe, which alone may hold numbers."""
    if not (folder / "recipe.yaml").is_file():
        raise ValueError(f"record needs a recipe's folder; {folder} has no recipe.yaml")
    write_atomic(folder / "results.json", json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
