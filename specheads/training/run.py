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
    readers,
    together,
)
from specheads.training.schedule import adapter_settings, refuse_misfit
from specheads.training.texts import Texts
from specheads.training.validation import HeldOut

Announce = Callable[[str], None]
"""Takes a line for people."""


def quiet(line: str) -> None:
    """Announce nothing."""
    del line


@dataclass(frozen=True, slots=True)
class Trained:
    """What training leaves."""

    run: RunDirectory
    head: Head
    base: FrozenBase
    """As it was loaded, without the adapter that may have been trained."""
    is_main: bool
    """Whether this process, of several, is the one that writes and announces."""


@naming_lost()
def run(
    settings: Train, config_text: str, base: FrozenBase | None = None, announce: Announce = quiet
) -> Trained:
    """Run every phase; an unfinished run of the same name goes on where it stopped.

    Settings that could only fail later are refused at once. `config_text` is the same settings as
    YAML; `base` is what they name, where it is loaded already.
    """
    accelerator = accelerator_of_environment(settings.base.dtype)
    made = RunDirectory(Path(settings.run_dir))
    depth = _refuse_unusable(settings)
    if base is None:
        base = load_base(settings.base, accelerator)
    _refuse_unfit(settings, base, depth, readers(base.sharding, accelerator)["world_size"])
    _refuse_sharded(settings, base, made.text)
    texts = Texts(settings, base, made, accelerator, announce)
    torch.manual_seed(settings.seed)
    is_main = accelerator.is_main_process
    identity: dict[str, Any] = {"base_fingerprint": texts.fingerprint}
    with ExitStack() as held:

        @cache
        def lock() -> None:
            held.enter_context(sole_writer(made.path))

        def begin() -> None:
            # the others belong to the one that holds the lock
            if is_main:
                lock()
                made.begin(config_text, identity)

        head, counts = _start(settings, base, texts, lambda: together(begin))
        texts.head = head
        features = feature_cache(settings, base, head.aux_layers, announce)
        held_out = texts.held_out(settings.validation)
        if is_main:
            if counts is not None:
                share = head.coverage(counts)
                identity["draft_vocabulary"] = {"size": head.drafted_size, "coverage": share}
                announce(f"{head.drafted_size} draft tokens cover {share:.1%} of the text")
            # a launcher may start fewer than it was asked for, and say nothing
            number = accelerator.num_processes
            announce(f"training with {number} process{'es' if number > 1 else ''}")
        together(begin)
        _train(settings, base, head, texts, features, accelerator, held_out)
        if is_main:
            if settings.validation.keep == "best":
                made.take_best(head)
            made.end(head)
    return Trained(made, head, base, is_main)


def _start(
    settings: Train, base: FrozenBase, texts: Texts, begin: Callable[[], object]
) -> tuple[Head, Tensor | None]:
    """Return the head training begins with, and token counts where it drafts only some tokens."""
    if settings.init:
        head = resume_head(settings.init, base, settings.head["kind"])
        return head, None if head.draft_ids is None else texts.count_tokens(begin)
    counts = texts.count_tokens(begin) if settings.head.get("draft_tokens") else None
    return build_for(settings.head, base, counts), counts


def _train(
    settings: Train,
    base: FrozenBase,
    head: Head,
    texts: Texts,
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
    """Refuse what is wrong whatever the base is, before it is loaded; return the head's depth."""
    depth: int = configure(settings.head).depth
    if settings.init:
        # that head's own settings count
        depth = load_head(settings.init).depth
    refuse_missing(settings.tracker.kind)
    refuse_unreadable(settings.data)
    if settings.evaluate_after:
        refuse_unusable(settings, depth)
    return depth


def _refuse_sharded(settings: Train, base: FrozenBase, text: Path) -> None:
    """Refuse what processes that share a base would not do at the same time, or could not."""
    if base.sharding is None:
        return
    if settings.feature_cache.gib:
        raise InputError(
            "a sharded base reads with all its processes at once, and a feature cache has each "
            "read what it lacks; set feature_cache.gib=0, or use configs/accelerate/ddp_8gpu.yaml"
        )
    if adapter_settings(settings.schedule):
        raise InputError(
            "a base that learns must be whole in each process, and accelerate is configured to "
            "shard it; use configs/accelerate/ddp_8gpu.yaml, or leave joint out"
        )
    for phase in settings.schedule.phases.values():
        if phase.distill:
            refuse_sharded(base, phase.distill, Path(phase.distill.folder or text))


def _refuse_unfit(settings: Train, base: FrozenBase, depth: int, processes: int) -> None:
    """Refuse settings that do not fit the base, before anything is written."""
    if base.tokenizer is None:
        raise InputError(f"training reads text: the base {base.name} needs a tokenizer")
    if len(base.tokenizer) > base.vocab_size:
        raise InputError(
            f"the tokenizer must be the base's own: it has {len(base.tokenizer)} tokens, the base "
            f"{base.vocab_size}; load the tokenizer the base was trained with"
        )
    for name, phase in settings.schedule.phases.items():
        refuse_misfit(name, phase, base.max_length, depth, processes)
    if joint := adapter_settings(settings.schedule):
        lora.targets(base.model, joint.target_modules)
        if settings.evaluate_after:
            quality_windows(settings, base)
    if settings.evaluate_after:
        check(settings, base, depth)
