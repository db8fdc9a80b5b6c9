"""Text of each phase: the corpus, or text that the base generates; and held-out text."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor

from specheads.base.fingerprint import config_fingerprint
from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.config.training import Phase, ValidationSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.documents import TokenisedDocuments
from specheads.data.encode import affix_ids
from specheads.data.packing import BatchStream, PackedText, TokenBatch, slice_evenly
from specheads.data.prompts import PromptSet
from specheads.data.prompts import held_out_prompts as prompts_of_split
from specheads.data.tokenise import UnansweredError, tokenise_corpus
from specheads.runs.progress import progress_display
from specheads.training.distill.run import Job, job_of, write_folder
from specheads.training.distill.shards import read_text, refuse_other_text
from specheads.training.processes import row_share
from specheads.training.schedule import ScheduledPhase, row_tokens
from specheads.training.validation import ValidationSet

COUNTED_TOKENS = 2**19
"""Tokens of the corpus that select a reduced draft vocabulary."""


class PhaseData:
    """Returns the text of each phase.

    It packs every phase's corpus once at the start: a corpus that is too short raises before
    anything is written.

    `base` generates text, into `folder` unless a phase has its own. `announce` is called with lines
    for people. `stage` begins a stage by its name and returns a line for people.
    """

    def __init__(
        self,
        phases: dict[str, Phase],
        data: DataSettings,
        base: FrozenBase,
        folder: Path,
        accelerator: Accelerator,
        announce: Callable[[str], None],
        seed: int,
        stage: Callable[[str], str] = str,
    ) -> None:
        self.phases, self.data, self.base = phases, data, base
        self.tokenizer = base.tokenizer_for("training")
        self.accelerator, self.announce, self.seed = accelerator, announce, seed
        self.share = row_share(base.sharding, accelerator)
        self.head: Head | None = None
        """The trained head, which may draft while the base generates text."""
        self.stage = stage
        self._begun: set[str] = set()
        # now: training adds an adapter to the model later
        self._jobs: dict[str, Job] = {}
        self._facts: dict[str, Any] = {
            "base_fingerprint": base.fingerprint,
            "base_config": config_fingerprint(base.model.config),
        }
        claims: dict[Path, dict[str, Any]] = {}
        for name, phase in phases.items():
            if phase.distill is None:
                self._packed(self.documents, phase)
                continue
            own = Path(phase.distill.folder or folder)
            job = self._jobs[name] = job_of(data, base, phase.distill, own, accelerator, seed)
            if claims.setdefault(own, claim := job.claim()) != claim:
                raise InputError(
                    f"phases that share a text folder need equal settings, but {name!r} generates "
                    f"other text than a phase before it in {own}; give it its own distill.folder"
                )
            # now, and not after the phases before it
            refuse_other_text(own, claim)

    def identity(self) -> dict[str, Any]:
        """Return facts of the base and the corpus that must be the same when a run resumes."""
        if len(self._jobs) == len(self.phases):
            return dict(self._facts)
        documents = self.documents
        # it reads the whole corpus, and only one process stores it
        own = {"data": documents.identity()} if self.accelerator.is_main_process else {}
        return self._facts | own

    @cached_property
    def documents(self) -> TokenisedDocuments:
        """Documents of the corpus phases."""
        return self._corpus("train")

    def count_tokens(self, begin: Callable[[], object]) -> Tensor:
        """Return how often each token of the vocabulary is a label in a sample of the text.

        Without a corpus phase the base generates the text of the first phase now; `begin` opens the
        run directory for that.
        """
        if len(self._jobs) < len(self.phases):
            text = self.documents
        else:
            begin()
            with progress_display(shown=self.accelerator.is_main_process) as bar:
                text = self._generated(next(iter(self._jobs)), bar, lambda: None)
        # every process counts the same text
        order = np.random.default_rng(self.seed).permutation(len(text))
        some = order[: int(np.searchsorted(np.cumsum(text.lengths[order]), COUNTED_TOKENS)) + 1]
        labels = [text.tokens(number)[text.loss_mask(number)] for number in map(int, some)]
        return torch.from_numpy(np.bincount(np.concatenate(labels), minlength=self.base.vocab_size))

    def held_out(self, settings: ValidationSettings) -> ValidationSet | None:
        """Return this process's share of the validation split: rows for the loss, and prompts.

        If the split is too short for one of them, that one is skipped with a message.
        """
        batches, prompts, identity = None, None, ""
        if settings.rows:
            with self._optional("validation"):
                batches = self._rows(settings.rows)
        if settings.prompts:
            with self._optional("prompts to decode"):
                prompts, identity = self._held_prompts(settings)
        if prompts is None and settings.keep == "best":
            raise InputError(
                "validation.keep=best needs prompts in the corpus's validation split, but it has "
                "none; lower validation.prompt_tokens, or set keep=last"
            )
        if batches is None and prompts is None:
            return None
        return ValidationSet(batches, settings.every, prompts, settings.new_tokens, identity)

    @contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        """Print a message if the held-out text is too short for something."""
        try:
            yield
        except InputError as error:
            unanswered = isinstance(error, UnansweredError)
            why = "the held-out text has questions without answers" if unanswered else error
            if self.accelerator.is_main_process:
                self.announce(f"no {what}: {why}")

    def _rows(self, count: int) -> list[TokenBatch]:
        """Return this process's share of `count` rows of held-out text, in batches.

        Rows are packed by best fit, with the sequence length of the first corpus phase, or else of
        the generated text.
        """
        phases = self.phases.values()
        first = next((phase for phase in phases if phase.distill is None), next(iter(phases)))
        documents = self._corpus("validation")
        most = row_tokens(first, self.data, self.base.max_length)
        text = PackedText(
            documents,
            sequence_length=first.sequence_length
            or min(int(documents.lengths.max(initial=1)), most),
            batch_size=1,
            padding_id=self._padding_id,
            opening=affix_ids(self.tokenizer)[0],
            seed=self.seed,
        )
        rank, world_size = self.share.rank, self.share.world_size
        rows = range(min(count, text.rows_per_epoch))
        mine = slice_evenly(rows, rank, world_size)
        size = max(1, first.batch_size // (world_size * first.accumulation_steps))
        batches = [text.batch(mine[at : at + size]) for at in range(0, len(mine), size)]
        # processes of a sharded base need equally many batches: add one without labels
        most = math.ceil(math.ceil(len(rows) / world_size) / size)
        row = text.batch(rows[:1])
        idle = replace(row, loss_mask=torch.zeros_like(row.loss_mask))
        return batches + [idle] * (most - len(batches))

    def _held_prompts(self, settings: ValidationSettings) -> tuple[list[list[int]], str]:
        """Return this process's share of the held-out prompts, and the identity of all prompts."""
        if not self.base.decodes:
            raise InputError(
                f"{self.base.where} does not decode here; measure the head after training"
            )
        length, number = settings.prompt_tokens, settings.prompts
        found = prompts_of_split(self.data, "validation", self.tokenizer, length, number, self.seed)
        room = self.base.max_length - settings.new_tokens
        fitting = [prompt for prompt in found if len(prompt.tokens) <= room]
        identity = f"{PromptSet.of('validation', fitting).version}-{settings.new_tokens}"
        mine = slice_evenly(range(len(fitting)), self.share.rank, self.share.world_size)
        return [fitting[number].tokens for number in mine], identity

    def open(self, phase: ScheduledPhase, bar: Progress, halt: Callable[[], None]) -> BatchStream:
        """Return the phase's text; generate it first in a distilled phase.

        All processes call `halt` together; it raises to stop the generation.
        """
        is_corpus = phase.settings.distill is None
        documents = self.documents if is_corpus else self._generated(phase.name, bar, halt)
        text = self._packed(documents, phase.settings)
        self._begin(phase.name, bar)
        self._show(f"packing: {text.summary}", bar)
        return text

    def _generated(self, name: str, bar: Progress, halt: Callable[[], None]) -> TokenisedDocuments:
        job = replace(self._jobs[name], head=self.head)
        self._begin(f"text of {name}", bar)
        report = write_folder(job, bar, halt)
        if report and (dropped := report["dropped"]):
            why = ", ".join(f"{fault}: {count:,}" for fault, count in dropped.items())
            number = f"{sum(dropped.values()):,} of {job.settings.num_samples:,}"
            self._show(f"{number} texts were dropped ({why}), see {job.folder}/report.md", bar)
        return read_text(job.folder, job.settings.num_samples)

    def _begin(self, name: str, bar: Progress) -> None:
        """Begin a stage, once."""
        if name not in self._begun:
            self._begun.add(name)
            self._show(self.stage(name), bar)

    def _show(self, line: str, bar: Progress) -> None:
        if self.accelerator.is_main_process:
            bar.console.print(line, markup=False, soft_wrap=True)

    def _packed(self, documents: TokenisedDocuments, phase: Phase) -> PackedText:
        return PackedText(
            documents if phase.answers_only else documents.without_loss_mask(),
            sequence_length=phase.sequence_length,
            batch_size=phase.batch_size,
            packing=phase.packing,
            padding_id=self._padding_id,
            opening=affix_ids(self.tokenizer)[0],
            seed=self.seed,
            rank=self.share.rank,
            world_size=self.share.world_size,
        )

    def _corpus(self, split: str) -> TokenisedDocuments:
        with progress_display(shown=self.accelerator.is_main_process, transient=True) as bar:
            return tokenise_corpus(self.data, split, self.tokenizer, self.seed, bar=bar)

    @property
    def _padding_id(self) -> int:
        return (self.base.eos_ids or (0,))[0]
