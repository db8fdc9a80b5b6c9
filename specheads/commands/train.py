"""Train a head through every phase of a recipe, then evaluate it.

specheads train recipe=smollm2
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl preview=3
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl dry_run=true
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console
from torch import Tensor

from specheads.base import lora
from specheads.base.ends import BaseEnds, ServedBase
from specheads.base.model import FrozenBase
from specheads.commands import _dry_run
from specheads.commands._call import checked_settings
from specheads.commands.evaluate import context_prompts, evaluate, evaluation_prompts, shortage_note
from specheads.config import compose
from specheads.config.commands import Evaluate, Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import dumps, sole_writer, write_atomic
from specheads.data.remote import local_copy
from specheads.data.sources import refuse_unreadable
from specheads.decoding.trees.tuned import FILE
from specheads.export import card
from specheads.heads.load import build_for_base, configure, load_head, resume_head
from specheads.measure.evaluation import quality_windows
from specheads.measure.results import Results, read_results
from specheads.measure.summary import print_results
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker, refuse_missing
from specheads.training import trainer
from specheads.training.batch_sizes import resolve_batch_sizes
from specheads.training.distill.run import refuse_not_decoding
from specheads.training.features import FeatureSource, LocalBase, feature_cache
from specheads.training.phase_data import PhaseData, missing_text
from specheads.training.processes import (
    accelerator_of_environment,
    explain_lost_process,
    leave_process_group,
    load_base,
    load_served_base,
    load_text_base,
    on_all_processes,
    row_share,
)
from specheads.training.schedule import adapter_settings, longest_row, refuse_misfit

Announce = Callable[[str], None]
"""Prints one line of progress."""


def run(settings: Train) -> None:
    """Train a recipe; an unfinished run of the same name resumes."""
    if settings.dry_run:
        _dry_run.show_plan(settings)
        return
    if settings.preview:
        if not settings.init:
            configure(settings.head)
        _dry_run.show_examples(settings)
        return
    run_directory = train(settings=settings, announce=Console(markup=False).print)
    results = read_results(Results, run_directory.report / "results.json")
    if settings.evaluate_after and results and PartialState().is_main_process:
        print_results(results, page=run_directory.report / "report.html")
        sys.stdout.write(shortage_note(results.prompts, settings))
        run_name = f"run={run_directory.path}"
        sys.stdout.write(f"next: specheads tune {run_name}, specheads chat {run_name}\n")
    leave_process_group()


def train(
    recipe: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: Train | None = None,
    base: FrozenBase | None = None,
    announce: Announce = lambda _: None,
) -> RunDirectory:
    """Train a head through every phase of a recipe, evaluate it, and return the run.

    `overrides` are like `["name=mine", "head=medusa"]`; `announce` is called with lines for people.
    """
    settings = settings or checked_settings(Train, overrides, recipe=recipe)
    run_directory = RunDirectory(Path(settings.run_dir))
    accelerator = accelerator_of_environment(settings.base.dtype)
    resolve_batch_sizes(settings, accelerator, announce)
    stages = _stage_names(settings)

    def begin_stage(name: str) -> str:
        return f"stage {stages.index(name) + 1} of {len(stages)}: {name}"

    with explain_lost_process():
        head, teacher = _train(settings, run_directory, accelerator, base, announce, begin_stage)
    if not accelerator.is_main_process:
        return run_directory
    card.write_card(run_directory, asdict(settings), head, teacher)
    announce(f"head: {run_directory.head}")
    if run_directory.adapter.is_dir():
        announce(f"adapter of the base: {run_directory.adapter}")
    if not settings.evaluate_after:
        return run_directory
    if isinstance(teacher, FrozenBase) and teacher.decodes:
        announce(begin_stage("evaluation"))
        names = "seed", "base", "data", "tree", "evaluation"
        own_settings = {name: getattr(settings, name) for name in names}
        evaluation = Evaluate(run=str(run_directory.path), **own_settings)
        results = evaluate(settings=evaluation, base=teacher)
        # keep the tree that was chosen for greedy decoding, as specheads tune does
        if results.tuned and settings.evaluation.temperature == 0:
            write_atomic(run_directory.head / FILE, dumps(results.tuned))
    else:
        announce(
            f"{teacher.description} cannot decode in one process: measure with specheads evaluate "
            f"run={run_directory.path}"
        )
    return run_directory


def _stage_names(settings: Train) -> list[str]:
    """Return the names of the stages of a training, in their order."""
    names = []
    for name, phase in settings.schedule.phases.items():
        names += [f"text of {name}", name] if phase.distill else [name]
    # a base at a server is not evaluated here
    evaluates = settings.evaluate_after and settings.features.source != "vllm"
    return [*names, "evaluation"] if evaluates else names


def _train(
    settings: Train,
    run_directory: RunDirectory,
    accelerator: Accelerator,
    loaded_base: FrozenBase | None,
    announce: Announce,
    begin_stage: Callable[[str], str],
) -> tuple[Head, BaseEnds]:
    """Run every phase; return the head, and the base as loaded, without a trained adapter.

    A finished run whose evaluation is missing keeps its head. Settings that would fail later raise
    before anything is written. `begin_stage` begins a stage by its name and returns a line for
    people.
    """
    is_main, seed = accelerator.is_main_process, settings.seed
    phases, data = settings.schedule.phases, settings.data

    def load(*, text: bool) -> tuple[BaseEnds, PhaseData]:
        base = _load_checked_base(settings, run_directory, accelerator, loaded_base, text=text)
        return base, PhaseData(
            phases, data, base, run_directory.text, accelerator, announce, seed, begin_stage
        )

    # vLLM needs the GPU's memory before this process's own base takes it
    text_first = loaded_base is None and "vllm" in missing_text(phases, run_directory.text)
    base, phase_data = load(text=text_first)
    torch.manual_seed(seed)
    identity = phase_data.identity()
    with ExitStack() as resources:

        @cache
        def lock() -> None:
            resources.enter_context(sole_writer(run_directory.path))

        def open_run() -> None:
            # one lock covers all processes of the run
            if is_main:
                lock()
                evaluates = settings.evaluate_after and base.decodes
                run_directory.begin(compose.as_yaml(settings), identity, evaluates=evaluates)

        if text_first:
            on_all_processes(open_run)
            stages = phase_data.write_text("vllm")
            base, phase_data = load(text=False)
            phase_data.stages = stages
        head, counts = _make_head(settings, base, phase_data, lambda: on_all_processes(open_run))
        phase_data.head = head
        source = resources.enter_context(closing(_feature_source(settings, base, head, announce)))
        validation_set = phase_data.validation_set(settings.validation)
        if is_main:
            identity |= _draft_vocabulary(head, counts, announce)
        on_all_processes(open_run)
        if run_directory.finished:
            # only its evaluation is missing
            head.load_state_dict(load_head(run_directory.head).state_dict())
            return head, base
        source.begin(run_directory, accelerator.process_index)
        tracker = None
        if is_main:
            path, name, run_id = run_directory.metrics, settings.name, run_directory.run_id
            tracker = Tracker(path, settings.tracker, name, run_id, announce)
            resources.enter_context(closing(tracker))
            # a launcher may start fewer processes than requested without a message
            num_processes = accelerator.num_processes
            announce(f"training with {num_processes} process{'es' if num_processes > 1 else ''}")
        trainer.train(
            base,
            head,
            settings.schedule,
            phase_data.open_phase,
            run_directory,
            tracker,
            accelerator,
            seed=seed,
            log_every=settings.log_every,
            checkpoint_every=settings.checkpoint_every,
            held_out=validation_set,
            source=source,
        )
        if is_main:
            run_directory.end(head, is_best=settings.validation.keep == "best")
    return head, base


def _make_head(
    settings: Train, base: BaseEnds, phase_data: PhaseData, open_run: Callable[[], object]
) -> tuple[Head, Tensor | None]:
    """Return a new head or that of `init`, and the token counts that a draft vocabulary needs."""
    head = resume_head(settings.init, base, settings.head["kind"]) if settings.init else None
    is_reduced = head.draft_ids is not None if head else settings.head.get("draft_tokens")
    counts = phase_data.count_tokens(open_run) if is_reduced else None
    return build_for_base(settings.head, base, counts) if head is None else head, counts


def _draft_vocabulary(head: Head, counts: Tensor | None, announce: Announce) -> dict[str, Any]:
    """Return a fact on the draft vocabulary for the run's identity, if the text chose one."""
    if counts is None:
        return {}
    share = head.coverage(counts)
    announce(f"{head.drafted_size} draft tokens cover {share:.1%} of the text")
    return {"draft_vocabulary": {"size": head.drafted_size, "coverage": share}}


def _feature_source(
    settings: Train, base: BaseEnds, head: Head, announce: Announce
) -> FeatureSource:
    """Return the source of features; servers are checked."""
    if isinstance(base, ServedBase):
        # loads the client of servers
        from specheads.training.feature_server import VllmServer

        max_row_tokens = longest_row(settings.schedule, settings.data, base.max_length)
        return VllmServer(settings.features, base, head, max_row_tokens, announce)
    assert isinstance(base, FrozenBase)
    if settings.features.source == "cache":
        return feature_cache(settings, base, head.aux_layers, announce)
    return LocalBase(base, head.aux_layers)


def _load_checked_base(
    settings: Train,
    run_directory: RunDirectory,
    accelerator: Accelerator,
    loaded_base: FrozenBase | None,
    *,
    text: bool = False,
) -> BaseEnds:
    """Return the base; raise for settings that cannot be used, before anything is written.

    With `text` it is the base on the CPU, for text that another program generates.
    """
    depth: int = (load_head(settings.init) if settings.init else configure(settings.head)).depth
    refuse_missing(settings.tracker.kind)
    refuse_unreadable(settings.data)
    here = load_text_base if text else load_base
    load = load_served_base if settings.features.source == "vllm" else here
    base = loaded_base or load(settings.base, accelerator)
    num_shares = row_share(base.sharding, accelerator).world_size
    if base.tokenizer is None or len(base.tokenizer) > base.vocab_size:
        size = "no tokenizer" if base.tokenizer is None else f"{len(base.tokenizer)} tokens"
        raise InputError(
            "training needs the tokenizer that the base was trained with, and its vocabulary of "
            f"{base.vocab_size} tokens, got {size} in {base.name}; add its files, such as "
            "tokenizer.json"
        )
    joint, phases = adapter_settings(settings.schedule), settings.schedule.phases
    refuse_misfit(phases, base.max_length, depth, num_shares)
    for phase in phases.values():
        if phase.distill:
            refuse_not_decoding(
                base, phase.distill, local_copy(phase.distill.folder or run_directory.text)
            )
    if base.sharding and (joint or settings.features.source == "cache"):
        raise InputError(
            "joint training and features=cache need the whole base in each process, but "
            "accelerate is configured to shard it; use configs/accelerate/ddp_8gpu.yaml, or leave "
            "out joint and features=cache"
        )
    if joint:
        lora.targets(base.model, joint.target_modules)
    if settings.evaluate_after:
        if joint:
            quality_windows(base, settings.data, settings.seed)
        context_prompts(base, settings, evaluation_prompts(base, depth, settings))
    return base
