"""Train a head through every phase of a recipe, into a run directory."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from rich.progress import Progress
from torch import Tensor

from specheads.base import lora
from specheads.base.model import FrozenBase
from specheads.config import Distill, Phase, Train
from specheads.core.drafter import Head
from specheads.data.corpora import load_corpus
from specheads.data.distill import DistilledText, write_shards
from specheads.data.fingerprint import text_identity
from specheads.data.packing import PackedText, Text
from specheads.decoding.acceptance.sampling import Sampling
from specheads.decoding.generate import generate
from specheads.heads.load import build_for, configure, resume_head
from specheads.measure.evaluation import check
from specheads.measure.quality import quality_windows
from specheads.runs import trackers
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker
from specheads.training import trainer
from specheads.training.schedule import adapter_settings, check_names, check_phase

COUNTED_TOKENS = 2**19
"""Tokens of the corpus that a reduced draft vocabulary is counted on."""

COUNTED_LENGTH = 512

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
    """With the adapter, where one was trained."""
    is_main: bool
    """Whether this process, of several, is the one that writes and announces."""


def run(
    settings: Train, config_text: str, base: FrozenBase | None = None, announce: Announce = quiet
) -> Trained:
    """Run every phase; an unfinished run of the same name goes on where it stopped.

    Args:
        settings: What is trained, on which text, how long.
        config_text: The same as YAML, for config.yaml.
        base: The one that the settings name, where it is loaded already.
        announce: Takes lines for people, of the main process.

    Raises:
        ValueError: The run is finished already, or the settings could only fail later.
    """
    accelerator = Accelerator(
        # unasked, accelerate joins processes on GPUs only: two on CPUs would each train alone
        cpu=not torch.accelerator.is_available(),
        mixed_precision="bf16" if _has_bf16() else "no",
        # what a head borrows from the base is a buffer, the same everywhere already
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    made = RunDirectory(Path(settings.run_dir))
    base = base or _load(settings, accelerator)
    _refuse_unusable(settings, base)
    texts = _Texts(settings, base, made, accelerator)
    texts.refuse_too_short()
    torch.manual_seed(settings.seed)
    head, counts = _start(settings, base, texts)
    identity: dict[str, Any] = {"base_fingerprint": base.fingerprint}
    if counts is not None:
        share = head.coverage(counts)
        identity["draft_vocabulary"] = {"size": head.drafted_size, "coverage": share}
        if accelerator.is_main_process:
            announce(f"{head.drafted_size} draft tokens cover {share:.1%} of the corpus")
    if accelerator.is_main_process:
        # a launcher may start fewer than it was asked for, and say nothing
        number = accelerator.num_processes
        announce(f"training with {number} process{'es' if number > 1 else ''}")
        made.begin(config_text, identity)
    accelerator.wait_for_everyone()
    _train(settings, base, head, texts, made, accelerator)
    if accelerator.is_main_process:
        made.end(head)
    return Trained(made, head, base, accelerator.is_main_process)


def _load(settings: Train, accelerator: Accelerator) -> FrozenBase:
    choices = asdict(settings.base)
    if choices["device"] == "auto":
        choices["device"] = str(accelerator.device)
    return FrozenBase.load(**choices)


def _start(settings: Train, base: FrozenBase, texts: "_Texts") -> tuple[Head, Tensor | None]:
    """Return the head training begins with, and token counts where it drafts only some tokens."""
    if settings.init:
        head = resume_head(settings.init, base, settings.head["kind"])
        return head, None if head.draft_ids is None else texts.count_tokens()
    counts = texts.count_tokens() if settings.head.get("draft_tokens") else None
    return build_for(settings.head, base, counts), counts


def _train(
    settings: Train,
    base: FrozenBase,
    head: Head,
    texts: "_Texts",
    run: RunDirectory,
    accelerator: Accelerator,
) -> None:
    tracker = None
    if accelerator.is_main_process:
        tracker = Tracker(
            run.metrics,
            kind=settings.tracker.kind,
            project=settings.tracker.project,
            name=settings.name,
            resumed_step=trainer.last_step(run),
        )
    try:
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
        )
    finally:
        if tracker is not None:
            tracker.close()


class _Texts:
    """Gives each phase its text: the corpus, or what the base writes when the phase begins."""

    def __init__(
        self, settings: Train, base: FrozenBase, run: RunDirectory, accelerator: Accelerator
    ) -> None:
        self.settings, self.base, self.run, self.accelerator = settings, base, run, accelerator
        # of the weights alone: while an adapter is trained, the model has more of them
        self.fingerprint = base.fingerprint
        self.documents = load_corpus(settings.data, "train", settings.seed)

    def corpus(self, sequence_length: int, batch_size: int) -> PackedText:
        assert self.base.tokenizer is not None
        return PackedText(
            self.documents,
            self.base.tokenizer,
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=self.settings.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )

    def refuse_too_short(self) -> None:
        """Open every phase's corpus once, before anything is written."""
        for phase in self.settings.schedule.phases.values():
            if phase.distill is not None:
                self.prompts(phase.distill)
            else:
                self.corpus(phase.sequence_length, phase.batch_size)

    def count_tokens(self) -> Tensor:
        """Return how often each token of the vocabulary stands in the corpus's beginning."""
        assert self.base.tokenizer is not None
        # every process counts the same text, so that all agree
        rows = PackedText(
            self.documents,
            self.base.tokenizer,
            sequence_length=COUNTED_LENGTH,
            batch_size=1,
            seed=self.settings.seed,
        )
        batches = islice(rows.batches(), COUNTED_TOKENS // COUNTED_LENGTH)
        text = torch.cat([batch.tokens.flatten() for batch, _ in batches])
        return torch.bincount(text, minlength=self.base.vocab_size)

    def prompts(self, settings: Distill) -> PackedText:
        """Return corpus rows whose beginnings the base continues."""
        return self.corpus(settings.prompt_tokens + settings.new_tokens, settings.batch_size)

    def open(self, phase: Phase, bar: Progress) -> Text:
        """Return the phase's text, writing it first where the base is its author."""
        if phase.distill is None:
            return self.corpus(phase.sequence_length, phase.batch_size)
        self.write(phase.distill, bar)
        self.accelerator.wait_for_everyone()
        return DistilledText(
            self.folder(phase.distill),
            phase.batch_size,
            (self.base.eos_ids or (0,))[0],
            sequence_length=phase.sequence_length,
            seed=self.settings.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )

    def folder(self, settings: Distill) -> Path:
        """Return where the text that the base writes is kept."""
        return Path(settings.folder) if settings.folder else self.run.text

    def write(self, settings: Distill, bar: Progress) -> None:
        """Have the base write what the run's text/ does not hold yet."""
        base = self.base
        assert base.tokenizer is not None
        processes = self.accelerator.num_processes
        identity = text_identity(
            self.fingerprint, base.tokenizer, self.settings.data, self.documents, processes
        )

        def write(prompts: list[list[int]], seed: int) -> list[list[int]]:
            return generate(
                base,
                None,
                prompts,
                max_new_tokens=settings.new_tokens,
                sampling=Sampling(
                    temperature=settings.temperature, top_k=settings.top_k, seed=seed
                ),
            ).tokens

        task = bar.add_task("text by the base", total=settings.num_samples, numbers="")
        shards = write_shards(
            self.folder(settings),
            self.prompts(settings),
            write,
            settings,
            identity,
            seed=self.settings.seed,
            rank=self.accelerator.process_index,
            world_size=processes,
        )
        for done in shards:
            bar.update(task, completed=done)


def _refuse_unusable(settings: Train, base: FrozenBase) -> None:
    """Refuse settings that could only fail later, before anything is written."""
    head_depth = configure(settings.head).depth
    if base.tokenizer is None:
        raise ValueError(f"training reads text: the base {base.name} needs a tokenizer")
    if len(base.tokenizer) > base.vocab_size:
        raise ValueError(
            f"the tokenizer must be the base's own: it has {len(base.tokenizer)} tokens, the base "
            f"{base.vocab_size}; load the tokenizer the base was trained with"
        )
    check_names(settings.schedule.phases)
    for name, phase in settings.schedule.phases.items():
        check_phase(name, phase, base.max_length, head_depth)
    if joint := adapter_settings(settings.schedule):
        lora.targets(base.model, joint.target_modules)
        if settings.evaluate_after:
            quality_windows(settings, base)
    trackers.check_kind(settings.tracker.kind)
    if settings.evaluate_after:
        check(settings, base, head_depth)


def _has_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    # emulated bfloat16 is slower than float32; what counts is the instruction set
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
