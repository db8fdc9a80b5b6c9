"""Train a head through every phase of a recipe, into a run directory."""

from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from specheads.base import lora
from specheads.base.model import FrozenBase
from specheads.config import Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import sole_writer
from specheads.data.sources import refuse_unreadable
from specheads.heads.load import build_for, configure, load_head, resume_head
from specheads.measure.evaluation import check, refuse_unusable
from specheads.measure.quality import quality_windows
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker, refuse_missing
from specheads.training import trainer
from specheads.training.distill.run import refuse_sharded
from specheads.training.feature_cache import FeatureCache, feature_cache
from specheads.training.processes import (
    accelerator_of_environment,
    load_base,
    naming_lost,
    on_all_processes,
    readers,
)
from specheads.training.schedule import adapter_settings, refuse_misfit
from specheads.training.texts import PhaseTexts
from specheads.training.validation import HeldOut

Announce = Callable[[str], None]
"""Prints one line of progress."""


def quiet(line: str) -> None:
    """Announce nothing."""
    del line


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of training."""

    run: RunDirectory
    head: Head
    base: FrozenBase
    """The base as loaded, without a trained adapter."""
    is_main: bool
    """Whether this process writes files and prints."""


@naming_lost()
def run(
    settings: Train, config_text: str, base: FrozenBase | None = None, announce: Announce = quiet
) -> Trained:
    """Run every phase; resume an unfinished run of the same name.

    Settings that would fail later raise before anything is written. `config_text` is the settings
    as YAML. `base` is the base of the settings, if it is already loaded.
    """
    accelerator = accelerator_of_environment(settings.base.dtype)
    made = RunDirectory(Path(settings.run_dir))
    depth = _refuse_unusable(settings)
    if base is None:
        base = load_base(asdict(settings.base), accelerator)
    _refuse_unfit(settings, base, depth, readers(base.sharding, accelerator)["world_size"])
    _refuse_sharded(settings, base, made.text)
    texts = PhaseTexts(settings, base, made, accelerator, announce)
    torch.manual_seed(settings.seed)
    is_main = accelerator.is_main_process
    identity: dict[str, Any] = {"base_fingerprint": texts.fingerprint}
    with ExitStack() as held:

        @cache
        def lock() -> None:
            held.enter_context(sole_writer(made.path))

        def begin() -> None:
            # one lock covers all processes of the run
            if is_main:
                lock()
                made.begin(config_text, identity)

        head, counts = _start(settings, base, texts, lambda: on_all_processes(begin))
        texts.head = head
        features = feature_cache(settings, base, head.aux_layers, announce)
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
        _train(settings, base, head, texts, features, accelerator, held_out)
        if is_main:
            if settings.validation.keep == "best":
                made.take_best(head)
            made.end(head)
    return Trained(made, head, base, is_main)


def _start(
    settings: Train, base: FrozenBase, texts: PhaseTexts, begin: Callable[[], object]
) -> tuple[Head, Tensor | None]:
    """Return the initial head, and token counts if it has a reduced draft vocabulary."""
    if settings.init:
        head = resume_head(settings.init, base, settings.head["kind"])
        return head, None if head.draft_ids is None else texts.count_tokens(begin)
    counts = texts.count_tokens(begin) if settings.head.get("draft_tokens") else None
    return build_for(settings.head, base, counts), counts


def _train(
    settings: Train,
    base: FrozenBase,
    head: Head,
    texts: PhaseTexts,
    features: FeatureCache | None,
    accelerator: Accelerator,
    held_out: HeldOut | None,
) -> None:
    run, tracker = texts.run, None
    if accelerator.is_main_process:
        chosen = asdict(settings.tracker) | {"name": settings.name}
        tracker = Tracker(run.metrics, **chosen, tell=texts.announce)
    with closing(tracker) if tracker else nullcontext():
        trainer.train(
            base,
            head,
            settings.schedule,
            texts.open,
            run,
            tracker,
            accelerator,
            seed=settings.seed,
            log_every=settings.log_every,
            checkpoint_every=settings.checkpoint_every,
            held_out=held_out,
            cache=features,
        )


def _refuse_unusable(settings: Train) -> int:
    """Check settings that do not need the loaded base; return the depth of the head."""
    depth: int = configure(settings.head).depth
    if settings.init:
        depth = load_head(settings.init).depth
    refuse_missing(settings.tracker.kind)
    refuse_unreadable(settings.data)
    if settings.evaluate_after:
        refuse_unusable(settings, depth)
    return depth


def _refuse_sharded(settings: Train, base: FrozenBase, text: Path) -> None:
    """Raise for settings that a sharded base does not support."""
    if base.sharding is None:
        return
    if settings.feature_cache.gib:
        raise InputError(
            "a sharded base needs all its processes for each batch, but with a feature cache each "
            "process reads other batches; set feature_cache.gib=0, or use "
            "configs/accelerate/ddp_8gpu.yaml"
        )
    if adapter_settings(settings.schedule):
        raise InputError(
            "joint training needs the whole base in each process, but accelerate is configured to "
            "shard it; use configs/accelerate/ddp_8gpu.yaml, or remove joint"
        )
    for phase in settings.schedule.phases.values():
        if phase.distill:
            refuse_sharded(base, phase.distill, Path(phase.distill.folder or text))


def _refuse_unfit(settings: Train, base: FrozenBase, depth: int, processes: int) -> None:
    """Raise for settings that do not fit the base, before anything is written."""
    if base.tokenizer is None:
        raise InputError(f"training needs a tokenizer, but the base {base.name} has none; add one")
    if len(base.tokenizer) > base.vocab_size:
        raise InputError(
            f"the tokenizer must belong to the base: it has {len(base.tokenizer)} tokens, the base "
            f"{base.vocab_size}; use the tokenizer that the base was trained with"
        )
    for name, phase in settings.schedule.phases.items():
        refuse_misfit(name, phase, base.max_length, depth, processes)
    if joint := adapter_settings(settings.schedule):
        lora.targets(base.model, joint.target_modules)
        if settings.evaluate_after:
            quality_windows(settings, base)
    if settings.evaluate_after:
        check(settings, base, depth)
