"""Hold a head against what needs no training: lookup, a draft model, the base itself, a hybrid."""

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

from specheads.base.model import FrozenBase
from specheads.baselines import DraftModel, PromptLookup, Streaming
from specheads.baselines.hybrid import Hybrid, HybridTree, Lookup
from specheads.commands import _compose, evaluate
from specheads.config import Compare, Train
from specheads.core.drafter import Head
from specheads.decoding.trees import policies
from specheads.heads.load import load_head
from specheads.measure.compare import Arm, compare_drafters, compare_speed, table, write_comparison
from specheads.measure.how import How
from specheads.measure.online import decode_prompts
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import provenance

DRAFTERS = ("head", "prompt_lookup", "hybrid", "streaming", "draft_model")
SHORT = {
    name: f"evaluation.{name}"
    for name in ("prompts", "num_prompts", "max_new_tokens", "temperature")
}
"""The names that docs and scripts use on the command line, and the settings they stand for."""


@_compose.command("compare", SHORT)
def main(settings: Compare) -> None:
    """Compare the head of a run with the baselines."""
    transformers_logging.disable_progress_bar()
    names = chosen(settings)
    if not settings.run:
        raise ValueError("name what to compare: run=DIR")
    run = RunDirectory(Path(settings.run))
    trained = _compose.read_run(run.config, Train)
    trained.tree = settings.tree
    _compose.overlay(trained, settings, SHORT)
    run.refuse_unfinished("compared")
    base = evaluate.load_base(trained.base)
    if run.adapter.is_dir():
        base.merge(run.adapter)
    head = load_head(run.head, base)
    comparison = _compare(base, head, names, settings, trained)
    path = write_comparison(Path(settings.out) if settings.out else run.report, comparison)
    console = Console()
    console.print(table(comparison["drafters"]))
    console.print(f"comparison: {path}", soft_wrap=True)


def chosen(settings: Compare) -> list[str]:
    """Return the drafters that are asked for.

    Raises:
        ValueError: One is unknown, or a draft model is asked for and none is named.
    """
    if unknown := [name for name in settings.drafters if name not in DRAFTERS]:
        raise ValueError(f"drafters must be among {', '.join(DRAFTERS)}, got {unknown[0]!r}")
    if "draft_model" in settings.drafters and not settings.draft_model:
        raise ValueError("the drafter draft_model needs a model: draft_model=FOLDER_OR_HUB_ID")
    named = DRAFTERS if settings.draft_model else DRAFTERS[:-1]
    return list(dict.fromkeys(settings.drafters)) or list(named)


def _compare(
    base: FrozenBase, head: Head, names: list[str], settings: Compare, trained: Train
) -> dict[str, Any]:
    """Return what compare.json holds."""
    how = trained.evaluation
    prompts = evaluate.check(trained, base, head.depth)
    sampling = evaluate.sampling_of(how, settings.seed)
    arms = _arms(base, head, names, settings, trained)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    alone = decode_prompts(
        base,
        None,
        tokens,
        How(max_new_tokens=how.max_new_tokens, sampling=sampling, batch_size=8, progress=True),
    )
    rows = compare_drafters(
        base,
        arms,
        tokens,
        [one.tokens for one in alone],
        max_new_tokens=how.max_new_tokens,
        settings=sampling,
        batch_size=how.batch_size,
        progress=True,
    )
    speeds = compare_speed(
        base,
        arms,
        tokens[: how.speed_prompts],
        max_new_tokens=how.max_new_tokens,
        settings=sampling,
        repetitions=how.repeats,
        batch_size=how.batch_size,
        progress=True,
    )
    return {
        "schema": 1,
        "head": {"kind": head.kind, "depth": head.depth},
        "base": {"name": base.name, "fingerprint": base.fingerprint},
        "prompts": {"name": prompts.name, "version": prompts.version, "count": len(tokens)},
        "settings": {
            "temperature": how.temperature,
            "max_new_tokens": how.max_new_tokens,
            "batch_size": how.batch_size,
            "draft_model": settings.draft_model,
            "draft_depth": settings.draft_depth,
            "copied_tokens": settings.copied_tokens,
            "max_ngram": settings.max_ngram,
            "sinks": settings.sinks,
            "window": settings.window,
            "dtype": str(base.dtype).removeprefix("torch."),
            "device": base.device.type,
            "seed": settings.seed,
        },
        "drafters": {name: row | {"speed": speeds[name]} for name, row in rows.items()},
        "provenance": provenance(),
    }


def _arms(
    base: FrozenBase, head: Head, names: list[str], settings: Compare, trained: Train
) -> dict[str, Arm]:
    """Return the drafters that are asked for, each with its own way to grow."""
    copied, depth = settings.copied_tokens, settings.draft_depth
    tree: policies.TreePolicy = policies.NOTHING
    if {"head", "hybrid"} & set(names):
        tree, _ = evaluate.choose_tree(base, head, trained, progress=True)

    def lookup(length: int) -> PromptLookup:
        return PromptLookup(
            base.vocab_size, length, max_ngram=settings.max_ngram, device=base.device
        )

    def arm(name: str) -> Arm:
        match name:
            case "head":
                return Arm(head, tree)
            case "prompt_lookup":
                return Arm(lookup(copied), Lookup(copied))
            case "hybrid":
                # tokens that the head's tree holds leave room for as many more copied ones
                both = Hybrid(head, lookup(copied + tree.depth))
                return Arm(both, HybridTree(tree, copied, trim=base.device.type == "cpu"))
            case "streaming":
                alike = Streaming(base, depth, sinks=settings.sinks, window=settings.window)
                return Arm(alike, policies.chain(depth))
            case _:
                return Arm(_draft_model(base, settings), policies.chain(depth))

    return {name: arm(name) for name in names}


def _draft_model(base: FrozenBase, settings: Compare) -> DraftModel:
    dtype = str(base.dtype).removeprefix("torch.")
    model = FrozenBase.load(settings.draft_model, dtype=dtype, device=str(base.device))
    return DraftModel(model, settings.draft_depth, base)


if __name__ == "__main__":
    main()
