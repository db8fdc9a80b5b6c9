"""Evaluate a head, or the head of a run: offline replay, online decoding, speed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.config import Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import from_json, read_json, to_json
from specheads.core.machine import dtype_name
from specheads.data.prompts import PromptSet, load_prompts
from specheads.decoding.accept import LOSSY, acceptance_rule
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.named import fixed_policy
from specheads.heads.load import drafter_of, load_head
from specheads.measure.generation import (
    EvaluationConfig,
    GenerationSettings,
    decode_texts,
    generation_settings,
    write_alone,
)
from specheads.measure.methods import measure_drafting
from specheads.measure.offline import measure_offline
from specheads.measure.online import lossless_in_float32, measure_online
from specheads.measure.quality import compare_quality, measure_quality, quality_windows
from specheads.measure.results import (
    BaseSummary,
    DraftVocabulary,
    EvaluationSettings,
    HeadSummary,
    PhaseRate,
    PromptSummary,
    Replay,
    Results,
)
from specheads.measure.speed import measure_speed
from specheads.measure.tune import candidates, choose_tree, decoded_context
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import nearby, provenance


def evaluate_run(
    run: RunDirectory,
    settings: Train,
    base: FrozenBase,
    prompts: PromptSet | None = None,
    *,
    force: bool = False,
) -> tuple[Results, Head]:
    """Evaluate the head of a finished run; return the results and the head.

    If the run trained an adapter, it is merged into the base. If the base came without it, the
    results contain the base's own quality before and after. `force` is as for `load_head`.
    """
    run.refuse_unfinished("evaluated")
    quality = None
    if run.adapter.is_dir() and not base.holds(run.adapter):
        windows = quality_windows(settings, base)
        before = measure_quality(base, windows, progress=True)
        base.merge(run.adapter)
        quality = compare_quality(before, measure_quality(base, windows, progress=True))
    head = load_head(run.head, base, force=force)
    phases = [run.phases / name for name in settings.schedule.phases]
    results = evaluate_head(base, head, settings, prompts, phases=phases)
    found = draft_vocabulary(head, run)
    return replace(results, draft_vocabulary=found, base_quality=quality), head


def evaluate_head(
    base: FrozenBase,
    head: Head,
    settings: EvaluationConfig,
    prompts: PromptSet | None = None,
    *,
    phases: Sequence[Path] = (),
) -> Results:
    """Evaluate a head that is bound to its base.

    Without `prompts` those that the settings name are loaded. `phases` are folders of the head at
    the end of each phase, named after the phase.
    """
    prompts, evaluation = check(settings, base, head.depth, prompts), settings.evaluation
    tokens = [prompt.tokens for prompt in prompts.prompts]
    sources = [one.source for one in prompts.prompts]
    generation = generation_settings(evaluation, settings.seed, sources)
    alone = write_alone(base, tokens, replace(generation, batch_size=8))
    tree, tuned = choose_tree(base, head, settings, decoded_context(settings, prompts))
    generation, own = replace(generation, tree=tree), own_tree(tree)
    found: dict[str, Any] = {}
    matched = evaluation.temperature == 0 or evaluation.acceptance == "match"
    if matched:
        found["offline"] = measure_offline(base, head, tokens, alone, generation)
    if evaluation.mode != "offline":
        found |= _online(base, head, prompts, alone, generation, matched=matched)
        found["texts"] = decode_texts(base, head, prompts.prompts, generation)
        if evaluation.temperature > 0:
            found["drafting"] = measure_drafting(base, head, tokens, alone, generation)
    if evaluation.mode == "all":
        timed, repetitions = tokens[: evaluation.speed_prompts], evaluation.repeats
        found["speed"] = measure_speed(base, head, timed, generation, repetitions=repetitions)
    return Results(
        **subject(base, head, prompts),
        settings=EvaluationSettings(
            **settings_section(EvaluationSettings, base, evaluation),
            lossless=evaluation.temperature == 0 or evaluation.acceptance not in LOSSY,
            tree=tree.name,
            num_nodes=tree.num_nodes,
            paths=[list(path) for path in own.paths] if isinstance(own, policies.Static) else [],
            copied_tokens=tree.size if isinstance(tree, HybridTree) else 0,
            seed=settings.seed,
        ),
        draft_vocabulary=draft_vocabulary(head, None),
        tree_candidates=candidates(tuned) if tuned else [],
        tuned=tuned,
        phases=[_phase(base, folder, tokens, alone, generation) for folder in phases],
        **found,
    )


def refuse_unusable(settings: EvaluationConfig, head_depth: int) -> policies.TreePolicy | None:
    """Raise for settings that fail with every base; return the tree, None if it is to be tuned.

    Ranges were checked when the settings were composed; this checks combinations.
    """
    evaluation = settings.evaluation
    generation_settings(evaluation, settings.seed)
    # the first token comes with the prompt, and a step is timed between the ends of two
    what, least = ("speed", 3) if evaluation.mode == "all" else ("acceptance", 2)
    if evaluation.max_new_tokens < least:
        raise InputError(
            f"{what} needs {least} new tokens at least, got evaluation.max_new_tokens="
            f"{evaluation.max_new_tokens}; raise it"
        )
    acceptance_rule(evaluation.acceptance)
    sampled = evaluation.temperature > 0 and evaluation.acceptance != "match"
    if sampled and evaluation.mode == "offline":
        raise InputError(
            "evaluation.acceptance must be match for evaluation.mode=offline above temperature "
            f"zero, got {evaluation.acceptance}; set mode=online"
        )
    return fixed_policy(settings.tree, head_depth)


def check(
    settings: EvaluationConfig,
    base: FrozenBase,
    head_depth: int,
    prompts: PromptSet | None = None,
) -> PromptSet:
    """Raise for an evaluation that would fail later; return its prompts."""
    evaluation, tree = settings.evaluation, refuse_unusable(settings, head_depth)
    if base.tokenizer is None and (prompts is None or tree is None):
        raise InputError(f"evaluation reads text: the base {base.name} needs a tokenizer")
    prompts = prompts or named_prompts(settings, base)
    longest = max(len(prompt.tokens) for prompt in prompts.prompts)
    if longest + evaluation.max_new_tokens > base.max_length:
        raise InputError(
            f"prompts and new tokens must fit the context: {longest} + "
            f"{evaluation.max_new_tokens} exceed {base.max_length}; lower "
            "evaluation.max_new_tokens or choose other prompts"
        )
    return prompts


def named_prompts(settings: EvaluationConfig, base: FrozenBase) -> PromptSet:
    """Load the prompts that the settings name."""
    assert base.tokenizer is not None
    return load_prompts(
        settings.evaluation.prompts,
        base.tokenizer,
        num_prompts=settings.evaluation.num_prompts,
        prompt_tokens=settings.evaluation.prompt_tokens,
        all_turns=settings.evaluation.all_turns,
        corpus=settings.data,
    )


def subject(base: FrozenBase, head: Head, prompts: PromptSet) -> dict[str, Any]:
    """Return the sections on head, base, prompts and provenance, without local paths."""
    given = prompts.prompts
    return {
        "head": head_summary(head),
        "base": BaseSummary(
            name=nearby(base.name),
            revision=base.revision,
            adapter=nearby(base.adapter),
            fingerprint=base.fingerprint,
            parameters=base.num_parameters,
        ),
        "prompts": PromptSummary(
            name=prompts.name,
            version=prompts.version,
            count=len(given),
            categories=dict(sorted(Counter(prompt.category for prompt in given).items())),
            sources=len({prompt.source or place for place, prompt in enumerate(given)}),
        ),
        "provenance": provenance(),
    }


def head_summary(head: Head) -> HeadSummary:
    """Return the kind and size of a head."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return HeadSummary(kind=head.kind, depth=head.depth, parameters=parameters)


def settings_section(kind: type, base: FrozenBase, *places: object) -> dict[str, Any]:
    """Return the fields of a results section that have the same name in these settings."""
    return {
        item.name: getattr(place, item.name)
        for place in places
        for item in fields(kind)
        if hasattr(place, item.name)
    } | {"dtype": dtype_name(base.dtype), "device": base.device.type}


def draft_vocabulary(head: Head, run: RunDirectory | None) -> DraftVocabulary:
    """Return how many tokens the head can draft, and their share of its training text."""
    if head.draft_ids is None:
        return DraftVocabulary(size=head.vocab_size, coverage=1.0)
    known = read_json(run.provenance) if run is not None else {}
    counted = known.get("draft_vocabulary") or {"size": head.drafted_size, "coverage": None}
    return from_json(DraftVocabulary, counted, "provenance.json")


def _online(
    base: FrozenBase,
    head: Head,
    prompts: PromptSet,
    alone: list[list[int]],
    generation: GenerationSettings,
    *,
    matched: bool,
) -> dict[str, Any]:
    """Return the sections from decoding; `matched` text has to equal that of the base alone."""
    tokens = [prompt.tokens for prompt in prompts.prompts]
    categories = [prompt.category for prompt in prompts.prompts]
    accepted = measure_online(base, head, tokens, alone, generation, categories)
    found = {item.name: getattr(accepted, item.name) for item in fields(accepted)}
    if matched:
        found["replay"] = _replay(base, head, tokens, alone, generation)

        def methods(other: FrozenBase) -> dict[str, Any]:
            return {"head": (drafter_of(head, other), generation)}

        wide = lossless_in_float32(base, methods, tokens, generation)
        found["lossless"] = replace(accepted.lossless, float32=wide.get("head"))
    return found


def _replay(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    alone: list[list[int]],
    generation: GenerationSettings,
) -> Replay:
    """Compare the offline replay of a chain with the same chain decoded."""
    generation = replace(generation, tree=None, acceptance="match", batch_size=8)
    measured = (
        measure_offline(base, head, prompts, alone, generation),
        measure_online(base, head, prompts, alone, generation).online,
    )
    names = ("forwards", "per_depth", "tokens_per_forward")
    replayed, decoded = ({name: to_json(section)[name] for name in names} for section in measured)
    return Replay(offline=replayed, online=decoded, equal=replayed == decoded)


def _phase(
    base: FrozenBase,
    folder: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    generation: GenerationSettings,
) -> PhaseRate:
    """Replay a chain with the head at the end of a phase."""
    head = load_head(folder, base, force=True)
    found = measure_offline(base, head, prompts, alone, replace(generation, tree=None))
    rate = found.tokens_per_forward
    return PhaseRate(phase=folder.name, tokens_per_forward=rate, interval=found.interval)
