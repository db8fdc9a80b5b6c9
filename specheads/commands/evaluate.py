"""Measure a head: offline replay, online decoding, speed compared with the base alone, a report.

specheads evaluate run=runs/smollm2
specheads evaluate run=runs/smollm2 tree=best_first max_new_tokens=256 out=again
specheads evaluate head=HEAD base=MODEL prompts=prompts.jsonl out=measured
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.commands._call import checked_settings, read_run_settings
from specheads.commands._library import SettingsWithEvaluation, load_base, load_base_and_head
from specheads.config.commands import Evaluate, Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import writable_folder
from specheads.data.prompts import PromptSet, drop_long_prompts, load_prompts, prepend_context
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees.policies import TreePolicy
from specheads.decoding.trees.tuned import Tuned, fixed_policy
from specheads.export import card
from specheads.heads.load import load_head
from specheads.measure.evaluation import (
    compare_quality,
    evaluate_head,
    measure_quality,
    quality_windows,
)
from specheads.measure.generation import GenerationSettings
from specheads.measure.results import PromptSummary, Results, TextQuality
from specheads.measure.summary import print_results
from specheads.measure.tune import choose_tree
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics


def run(settings: Evaluate) -> None:
    """Evaluate a run, or any head on its base."""
    if settings.head_path and not settings.out:
        raise InputError("a head without a run needs out=FOLDER for its report")
    results = evaluate(settings=settings)
    folder = Path(settings.out) if settings.out else RunDirectory(Path(settings.run)).report
    print_results(results, page=folder / "report.html")
    sys.stdout.write(shortage_note(results.prompts, settings))


def evaluate(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Evaluate | None = None,
    base: FrozenBase | None = None,
    out: str | Path = "",
) -> Results:
    """Measure the head of a run, or any head on its base.

    `overrides` are like `["tree=chain", "num_prompts=8"]`. Without `out` the report and the card of
    the run are replaced. If the run trained an adapter, it is merged into the base. If the base
    came without it, the results contain the base's own quality before and after.
    """
    settings = settings or checked_settings(Evaluate, overrides, run=run, out=out)
    evaluation = settings.evaluation
    if settings.out:
        # loads matplotlib, which training does without
        from specheads.measure.report import refuse_other_files

        refuse_other_files(writable_folder(settings.out))
    run_folder = RunDirectory(Path(settings.run)) if settings.run else None
    run_settings, phases, base_quality = dict[str, Any](), list[Path](), None
    if run_folder:
        run_folder.refuse_unfinished("evaluated")
        trained = read_run_settings(run_folder.config, Train)
        names = ("seed", "base", "tree", "evaluation")
        run_settings = asdict(replace(trained, **{n: getattr(settings, n) for n in names}))
        phases = phase_folders(run_folder, trained.schedule.phases)
        base = base or load_base(settings)
        base_quality = merge_adapter(base, run_folder, settings)
        head = load_head(run_folder.head, base, force=settings.force)
    else:
        base, head = load_base_and_head(settings, base)
    prompts = evaluation_prompts(base, head.depth, settings)
    generation = generation_settings(settings, prompts)
    contexts = context_prompts(base, settings, prompts)
    tree, tuned = choose_policy(base, head, settings, prompts, generation)
    results = evaluate_head(
        base,
        head,
        prompts,
        replace(generation, tree=tree),
        mode=evaluation.mode,
        tuned=tuned,
        phases=phases,
        contexts=contexts,
        run=run_folder,
        base_quality=base_quality,
    )
    folder = Path(settings.out) if settings.out else run_folder and run_folder.report
    if folder:
        from specheads.measure.report import write_report

        write_report(folder, results, read_metrics(run_folder.metrics) if run_folder else [])
    if run_folder and not settings.out:
        card.write_card(run_folder, run_settings, head, base)
    return results


def phase_folders(run: RunDirectory, phases: Iterable[str]) -> list[Path]:
    """Return the folders of the head at the end of each phase; raise if one cannot be used."""
    folders = [run.phases / name for name in phases]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"a run keeps its head of each phase, and {folder} is missing; restore it, or "
                f"evaluate head={run.head} base=MODEL out=FOLDER"
            )
        load_head(folder)
    return folders


def merge_adapter(
    base: FrozenBase, run: RunDirectory, settings: Evaluate
) -> dict[str, TextQuality] | None:
    """Merge a run's adapter into a base that lacks it; return the base's quality before and after.

    None if the run trained no adapter, or the base came with it.
    """
    if not run.adapter.is_dir() or base.has_merged(run.adapter):
        return None
    windows = quality_windows(base, settings.data, settings.seed)
    before = measure_quality(base, windows, progress=True)
    base.merge(run.adapter)
    return compare_quality(before, measure_quality(base, windows, progress=True))


# --- from settings to values -------------------------------------------------------------------


def evaluation_prompts(
    base: BaseEnds, head_depth: int, settings: SettingsWithEvaluation
) -> PromptSet:
    """Return the prompts of an evaluation; raise for one that would fail later."""
    evaluation = settings.evaluation
    fixed_policy(settings.tree, head_depth)
    prompts = load_prompts(
        evaluation.prompts,
        base.tokenizer_for("an evaluation"),
        num_prompts=evaluation.num_prompts,
        prompt_tokens=evaluation.prompt_tokens,
        all_turns=evaluation.all_turns,
        thinking=evaluation.thinking,
        corpus=settings.data,
    )
    room = base.max_length - evaluation.max_new_tokens
    return drop_long_prompts(prompts, room, evaluation.too_long)


def shortage_note(prompts: PromptSummary, settings: SettingsWithEvaluation) -> str:
    """Return a line if there were fewer prompts than the settings want, else nothing."""
    num_prompts, thinking = settings.evaluation.num_prompts, {*settings.evaluation.thinking}
    num_usable = prompts.count // max(1, len(thinking))
    if num_usable >= num_prompts:
        return ""
    return f"{prompts.name} has {num_usable} usable prompts, fewer than num_prompts={num_prompts}\n"


def context_prompts(
    base: BaseEnds, settings: SettingsWithEvaluation, prompts: PromptSet
) -> list[PromptSet]:
    """Return the prompts at each context length of an evaluation."""
    evaluation = settings.evaluation
    contexts, longest = sorted({*evaluation.contexts}), base.max_length - evaluation.max_new_tokens
    if not contexts:
        return []
    if contexts[-1] > longest:
        raise InputError(
            f"contexts can be at most {longest}, as {evaluation.max_new_tokens} new tokens follow "
            f"in a context of {base.max_length}, got {contexts[-1]}; lower contexts or "
            "max_new_tokens"
        )
    tokenizer = base.tokenizer_for("an evaluation")
    return prepend_context(prompts, contexts, evaluation.context_text, tokenizer)


def generation_settings(settings: SettingsWithEvaluation, prompts: PromptSet) -> GenerationSettings:
    """Return the conditions of decoding, without a tree."""
    names = "max_new_tokens", "acceptance", "coupled", "batch_size", "repeats", "speed_prompts"
    return GenerationSettings(
        **{name: getattr(settings.evaluation, name) for name in (*names, "ledger")},
        sampling=Sampling.of(settings.evaluation, settings.seed),
        progress=True,
        sources=tuple(prompt.source for prompt in prompts.prompts),
    )


def choose_policy(
    base: FrozenBase,
    head: Head,
    settings: SettingsWithEvaluation,
    prompts: PromptSet,
    generation: GenerationSettings,
) -> tuple[TreePolicy, Tuned | None]:
    """Return the tree of the settings, and the measurements that chose it, if there are any."""
    if (tree := fixed_policy(settings.tree, head.depth)) is not None:
        return tree, None
    return choose_tree(
        base,
        head,
        settings.data,
        generation,
        prompts,
        prompt_tokens=settings.evaluation.prompt_tokens,
        num_prompts=settings.evaluation.num_prompts,
    )
