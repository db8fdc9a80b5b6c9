"""A head beside what needs no training: lookup, a draft model, the base itself, a hybrid."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.baselines import DraftModel, PromptLookup, Streaming
from specheads.baselines.hybrid import Hybrid, HybridTree, Lookup
from specheads.config import Compare
from specheads.config.commands import DRAFTERS
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.paths import writable_folder
from specheads.data.prompts import PromptSet
from specheads.decoding.trees import policies
from specheads.measure.drafting import ways
from specheads.measure.evaluation import Asked, check, choose_tree, subject, told_by
from specheads.measure.how import How, how_of
from specheads.measure.online import measure_online, write_alone
from specheads.measure.plots import draw_comparison
from specheads.measure.results import (
    Acceptance,
    CompareSettings,
    Comparison,
    DrafterRow,
    Rate,
    Speed,
)
from specheads.measure.speed import Arm, summarise, time_arms
from specheads.measure.store import dumps
from specheads.measure.tables import Fitted
from specheads.runs.directory import write_atomic
from specheads.runs.provenance import nearby


def chosen(settings: Compare) -> list[str]:
    """Return the drafters that are asked for; a draft model needs a name."""
    if unknown := [name for name in settings.drafters if name not in DRAFTERS]:
        raise InputError(f"drafters must be among {', '.join(DRAFTERS)}, got {unknown[0]!r}")
    if "draft_model" in settings.drafters and not settings.draft_model:
        raise InputError("the drafter draft_model needs a model: draft_model=FOLDER_OR_HUB_ID")
    named = DRAFTERS if settings.draft_model else DRAFTERS[:-1]
    return list(dict.fromkeys(settings.drafters)) or list(named)


def compare_head(
    base: FrozenBase,
    head: Head,
    settings: Compare,
    asked: Asked | None = None,
    prompts: PromptSet | None = None,
) -> Comparison:
    """Compare a head with the drafters that the settings name, on the same prompts.

    `asked` is what is measured, as the head's run has it; None is what `settings` say. Without
    prompts those that are named are loaded.
    """
    asked, names = asked or settings, chosen(settings)
    prompts, evaluation = check(asked, base, head.depth, prompts), asked.evaluation
    # baselines are all held to the base's own tokens
    how = replace(how_of(evaluation, settings.seed), acceptance="match")
    arms = _arms(base, head, names, settings, asked)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    drafters = compare_drafters(
        base,
        arms,
        tokens,
        write_alone(base, tokens, replace(how, batch_size=8)),
        how,
        speed_prompts=evaluation.speed_prompts,
        repetitions=evaluation.repeats,
    )
    shown = replace(settings, draft_model=nearby(settings.draft_model))
    return Comparison(
        **subject(base, head, prompts),
        settings=CompareSettings(**told_by(CompareSettings, base, asked.evaluation, shown)),
        drafters=drafters,
    )


def _arms(
    base: FrozenBase, head: Head, names: list[str], settings: Compare, asked: Asked
) -> dict[str, Arm]:
    """Return the drafters that are asked for, each with its own tree.

    Above temperature zero the head drafts in all three ways.
    """
    copied, depth = settings.copied_tokens, settings.draft_depth
    tree: policies.TreePolicy = policies.NOTHING
    if {"head", "hybrid"} & set(names):
        tree, _ = choose_tree(base, head, asked)

    lookup = partial(
        PromptLookup, base.vocab_size, max_ngram=settings.max_ngram, device=base.device
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
                dtype = str(base.dtype).removeprefix("torch.")
                model = FrozenBase.load(settings.draft_model, dtype=dtype, device=str(base.device))
                return Arm(DraftModel(model, depth, base), policies.chain(depth))

    arms = {name: arm(name) for name in names}
    evaluation = asked.evaluation
    if evaluation.temperature > 0 and "head" in arms:
        others = ways(head, tree)
        others.pop("coupled" if evaluation.coupled else "uncoupled", None)
        arms |= {f"head_{name}": other for name, other in others.items()}
    return arms


def compare_drafters(
    base: FrozenBase,
    arms: Mapping[str, Arm],
    prompts: list[list[int]],
    alone: list[list[int]],
    how: How,
    *,
    speed_prompts: int,
    repetitions: int = 2,
) -> dict[str, DrafterRow]:
    """Measure every arm: what it is accepted, and how fast it is on the first prompts.

    `alone` is what `write_alone` gave each prompt, with the same limit and sampling; trees are the
    arms' own.
    """
    found = {
        name: measure_online(base, arm.drafter, prompts, alone, arm.how(how))
        for name, arm in arms.items()
    }
    timings = time_arms(base, arms, prompts[:speed_prompts], how, repetitions=repetitions)
    return {
        name: DrafterRow(
            tree=arm.tree.name,
            num_nodes=arm.tree.num_nodes,
            **{item.name: getattr(found[name], item.name) for item in fields(Acceptance)},
            speed=summarise(timings[None], timings[name]),
        )
        for name, arm in arms.items()
    }


def table(rows: Mapping[str, DrafterRow]) -> Fitted:
    """Return the comparison as a table for the console."""
    columns = "drafter", "nodes", "tokens per forward", "without loops", "identical", "speed-up"
    lines = [
        (
            name,
            str(row.num_nodes),
            _figure(row.online),
            _figure(row.degenerate.without) if row.degenerate.without else "none left",
            f"{row.lossless.identical} of {row.lossless.compared}",
            _figure(row.speed),
        )
        for name, row in rows.items()
    ]
    return Fitted("drafters beside each other", lines, columns)


def _figure(section: Rate | Speed) -> str:
    low, high = section.interval
    value = section.speedup if isinstance(section, Speed) else section.tokens_per_forward
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write compare.json and compare.png; return the former, which appears last."""
    folder = writable_folder(folder)
    write_atomic(folder / "compare.png", draw_comparison(comparison.drafters))
    path = folder / "compare.json"
    write_atomic(path, dumps(comparison))
    return path
