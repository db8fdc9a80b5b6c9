"""Train a head through every phase of a recipe, then evaluate it.

specheads train recipe=smollm2
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl preview=3
specheads train recipe=conversations base.model=MODEL data.path=talks.jsonl dry_run=true
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console

from specheads.base import lora
from specheads.base.model import FrozenBase
from specheads.commands import _dry_run
from specheads.commands._call import checked_settings
from specheads.commands.evaluate import (
    context_prompts,
    evaluate,
    evaluation_prompts,
    shortage_note,
)
from specheads.config import compose
from specheads.config.commands import Evaluate, Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import dumps, sole_writer, write_atomic
from specheads.data.sources import refuse_unreadable
from specheads.decoding.trees.tuned import FILE
from specheads.export import card
from specheads.heads.load import build_for_base, configure, load_head, resume_head
from specheads.measure.quality import quality_windows
from specheads.measure.results import Results, read_results
from specheads.measure.summary import print_results
from specheads.runs.config_file import read_settings
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import stage_announcer
from specheads.runs.trackers import Tracker, refuse_missing
from specheads.training import trainer
from specheads.training.distill.run import refuse_not_decoding
from specheads.training.features import FeatureSource, LocalBase, feature_cache
from specheads.training.phase_data import PhaseData
from specheads.training.plan import auto_phases, largest_batch_sizes
from specheads.training.processes import (
    accelerator_of_environment,
    explain_lost_process,
    leave_process_group,
    load_base,
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
    made = train(settings=settings, announce=Console(markup=False).print)
    results = read_results(Results, made.report / "results.json")
    if settings.evaluate_after and results and PartialState().is_main_process:
        print_results(results, page=made.report / "report.html")
        sys.stdout.write(shortage_note(results.prompts, settings))
        sys.stdout.write(f"next: specheads tune run={made.path}, specheads chat run={made.path}\n")
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
    made = RunDirectory(Path(settings.run_dir))
    accelerator = accelerator_of_environment(settings.base.dtype)
    _settle_batches(settings, made, accelerator, announce)
    begin = stage_announcer(_stages(settings), settings.minutes)
    with explain_lost_process():
        head, base = _train(settings, made, accelerator, base, announce, begin)
    if not accelerator.is_main_process:
        return made
    card.write_card(made, asdict(settings), head, base)
    announce(f"head: {made.head}")
    if made.adapter.is_dir():
        announce(f"adapter of the base: {made.adapter}")
    if settings.evaluate_after and not base.decodes:
        announce(
            f"{base.where} cannot decode in one process: measure with specheads evaluate "
            f"run={made.path}"
        )
    elif settings.evaluate_after:
        announce(begin("evaluation"))
        evaluated = Evaluate(
            run=str(made.path),
            seed=settings.seed,
            base=settings.base,
            data=settings.data,
            tree=settings.tree,
            evaluation=settings.evaluation,
        )
        results = evaluate(settings=evaluated, base=base)
        # keep the tree that was chosen for greedy decoding, as specheads tune does
        if results.tuned and settings.evaluation.temperature == 0:
            write_atomic(made.head / FILE, dumps(results.tuned))
    return made


def _stages(settings: Train) -> list[str]:
    """Return the names of the stages of a training, in their order."""
    names = []
    for name, phase in settings.schedule.phases.items():
        names += [f"text of {name}", name] if phase.distill else [name]
    # a base at a server is not evaluated here
    evaluates = settings.evaluate_after and settings.features.source != "vllm"
    return [*names, "evaluation"] if evaluates else names


def _train(
    settings: Train,
    made: RunDirectory,
    accelerator: Accelerator,
    base: FrozenBase | None,
    announce: Announce,
    stage: Callable[[str], str],
) -> tuple[Head, FrozenBase]:
    """Run every phase; return the head, and the base as loaded, without a trained adapter.

    Settings that would fail later raise before anything is written; see `stage_announcer`.
    """
    is_main, seed = accelerator.is_main_process, settings.seed
    base = _checked_base(settings, made, accelerator, base)
    phases, data = settings.schedule.phases, settings.data
    texts = PhaseData(phases, data, base, made.text, accelerator, announce, seed, stage)
    torch.manual_seed(seed)
    identity = texts.identity()
    with ExitStack() as held:

        @cache
        def lock() -> None:
            held.enter_context(sole_writer(made.path))

        def begin() -> None:
            # one lock covers all processes of the run
            if is_main:
                lock()
                made.begin(compose.as_yaml(settings), identity)

        head, is_reduced = None, bool(settings.head.get("draft_tokens"))
        if settings.init:
            head = resume_head(settings.init, base, settings.head["kind"])
            is_reduced = head.draft_ids is not None
        counts = texts.count_tokens(lambda: on_all_processes(begin)) if is_reduced else None
        if head is None:
            head = build_for_base(settings.head, base, counts)
        texts.head = head
        source = _source(settings, base, head, announce, held)
        held_out = texts.held_out(settings.validation)
        if is_main:
            if counts is not None:
                share = head.coverage(counts)
                identity["draft_vocabulary"] = {"size": head.drafted_size, "coverage": share}
                announce(f"{head.drafted_size} draft tokens cover {share:.1%} of the text")
            # a launcher may start fewer processes than requested without a message
            number = accelerator.num_processes
            announce(f"training with {number} process{'es' if number > 1 else ''}")
        on_all_processes(begin)
        source.begin(made, accelerator.process_index)
        chosen = asdict(settings.tracker) | {"name": settings.name, "tell": announce}
        tracker = Tracker(made.metrics, **chosen) if is_main else None
        held.enter_context(closing(tracker) if tracker else nullcontext())
        trainer.train(
            base,
            head,
            settings.schedule,
            texts.open,
            made,
            tracker,
            accelerator,
            seed=seed,
            log_every=settings.log_every,
            checkpoint_every=settings.checkpoint_every,
            held_out=held_out,
            source=source,
        )
        if is_main:
            if settings.validation.keep == "best":
                made.take_best(head)
            made.end(head)
    return head, base


def _source(
    settings: Train, base: FrozenBase, head: Head, announce: Announce, held: ExitStack
) -> FeatureSource:
    """Return the source of features; servers are checked, and closed with `held`."""
    phases, data = settings.schedule.phases, settings.data
    if settings.features.source == "vllm":
        # loads the client of servers
        from specheads.training.feature_server import VllmServer

        longest = longest_row(settings.schedule, data, base.max_length)
        server = VllmServer(settings.features, base, head, longest, announce)
        return held.enter_context(closing(server))
    if settings.features.source == "cache":
        num_rows = settings.validation.rows
        return feature_cache(
            settings.features, phases, data, num_rows, base, head.aux_layers, announce
        )
    return LocalBase(base, head.aux_layers)


def _settle_batches(
    settings: Train, made: RunDirectory, accelerator: Accelerator, announce: Announce
) -> None:
    """Replace every `batch_size=auto` by a number.

    The number is that of the run that resumes, or of the largest batch that fits.
    """
    names, phases = auto_phases(settings.schedule), settings.schedule.phases
    run = read_settings(made.config) if made.config.is_file() else {}
    before = run.get("schedule", {}).get("phases", {})
    sizes = {name: before.get(name, {}).get("batch_size") for name in names}
    if not all(isinstance(size, int) for size in sizes.values()):
        sizes = largest_batch_sizes(_dry_run.setup_of(settings), accelerator)
    for name, size in sizes.items():
        phases[name].batch_size = size
        if accelerator.is_main_process:
            announce(f"phase {name!r}: batch_size=auto is {size}")


def _checked_base(
    settings: Train, made: RunDirectory, accelerator: Accelerator, base: FrozenBase | None
) -> FrozenBase:
    """Return the base; raise for settings that cannot be used, before anything is written."""
    depth: int = (load_head(settings.init) if settings.init else configure(settings.head)).depth
    refuse_missing(settings.tracker.kind)
    refuse_unreadable(settings.data)
    base = base or load_base(
        settings.base, accelerator, ends_only=settings.features.source == "vllm"
    )
    processes = row_share(base.sharding, accelerator).world_size
    if base.tokenizer is None or len(base.tokenizer) > base.vocab_size:
        got = "no tokenizer" if base.tokenizer is None else f"{len(base.tokenizer)} tokens"
        raise InputError(
            "training needs the tokenizer that the base was trained with, and its vocabulary of "
            f"{base.vocab_size} tokens, got {got} in {base.name}; add its files, such as "
            "tokenizer.json"
        )
    joint, phases = adapter_settings(settings.schedule), settings.schedule.phases
    for name, phase in phases.items():
        refuse_misfit(name, phase, base.max_length, depth, processes)
        if phase.distill:
            refuse_not_decoding(base, phase.distill, Path(phase.distill.folder or made.text))
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
