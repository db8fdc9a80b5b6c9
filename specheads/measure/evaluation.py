"""Evaluate a head, or the head of a run: offline replay, online decoding, speed."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.config import Compare, Evaluate, Evaluation, Train
from specheads.core.drafter import Head
from specheads.data.corpora import load_corpus
from specheads.data.prompts import PromptSet, cut_windows, load_prompts
from specheads.decoding.acceptance.rules import LOSSY, acceptance_rule
from specheads.decoding.trees import policies
from specheads.decoding.trees.named import fixed_policy
from specheads.heads.load import load_head
from specheads.measure.how import How, how_of, sampling_of
from specheads.measure.offline import measure_offline
from specheads.measure.online import measure_online, write_alone
from specheads.measure.quality import compare, measure_quality, quality_windows
from specheads.measure.results import (
    BaseSummary,
    Candidate,
    Counted,
    DraftVocabulary,
    HeadSummary,
    Offline,
    Online,
    PhaseRate,
    PromptSummary,
    Replay,
    Results,
    Settings,
)
from specheads.measure.speed import measure_speed
from specheads.measure.store import from_json
from specheads.measure.tune.trees import pick_tree
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import nearby, provenance

MODES = ("offline", "online", "all")

Asked = Train | Evaluate | Compare
"""Settings that say what is measured: `evaluation`, `tree`, `data` and `seed`."""


def evaluate_run(
    run: RunDirectory, settings: Train, base: FrozenBase, prompts: PromptSet | None = None
) -> tuple[Results, Head]:
    """Evaluate the head of a finished run; return what was measured, and the head.

    Args:
        run: Finished.
        settings: Its own.
        base: As it was before the run. Where the run trained an adapter, that is merged into it.
        prompts: What is continued; None loads those that the settings name.

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
    phases = {name: run.phases / name for name in settings.schedule.phases}
    results = evaluate_head(base, head, settings, prompts, phases=phases)
    found = draft_vocabulary(head, run)
    return replace(results, draft_vocabulary=found, base_quality=quality), head


def evaluate_head(
    base: FrozenBase,
    head: Head,
    settings: Asked,
    prompts: PromptSet | None = None,
    *,
    phases: Mapping[str, Path] | None = None,
) -> Results:
    """Evaluate a head on the base it was made for.

    Args:
        base: The model that decides.
        head: What guesses; bound to the base.
        settings: What is measured, and how.
        prompts: What is continued; None loads those that the settings name.
        phases: Folders of the head as it was at the end of each phase, by phase.

    Raises:
        ValueError: As `check`.
    """
    prompts, evaluation = check(settings, base, head.depth, prompts), settings.evaluation
    tokens = [prompt.tokens for prompt in prompts.prompts]
    how = how_of(evaluation, settings.seed)
    alone = write_alone(base, tokens, replace(how, batch_size=8))
    tree, candidates = choose_tree(base, head, settings)
    how = replace(how, tree=tree)
    found: dict[str, Any] = {}
    if evaluation.temperature == 0:
        found["offline"] = measure_offline(base, head, tokens, alone, tree=tree, progress=True)
    if evaluation.mode != "offline":
        categories = [prompt.category for prompt in prompts.prompts]
        accepted = measure_online(base, head, tokens, alone, how, categories)
        found |= {item.name: getattr(accepted, item.name) for item in fields(accepted)}
        if evaluation.temperature == 0:
            found["replay"] = _replay(base, head, tokens, alone, how)
    if evaluation.mode == "all":
        timed = tokens[: evaluation.speed_prompts]
        found["speed"] = measure_speed(base, head, timed, how, repetitions=evaluation.repeats)
    return Results(
        head=head_summary(head),
        base=base_summary(base),
        prompts=PromptSummary(name=prompts.name, version=prompts.version, count=len(tokens)),
        settings=_settings(base, evaluation, tree, settings.seed),
        draft_vocabulary=draft_vocabulary(head, None),
        tree_candidates=candidates,
        phases=[_phase(base, *phase, tokens, alone) for phase in (phases or {}).items()],
        provenance=provenance(),
        **found,
    )


def check(
    settings: Asked, base: FrozenBase, head_depth: int, prompts: PromptSet | None = None
) -> PromptSet:
    """Refuse an evaluation that could only fail later; return the prompts it would use.

    Raises:
        ValueError: The mode, the tree or the prompts are unknown, or do not fit the context.
    """
    evaluation = settings.evaluation
    if evaluation.mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {evaluation.mode!r}")
    sampling_of(evaluation, settings.seed)
    acceptance_rule(evaluation.acceptance)
    if evaluation.temperature > 0 and evaluation.mode == "offline":
        raise ValueError(f"temperature must be 0 for mode=offline, got {evaluation.temperature}")
    tree = fixed_policy(settings.tree, head_depth)
    if base.tokenizer is None and (prompts is None or tree is None):
        raise ValueError(f"evaluation reads text: the base {base.name} needs a tokenizer")
    if prompts is None:
        assert base.tokenizer is not None
        prompts = load_prompts(
            evaluation.prompts,
            base.tokenizer,
            num_prompts=evaluation.num_prompts,
            prompt_tokens=evaluation.prompt_tokens,
        )
    longest = max(len(prompt.tokens) for prompt in prompts.prompts)
    if longest + evaluation.max_new_tokens > base.max_length:
        raise ValueError(
            f"prompts and new tokens must fit the context: {longest} + "
            f"{evaluation.max_new_tokens} exceed {base.max_length}; lower "
            "evaluation.max_new_tokens or choose other prompts"
        )
    return prompts


def choose_tree(
    base: FrozenBase, head: Head, settings: Asked
) -> tuple[policies.TreePolicy, list[Candidate]]:
    """Return the tree that was asked for, and what was tried where one is to be picked."""
    if (tree := fixed_policy(settings.tree, head.depth)) is not None:
        return tree, []
    assert base.tokenizer is not None
    evaluation = settings.evaluation
    documents = load_corpus(settings.data, "validation", settings.seed)
    windows = cut_windows(documents, base.tokenizer, evaluation.prompt_tokens, settings.seed)
    choice = pick_tree(base, head, list(islice(windows, evaluation.tune_prompts)), progress=True)
    return choice.tree, choice.table


def head_summary(head: Head) -> HeadSummary:
    """Return what results say of a head."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return HeadSummary(kind=head.kind, depth=head.depth, parameters=parameters)


def base_summary(base: FrozenBase) -> BaseSummary:
    """Return what results say of a base: nothing of where it lies on this machine."""
    return BaseSummary(
        name=nearby(base.name),
        revision=base.revision,
        adapter=nearby(base.adapter),
        fingerprint=base.fingerprint,
        parameters=base.num_parameters,
    )


def _settings(
    base: FrozenBase, evaluation: Evaluation, tree: policies.TreePolicy, seed: int
) -> Settings:
    paths = tree.paths if isinstance(tree, policies.Static) else ()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "acceptance")
    return Settings(
        **{name: getattr(evaluation, name) for name in names},
        lossless=evaluation.temperature == 0 or evaluation.acceptance not in LOSSY,
        max_new_tokens=evaluation.max_new_tokens,
        tree=tree.name,
        num_nodes=tree.num_nodes,
        paths=[list(path) for path in paths],
        batch_size=evaluation.batch_size,
        dtype=str(base.dtype).removeprefix("torch."),
        device=base.device.type,
        seed=seed,
    )


def draft_vocabulary(head: Head, run: RunDirectory | None) -> DraftVocabulary:
    """Return how many tokens the head can draft, and their share of its training text."""
    if head.draft_ids is None:
        return DraftVocabulary(size=head.vocab_size, coverage=1.0)
    known = json.loads(run.provenance.read_text(encoding="utf-8")) if run is not None else {}
    counted = known.get("draft_vocabulary") or {"size": head.drafted_size, "coverage": None}
    return from_json(DraftVocabulary, counted)


def _replay(
    base: FrozenBase, head: Head, prompts: list[list[int]], alone: list[list[int]], how: How
) -> Replay:
    """Hold the offline replay of a chain against the same chain decoded for real."""
    chain = policies.chain(head.depth)
    how = replace(how, tree=chain, acceptance="match", batch_size=8, progress=False)
    replayed = _counted(measure_offline(base, head, prompts, alone, tree=chain))
    decoded = _counted(measure_online(base, head, prompts, alone, how).online)
    return Replay(offline=replayed, online=decoded, equal=replayed == decoded)


def _counted(section: Offline | Online) -> Counted:
    return Counted(
        forwards=section.forwards,
        per_depth=section.per_depth,
        tokens_per_forward=section.tokens_per_forward,
    )


def _phase(
    base: FrozenBase, name: str, folder: Path, prompts: list[list[int]], alone: list[list[int]]
) -> PhaseRate:
    """Replay a chain with the head as it was at the end of a phase."""
    found = measure_offline(base, load_head(folder, base, force=True), prompts, alone)
    rate = found.tokens_per_forward
    return PhaseRate(phase=name, tokens_per_forward=rate, interval=found.interval)
