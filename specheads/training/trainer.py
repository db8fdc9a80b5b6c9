"""The one training loop over phases. accelerate lives here and nowhere below."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config import Phase, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder
from specheads.data.packing import BatchStream, TokenBatch
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress
from specheads.runs.trackers import Tracker
from specheads.training import schedule as schedules
from specheads.training.feature_cache import FeatureCache
from specheads.training.log import PhaseLog
from specheads.training.meter import Meter
from specheads.training.prefetch import prefetched
from specheads.training.schedule import PlacedPhase, Progressed
from specheads.training.step import Stepper
from specheads.training.teacher import Teacher, teacher_of
from specheads.training.validation import HeldOut
from specheads.training.watching import Watch


def train(
    base: FrozenBase,
    head: Head,
    schedule: Schedule,
    open_text: Callable[[Phase, Progress, Callable[[], None]], BatchStream],
    run: RunDirectory,
    tracker: Tracker | None,
    accelerator: Accelerator,
    *,
    seed: int = 0,
    log_every: int = 10,
    checkpoint_every: int = 0,
    checkpoints_kept: int = 2,
    held_out: HeldOut | None = None,
    cache: FeatureCache | None = None,
) -> None:
    """Train a head through every phase, going on from the newest checkpoint.

    The head is trained in place, and saved in the run directory after each phase. The weights of
    the base are never changed: what joint phases teach it is saved as an adapter beside the head,
    and taken out of the base at the end. `open_text` gives a phase its text when it begins, and may
    write it then; now and again, on all processes alike, it calls what it is given, which raises
    KeyboardInterrupt once one of them was interrupted. `tracker` is None on all processes but the
    main one. With `checkpoint_every` zero there are checkpoints at phase ends only. On `held_out`
    text the head is measured now and then, and not trained; a phase may end early by it. With a
    `cache` a frozen base reads each batch once.

    An interrupt (SIGINT, SIGTERM) of any process ends the step at hand, or where there are several
    the one after it, writes a checkpoint and raises KeyboardInterrupt on all of them; a second one
    does what it did before.
    """
    teacher = teacher_of(base, head, schedules.adapter_settings(schedule), seed, cache)
    try:
        trainer = _Trainer(teacher, schedule, run, accelerator, seed, checkpoints_kept)
        with progress(shown=accelerator.is_main_process) as display, trainer.on_interrupt():
            trainer.resume(lambda line: display.console.print(line, markup=False, soft_wrap=True))
            if tracker is not None:
                tracker.resume(trainer.at.step)
            watch = trainer.watch(held_out)
            for phase in schedules.placed(schedule):
                if trainer.at.step >= phase.end:
                    continue
                # what the base writes for a phase, it writes as it was loaded
                with teacher.as_loaded():
                    text = open_text(phase.settings, display, trainer.halt)
                meter = Meter(trainer.at, phase, teacher, accelerator.autocast)
                log = PhaseLog(phase, trainer.at, tracker, display, trainer.total, log_every, meter)
                trainer.run_phase(phase, text, log, checkpoint_every, watch)
    finally:
        teacher.leave()


class _Trainer:
    """What the loop holds on to; `train` is its only user."""

    def __init__(
        self,
        teacher: Teacher,
        schedule: Schedule,
        run: RunDirectory,
        accelerator: Accelerator,
        seed: int,
        kept: int,
    ) -> None:
        self.teacher, self.head = teacher, teacher.head
        self.run, self.accelerator, self.kept = run, accelerator, kept
        self.stepper = Stepper(teacher, schedule, accelerator, seed)
        self.optimizers, self.total = self.stepper.optimizers, self.stepper.total
        self.at = Progressed()
        self.stop = False
        self.asked = torch.zeros((), device=accelerator.device)
        """How many processes had been asked to stop at the end of the step before."""

    def run_phase(
        self,
        phase: PlacedPhase,
        text: BatchStream,
        log: PhaseLog,
        checkpoint_every: int,
        watch: Watch,
    ) -> None:
        """Train from wherever the phase stands to its end."""
        self.teacher.begin(phase)
        with closing(prefetched(self._batches(text))) as batches:
            for batch, cursor in log.meter.waiting(batches):
                values, self.at.cursor = self.stepper.step(batch, phase, self.at.step), cursor
                tokens = phase.batch_size_at(self.at.step) * batch.tokens.shape[1]
                self.at.step += 1
                self.at.tokens += tokens
                log.step(values, tokens, watch.due(phase))
                if why := watch.ends(phase):
                    log.tell(why)
                    # the next phase begins at its own step, whenever this one ends
                    self.at.step = phase.end
                if self.at.step == phase.end:
                    break
                stop = self._stops()
                if stop or (checkpoint_every and self.at.step % checkpoint_every == 0):
                    self.save()
                if stop:
                    raise KeyboardInterrupt
        self.at.end_phase()
        if self.accelerator.is_main_process:
            # kept, so that phases can be compared
            with atomic_folder(self.run.phases / phase.name) as folder:
                self.head.save_pretrained(folder)
            self.teacher.save(self.run.adapter, phase)
        self.save()
        self.halt()

    def watch(self, held_out: HeldOut | None) -> Watch:
        """Return what measures on held-out text from here on."""
        # wrapped for several processes it waits for the others at each batch, who may have none
        alone = self.accelerator.unwrap_model(self.stepper.objective)
        is_main = self.accelerator.is_main_process
        return Watch(held_out, self.teacher, alone, self.run, self.at, self.total, is_main)

    def _batches(self, text: BatchStream) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield what follows in a text, where a GPU can fetch it from while it computes."""
        for batch, cursor in text.batches(self.at.cursor):
            yield batch.pinned() if self.teacher.base.device.type == "cuda" else batch, cursor

    def save(self) -> None:
        """Write a checkpoint on the main process; every process waits for it."""
        if self.accelerator.is_main_process:
            optimizer = {"optimizers": [one.state_dict() for one in self.optimizers]}
            learned = self.teacher.weights()
            held = checkpoint.Checkpoint(
                asdict(self.at), self.head.state_dict(), optimizer, learned
            )
            checkpoint.save(self.run.checkpoints, held, self.kept)
        self.accelerator.wait_for_everyone()

    def resume(self, tell: Callable[[str], object]) -> None:
        """Go on from the newest whole checkpoint, if there is one; tell of damaged ones."""
        is_main = self.accelerator.is_main_process
        found = checkpoint.newest(self.run.checkpoints, tell if is_main else lambda _: None)
        if found is None:
            return
        try:
            self._take_up(found)
        except InputError:
            raise
        # its checksums hold, so it is as it was written
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"a run goes on from its own checkpoints, and {self.run.checkpoints} holds others; "
                "remove the folder to train anew"
            ) from error

    def _take_up(self, found: checkpoint.Checkpoint) -> None:
        state, weights, saved, adapter = found
        if "cursors" in state:
            raise InputError(
                "a run goes on at a sample of its text, and this one was stopped by an earlier "
                "version, at a place of its own in each process; finish it with that version, or "
                f"remove {self.run.checkpoints} to train anew"
            )
        self.at = Progressed(**state)
        self.head.load_state_dict(weights)
        self.teacher.load(adapter)
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Turn a first SIGINT or SIGTERM into a request to stop, for as long as this lasts."""
        # only the main thread gets signals
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def hear(*_: Any) -> None:
            self.stop = True
            restore()

        # known before one is replaced: an interrupt may come between the two
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in before:
                signal.signal(number, hear)
            yield
        finally:
            restore()

    def halt(self) -> None:
        """Leave once any process was asked to: all together, or the others would wait for it."""
        if self._asking() > 0:
            raise KeyboardInterrupt

    def _stops(self) -> bool:
        """Return whether any process was asked to stop: of several, when this was last called.

        A device need not be waited for to know that, as it must be to know what they ask now.
        """
        if self.accelerator.num_processes == 1:
            return self.stop
        before, self.asked = self.asked, self._asking()
        return bool(before > 0)

    def _asking(self) -> Tensor:
        """Return how many processes are asked to stop now, for whoever waits to read it."""
        return self.total(torch.full_like(self.asked, self.stop))
