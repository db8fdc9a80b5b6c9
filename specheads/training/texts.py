"""Each phase's text: the corpus, or what the base writes when the phase begins; text held out."""

from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.progress import Progress
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config import Distill, Phase, Train, Validation
from specheads.core.errors import InputError
from specheads.data import distill as shards
from specheads.data.documents import Documents
from specheads.data.fingerprint import text_identity
from specheads.data.packing import PackedText, Text
from specheads.data.tokenise import tokenised
from specheads.decoding.acceptance.sampling import Sampling
from specheads.decoding.generate import generate
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress
from specheads.training.validation import HeldOut

T = TypeVar("T")

COUNTED_TOKENS = 2**19
"""Tokens of the corpus that a reduced draft vocabulary is counted on."""


def together(act: Callable[[], T]) -> list[T]:
    """Act on every process and return what each of them got; where one is refused, all are."""
    got, refused = [], ""
    try:
        got = [act()]
    except InputError as error:
        refused = str(error)
    told = gather_object([(got, refused)])
    for _, refused in told:
        if refused:
            raise InputError(refused)
    return [one for got, _ in told for one in got]


class Texts:
    """Gives each phase its text.

    Every phase's corpus is packed once at first, so that one too short is refused before anything
    is written.
    """

    def __init__(
        self,
        settings: Train,
        base: FrozenBase,
        run: RunDirectory,
        accelerator: Accelerator,
        announce: Callable[[str], None],
    ) -> None:
        assert base.tokenizer is not None
        self.settings, self.base, self.tokenizer = settings, base, base.tokenizer
        self.run, self.accelerator, self.announce = run, accelerator, announce
        # of the weights alone: while an adapter is trained, the model has more of them
        self.fingerprint = base.fingerprint
        self.documents = self._corpus("train")
        self.share = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
        for phase in settings.schedule.phases.values():
            self.corpus(phase)

    def corpus(self, phase: Phase) -> PackedText:
        """Return a phase's corpus; of distilled text, rows whose beginnings the base continues."""
        if distill := phase.distill:
            length = distill.prompt_tokens + distill.new_tokens
            return self._packed(self.documents, length, distill.batch_size, "stream")
        length, batch_size = phase.sequence_length, phase.batch_size
        return self._packed(self.documents, length, batch_size, phase.packing)

    def count_tokens(self) -> Tensor:
        """Return how often each token of the vocabulary stands in some of the corpus."""
        # every process counts the same text, so that all agree
        order = np.random.default_rng(self.settings.seed).permutation(len(self.documents))
        ends = np.cumsum(self.documents.lengths[order])
        some = order[: int(np.searchsorted(ends, COUNTED_TOKENS)) + 1]
        text = np.concatenate([self.documents.tokens(int(number)) for number in some])
        return torch.from_numpy(np.bincount(text, minlength=self.base.vocab_size))

    def held_out(self, settings: Validation) -> HeldOut | None:
        """Return rows of the corpus's validation split, this process's share of them.

        They are packed by best fit, as long as the first phase's and as many in a batch.
        """
        if not settings.rows:
            return None
        first = next(iter(self.settings.schedule.phases.values()))
        length = self.corpus(first).length
        try:
            text = PackedText(
                self._corpus("validation"),
                sequence_length=length,
                batch_size=1,
                padding_id=self._padding_id,
                seed=self.settings.seed,
            )
        except InputError as error:
            if self.accelerator.is_main_process:
                self.announce(f"no validation: {error}")
            return None
        rows = range(min(settings.rows, text.rows_per_epoch))
        mine = rows[self.share["rank"] :: self.share["world_size"]]
        size = first.batch_size
        batches = [text.batch(mine[at : at + size]) for at in range(0, len(mine), size)]
        return HeldOut(batches, settings.every)

    def open(self, phase: Phase, bar: Progress, halt: Callable[[], None]) -> Text:
        """Return the phase's text, writing it first where the base is its author.

        `halt` is called on all processes together, and raises where writing is to stop.
        """
        text = self.corpus(phase) if phase.distill is None else self._written(phase, bar, halt)
        if self.accelerator.is_main_process:
            bar.console.print(f"packing: {text.waste}", markup=False, soft_wrap=True)
        return text

    def _written(self, phase: Phase, bar: Progress, halt: Callable[[], None]) -> PackedText:
        assert phase.distill is not None
        folder = Path(phase.distill.folder or self.run.text)
        with closing(self._writer(phase, phase.distill, folder)) as writer:
            task = bar.add_task("text by the base", total=phase.distill.num_samples, numbers="")
            # processes that have written their share wait for the others
            while sum(done := together(lambda: next(writer, 0))):
                bar.update(task, completed=max(done) * len(done))
                halt()
        written = shards.documents(folder)
        return self._packed(written, phase.sequence_length, phase.batch_size, phase.packing)

    def _packed(
        self, documents: Documents, length: int, batch_size: int, packing: str
    ) -> PackedText:
        return PackedText(
            documents,
            sequence_length=length,
            batch_size=batch_size,
            packing=packing,
            padding_id=self._padding_id,
            seed=self.settings.seed,
            **self.share,
        )

    @property
    def _padding_id(self) -> int:
        return (self.base.eos_ids or (0,))[0]

    def _corpus(self, split: str) -> Documents:
        with progress(shown=self.accelerator.is_main_process, transient=True) as bar:
            return tokenised(self.settings.data, split, self.tokenizer, self.settings.seed, bar=bar)

    def _writer(self, phase: Phase, distill: Distill, folder: Path) -> Generator[int, None, None]:
        """Return what has the base write, shard by shard, what the folder does not hold yet."""
        corpus, processes = self.settings.data, self.accelerator.num_processes
        identity = text_identity(
            self.fingerprint, self.tokenizer, corpus, self.documents, processes
        )

        def write(prompts: list[list[int]], seed: int) -> list[list[int]]:
            how = Sampling(temperature=distill.temperature, top_k=distill.top_k, seed=seed)
            new = distill.new_tokens
            return generate(self.base, None, prompts, max_new_tokens=new, sampling=how).tokens

        prompts, seed = self.corpus(phase), self.settings.seed
        return shards.write_shards(
            folder, prompts, write, distill, identity, seed=seed, **self.share
        )
