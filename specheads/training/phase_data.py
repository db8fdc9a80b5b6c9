"""Text of each phase: the corpus, or text that the base generates; and held-out text."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor

from specheads.base.ends import BaseEnds
from specheads.base.fingerprint import config_fingerprint
from specheads.config.data import DataSettings
from specheads.config.training import Phase, ValidationSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.encode import affix_ids
from specheads.data.packing import BatchStream, PackedText, TokenBatch, slice_evenly
from specheads.data.prompts import PromptSet, held_out_prompts
from specheads.data.remote import local_copy
from specheads.data.tokenise import TokenisedDocuments, UnansweredError, tokenise_corpus
from specheads.runs.progress import progress_display
from specheads.training.distill.run import TextJob, text_job, write_folder
from specheads.training.distill.shards import missing_blocks, read_text, refuse_other_text
from specheads.training.log import ValidationSet
from specheads.training.processes import row_share
from specheads.training.schedule import ScheduledPhase, row_tokens

SAMPLED_TOKENS = 2**19
"""Tokens of the corpus that select a reduced draft vocabulary."""


def missing_text(phases: dict[str, Phase], folder: Path) -> set[str]:
    """Return the engines of the phases whose text, in `folder` or their own, is not complete."""
    settings = [phase.distill for phase in phases.values() if phase.distill]
    return {
        text.engine
        for text in settings
        if missing_blocks(local_copy(text.folder or folder), text.shard_size, text.num_samples)
    }


class PhaseData:
    """Text of each phase: its corpus, packed, or text that the base generates; and held-out text.

    It packs every phase's corpus once at the start: a corpus that is too short raises before
    anything is written.

    `base` generates text, into `folder` unless a phase has its own. `announce` is called with lines
    for people. `begin_stage` begins a stage by its name and returns a line for people.
    """

    def __init__(
        self,
        phases: dict[str, Phase],
        data: DataSettings,
        base: BaseEnds,
        folder: Path,
        accelerator: Accelerator,
        announce: Callable[[str], None],
        seed: int,
        begin_stage: Callable[[str], str] = str,
    ) -> None:
        self.phases, self.data, self.base = phases, data, base
        self.tokenizer = base.tokenizer_for("training")
        self.accelerator, self.announce, self.seed = accelerator, announce, seed
        self.share = row_share(base.sharding, accelerator)
        self.head: Head | None = None
        """The trained head, which may draft while the base generates text."""
        self.begin_stage = begin_stage
        self.stages: set[str] = set()
        """Names of the stages that began."""
        # now: training adds an adapter to the model later
        self._jobs: dict[str, TextJob] = {}
        self._base_identity: dict[str, Any] = {
            "base_fingerprint": base.fingerprint,
            "base_config": config_fingerprint(base.model.config),
        }
        claims: dict[Path, dict[str, Any]] = {}
        for name, phase in phases.items():
            if phase.distill is None:
                self._pack(self.corpus, phase)
                continue
            text_folder = local_copy(phase.distill.folder or folder)
            job = text_job(data, base, phase.distill, text_folder, accelerator, seed)
            self._jobs[name], claim = job, job.claim()
            if claims.setdefault(text_folder, claim) != claim:
                raise InputError(
                    f"phases that share a text folder need equal settings, but {name!r} generates "
                    f"other text than a phase before it in {text_folder}; give it its own "
                    "distill.folder"
                )
            # now, and not after the phases before it
            refuse_other_text(text_folder, claim)

    def identity(self) -> dict[str, Any]:
        """Return facts of the base and the corpus that must be the same when a run resumes."""
        # it reads the whole corpus, and only one process stores it
        if not self._has_corpus_phase or not self.accelerator.is_main_process:
            return dict(self._base_identity)
        return self._base_identity | {"data": self.corpus.identity()}

    @property
    def _has_corpus_phase(self) -> bool:
        return len(self._jobs) < len(self.phases)

    @cached_property
    def corpus(self) -> TokenisedDocuments:
        """Training documents of the corpus phases."""
        return self._tokenise("train")

    def count_tokens(self, open_run: Callable[[], object]) -> Tensor:
        """Return how often each token of the vocabulary is a label in a sample of the text.

        Without a corpus phase the base generates the text of the first phase now; `open_run` opens
        the run directory for that.
        """
        if self._has_corpus_phase:
            documents = self.corpus
        else:
            open_run()
            with progress_display(shown=self.accelerator.is_main_process) as display:
                documents = self._generate(next(iter(self._jobs)), display, lambda: None)
        # every process counts the same text
        order = np.random.default_rng(self.seed).permutation(len(documents))
        num_sampled = np.searchsorted(np.cumsum(documents.lengths[order]), SAMPLED_TOKENS) + 1
        labels = [
            documents.tokens(number)[documents.loss_mask(number)]
            for number in order[: int(num_sampled)].tolist()
        ]
        return torch.from_numpy(np.bincount(np.concatenate(labels), minlength=self.base.vocab_size))

    def write_text(self, engine: str) -> set[str]:
        """Generate the text of all phases of an engine now; return the stages that began."""
        with progress_display(shown=self.accelerator.is_main_process) as display:
            for name, job in self._jobs.items():
                if job.settings.engine == engine:
                    self._generate(name, display, lambda: None)
        return self.stages

    # --- text of a phase -------------------------------------------------------------------------

    def open_phase(
        self, phase: ScheduledPhase, display: Progress, halt: Callable[[], None]
    ) -> BatchStream:
        """Return the phase's text; generate it first in a distilled phase.

        All processes call `halt` together; it raises to stop the generation.
        """
        if phase.settings.distill is None:
            documents = self.corpus
        else:
            documents = self._generate(phase.name, display, halt)
        text = self._pack(documents, phase.settings)
        self._show_stage(phase.name, display)
        self._show(f"packing: {text.summary}", display)
        return text

    def _generate(
        self, name: str, display: Progress, halt: Callable[[], None]
    ) -> TokenisedDocuments:
        """Return the text that the base generated for a phase; generate what is missing."""
        job = replace(self._jobs[name], head=self.head)
        self._show_stage(f"text of {name}", display)
        report = write_folder(job, display, halt)
        if report and (dropped := report["dropped"]):
            reasons = ", ".join(f"{fault}: {count:,}" for fault, count in dropped.items())
            share = f"{sum(dropped.values()):,} of {job.settings.num_samples:,}"
            self._show(
                f"{share} texts were dropped ({reasons}), see {job.folder}/report.md", display
            )
        return read_text(job.folder, job.settings.num_samples)

    def _pack(self, documents: TokenisedDocuments, settings: Phase) -> PackedText:
        return self._packed_text(
            documents if settings.answers_only else documents.without_loss_mask(),
            sequence_length=settings.sequence_length,
            batch_size=settings.batch_size,
            packing=settings.packing,
            rank=self.share.rank,
            world_size=self.share.world_size,
        )

    def _packed_text(self, documents: TokenisedDocuments, **layout: Any) -> PackedText:
        """Return documents as rows."""
        return PackedText(
            documents,
            padding_id=(self.base.eos_ids or (0,))[0],
            opening=affix_ids(self.tokenizer)[0],
            seed=self.seed,
            **layout,
        )

    def _tokenise(self, split: str) -> TokenisedDocuments:
        with progress_display(shown=self.accelerator.is_main_process, transient=True) as display:
            return tokenise_corpus(self.data, split, self.tokenizer, self.seed, bar=display)

    def _show_stage(self, name: str, display: Progress) -> None:
        """Begin a stage, once."""
        if name not in self.stages:
            self.stages.add(name)
            self._show(self.begin_stage(name), display)

    def _show(self, line: str, display: Progress | None = None) -> None:
        """Print a line for people, on the first process only; above the bars of a display."""
        if self.accelerator.is_main_process and display:
            display.console.print(line, markup=False, soft_wrap=True)
        elif self.accelerator.is_main_process:
            self.announce(line)

    # --- held-out text ---------------------------------------------------------------------------

    def validation_set(self, settings: ValidationSettings) -> ValidationSet | None:
        """Return this process's share of the validation split: rows for the loss, and prompts.

        If the split is too short for one of them, that one is skipped with a message.
        """
        batches, prompts, identity = None, None, ""
        if settings.keep == "best" and not self.base.decodes:
            raise InputError(
                f"validation.keep=best decodes prompts, which {self.base.description} cannot do "
                "here; set validation.keep=last"
            )
        if settings.rows:
            try:
                batches = self._validation_rows(settings.rows)
            except InputError as error:
                self._announce_missing("validation", error)
        if settings.prompts and not self.base.decodes:
            self._show(
                f"validation measures the loss, and no decoding with {self.base.description}; "
                "specheads evaluate measures the head after training"
            )
        elif settings.prompts:
            try:
                prompts, identity = self._validation_prompts(settings)
            except InputError as error:
                self._announce_missing("prompts to decode", error)
        if prompts is None and settings.keep == "best":
            raise InputError(
                "validation.keep=best needs prompts in the corpus's validation split, but it has "
                "none; lower validation.prompt_tokens, or set keep=last"
            )
        if batches is None and prompts is None:
            return None
        return ValidationSet(batches, settings.every, prompts, settings.new_tokens, identity)

    def _announce_missing(self, measurement: str, error: InputError) -> None:
        is_unanswered = isinstance(error, UnansweredError)
        reason = "the held-out text has questions without answers" if is_unanswered else error
        self._show(f"no {measurement}: {reason}")

    def _validation_rows(self, num_rows: int) -> list[TokenBatch]:
        """Return this process's share of the rows of held-out text, in batches.

        Rows are packed by best fit, with the sequence length of the first corpus phase, or else of
        the generated text.
        """
        phases = self.phases.values()
        phase = next((phase for phase in phases if phase.distill is None), next(iter(phases)))
        documents = self._tokenise("validation")
        max_length = row_tokens(phase, self.data, self.base.max_length)
        longest = int(documents.lengths.max(initial=1))
        length = phase.sequence_length or min(longest, max_length)
        text = self._packed_text(documents, sequence_length=length, batch_size=1)
        rank, world_size = self.share.rank, self.share.world_size
        rows = range(min(num_rows, text.rows_per_epoch))
        own_rows = slice_evenly(rows, rank, world_size)
        size = max(1, phase.batch_size // (world_size * phase.accumulation_steps))
        batches = [
            text.batch(own_rows[start : start + size]) for start in range(0, len(own_rows), size)
        ]
        # processes of a sharded base need equally many batches: add one without labels
        num_batches = math.ceil(math.ceil(len(rows) / world_size) / size)
        row = text.batch(rows[:1])
        unlabelled = replace(row, loss_mask=torch.zeros_like(row.loss_mask))
        return batches + [unlabelled] * (num_batches - len(batches))

    def _validation_prompts(self, settings: ValidationSettings) -> tuple[list[list[int]], str]:
        """Return this process's share of the held-out prompts, and the identity of all prompts."""
        prompts = held_out_prompts(
            self.data,
            "validation",
            self.tokenizer,
            settings.prompt_tokens,
            settings.prompts,
            self.seed,
        )
        max_tokens = self.base.max_length - settings.new_tokens
        prompts = [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]
        identity = f"{PromptSet.of('validation', prompts).version}-{settings.new_tokens}"
        numbers = slice_evenly(range(len(prompts)), self.share.rank, self.share.world_size)
        return [prompts[number].tokens for number in numbers], identity
