"""The training loop over all phases of a schedule, and one optimizer step of it."""

import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import record_function

from specheads.base.model import FrozenBase
from specheads.core.attention import without_cudnn_attention
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder
from specheads.core.machine import to_device
from specheads.core.seeds import derive_seed
from specheads.data.packing import BatchStream, TokenBatch
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress
from specheads.runs.trackers import Tracker
from specheads.training.feature_cache import FeatureCache
from specheads.training.log import PhaseLog
from specheads.training.objective import Objective, label_counts
from specheads.training.optimizers import optimizers
from specheads.training.processes import readers, repeatable
from specheads.training.schedule import PlacedPhase, Progressed, Step, adapter_settings, placed
from specheads.training.settings import Phase, Schedule
from specheads.training.teacher import Teacher
from specheads.training.validation import HeldOut, Watch


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
    held_out: HeldOut | None = None,
    cache: FeatureCache | None = None,
) -> None:
    """Train a head through every phase; resume from the newest checkpoint.

    The head is trained in place and saved in the run directory after each phase. The base's weights
    never change: joint phases train an adapter, which is saved next to the head and removed from
    the base at the end.

    `open_text` returns the text of a phase when the phase starts, and may generate it first. Its
    last argument is a function that all processes call together from time to time, and that raises
    KeyboardInterrupt after an interrupt. `tracker` is None on all processes except the main one.
    `checkpoint_every` zero writes checkpoints at the end of phases only. The score on `held_out`
    may end a phase early. With a `cache` a frozen base reads each batch once.

    The first interrupt (SIGINT or SIGTERM) of any process finishes the current step, writes a
    checkpoint and raises KeyboardInterrupt on all processes. With several processes they finish one
    more step. A second interrupt has its default effect.
    """
    teacher = Teacher(base, head, adapter_settings(schedule), seed, cache)
    try:
        trainer = _Trainer(teacher, schedule, run, accelerator, seed)
        total = trainer.stepper.total
        with progress(shown=accelerator.is_main_process) as display, trainer.on_interrupt():
            trainer.resume(lambda line: display.console.print(line, markup=False, soft_wrap=True))
            if tracker is not None:
                tracker.resume(trainer.at.step)
            # DDP's wrapper synchronises at each batch, and processes may have different numbers
            alone = accelerator.unwrap_model(trainer.stepper.objective)
            is_main = accelerator.is_main_process
            watch = Watch(held_out, teacher, alone, run, trainer.at, total, is_main)
            for phase in placed(schedule):
                if trainer.at.step >= phase.end:
                    continue
                # the base generates text without the adapter
                with teacher.as_loaded():
                    text = open_text(phase.settings, display, trainer.halt)
                log = PhaseLog(
                    phase, trainer.at, teacher, accelerator, tracker, display, total, log_every
                )
                trainer.run_phase(phase, text, log, checkpoint_every, watch)
    finally:
        teacher.leave()


class Stepper:
    """Takes optimizer steps for a head, on one or several processes."""

    def __init__(
        self, teacher: Teacher, schedule: Schedule, accelerator: Accelerator, seed: int
    ) -> None:
        self.teacher, self.head, self.accelerator = teacher, teacher.head, accelerator
        self.seed, self.clip_norm = seed, schedule.clip_norm
        self.shares = readers(teacher.base.sharding, accelerator)["world_size"]
        self.optimizers = [
            accelerator.prepare_optimizer(optimizer)
            for optimizer in optimizers(self.head, schedule, teacher.parameters)
        ]
        with warnings.catch_warnings():
            # accelerate uses an argument name that newer torch deprecates
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            # the head stays on its base's device, which may be the CPU of a machine with a GPU
            self.objective = accelerator.prepare_model(
                Objective(self.head.train()), device_placement=False
            )

    def step(self, batch: TokenBatch, phase: PlacedPhase, number: int) -> dict[str, Tensor]:
        """Take the optimizer step with this number; return this process's share of its metrics."""
        values: dict[str, Tensor] = {}
        device = self.teacher.base.device
        steps = self._parts(batch, phase, number)
        for step in steps:
            # for dropout in heads
            torch.manual_seed(derive_seed(step.seed, step.batch.first_sample))
            # gradients are all-reduced once, in the last part
            last = step is steps[-1]
            sharing = nullcontext() if last else self.accelerator.no_sync(self.objective)
            with sharing, without_cudnn_attention(device):
                loss, found = self.teacher.losses(step, self.objective)
                # accelerate averages over processes, but these losses are parts of one sum
                with record_function("backward"), repeatable(device):
                    self.accelerator.backward(loss * self.shares)
            for name, value in found.items():
                values[name] = values[name] + value if name in values else value
        with record_function("optimizer"):
            self._update(phase.rates(number))
        return values

    def _parts(self, batch: TokenBatch, phase: PlacedPhase, number: int) -> list[Step]:
        """Return this process's parts of a step's batch."""
        device, settings = self.teacher.base.device, phase.settings
        seed = derive_seed(self.seed, number)
        parts = [
            (part.to(device), to_device(phase.loss_mask(part, self.head, seed), device))
            for part in batch.parts(settings.accumulation_steps)
        ]
        counts = [
            label_counts(self.head, part.tokens, part.document_ids, loss_mask, settings)
            for part, loss_mask in parts
        ]
        counts = self.total(torch.stack(counts).sum(0))
        return [Step(phase, number, seed, part, loss_mask, counts) for part, loss_mask in parts]

    def _update(self, rates: dict[str, float]) -> None:
        """Clip the gradients and apply the optimizers."""
        learned = self.teacher.parameters
        # accelerate averages the head's gradients itself
        if gradients := [value.grad for value in learned if value.grad is not None]:
            mean = self.total(parameters_to_vector(gradients)) / self.shares
            vector_to_parameters(mean, gradients)
        self.accelerator.clip_grad_norm_([*self.head.parameters(), *learned], self.clip_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rates[group["role"]]
            optimizer.step()
            optimizer.zero_grad()

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over processes; those that read the same rows count once."""
        total = self.accelerator.reduce(values, reduction="sum")
        assert isinstance(total, Tensor)
        copies = self.accelerator.num_processes // self.shares
        return total // copies if not total.is_floating_point() else total / copies


class _Trainer:
    """State of the training loop."""

    def __init__(
        self,
        teacher: Teacher,
        schedule: Schedule,
        run: RunDirectory,
        accelerator: Accelerator,
        seed: int,
    ) -> None:
        self.teacher, self.head = teacher, teacher.head
        self.run, self.accelerator = run, accelerator
        self.stepper = Stepper(teacher, schedule, accelerator, seed)
        self.at = Progressed()
        self.stop = False
        self.stops_before = torch.zeros((), device=accelerator.device)
        """Number of processes with a stop request at the end of the previous step."""

    def run_phase(
        self,
        phase: PlacedPhase,
        text: BatchStream,
        log: PhaseLog,
        checkpoint_every: int,
        watch: Watch,
    ) -> None:
        """Train from the current step to the end of the phase."""
        self.teacher.begin(phase)
        with closing(prefetched(self._batches(text))) as batches:
            for batch, cursor in log.waiting(batches):
                values, self.at.cursor = self.stepper.step(batch, phase, self.at.step), cursor
                tokens = phase.settings.batch_size * batch.tokens.shape[1]
                self.at.step += 1
                self.at.tokens += tokens
                log.step(values, tokens, watch.due(phase))
                if why := watch.ends(phase):
                    log.print(why)
                    # the next phase starts at its planned step, even if this one ends early
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
            # so that phases can be compared later
            with atomic_folder(self.run.phases / phase.name) as folder:
                self.head.save_pretrained(folder)
            self.teacher.save(self.run.adapter, phase)
        self.save()
        self.halt()

    def _batches(self, text: BatchStream) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the remaining batches of a text, in pinned memory for a GPU."""
        for batch, cursor in text.batches(self.at.cursor):
            yield batch.pinned() if self.teacher.base.device.type == "cuda" else batch, cursor

    def save(self) -> None:
        """Write a checkpoint on the main process; the others wait."""
        if self.accelerator.is_main_process:
            optimizer = {"optimizers": [one.state_dict() for one in self.stepper.optimizers]}
            weights = self.head.state_dict(), optimizer, self.teacher.weights()
            checkpoint.save(self.run.checkpoints, checkpoint.Checkpoint(asdict(self.at), *weights))
        self.accelerator.wait_for_everyone()

    def resume(self, announce: Callable[[str], object]) -> None:
        """Load the newest intact checkpoint, if any; report damaged ones to `announce`."""
        is_main = self.accelerator.is_main_process
        found = checkpoint.newest(self.run.checkpoints, announce if is_main else lambda _: None)
        if found is None:
            return
        try:
            self.at = Progressed(**found.state)
            self.head.load_state_dict(found.weights)
            self.teacher.load(found.adapter)
            saved = found.optimizer["optimizers"]
            for optimizer, values in zip(self.stepper.optimizers, saved, strict=True):
                optimizer.load_state_dict(values)
        # the checksums match, so another run wrote the file
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"a run resumes from its own checkpoints, but {self.run.checkpoints} has those of "
                "another run; remove the folder to retrain"
            ) from error

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM inside the context into a stop request."""
        # only the main thread receives signals
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        # read both handlers first: an interrupt may come after the first replacement
        before = {number: signal.getsignal(number) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def request_stop(*_: Any) -> None:
            self.stop = True
            restore()

        try:
            for number in before:
                signal.signal(number, request_stop)
            yield
        finally:
            restore()

    def halt(self) -> None:
        """Raise KeyboardInterrupt on all processes if any of them has a stop request."""
        if self._stop_requests() > 0:
            raise KeyboardInterrupt

    def _stops(self) -> bool:
        """Return whether any process has a stop request.

        With several processes the answer is that of the previous call, which is already there:
        reading the current one would synchronise with the device.
        """
        if self.accelerator.num_processes == 1:
            return self.stop
        before, self.stops_before = self.stops_before, self._stop_requests()
        return bool(before > 0)

    def _stop_requests(self) -> Tensor:
        """All-reduce the stop flag. Reading the result synchronises."""
        return self.stepper.total(torch.full_like(self.stops_before, self.stop))


Item = TypeVar("Item")

AHEAD = 2
"""Prefetched items: one ready, and one in preparation."""


def prefetched(items: Iterator[Item], ahead: int = AHEAD) -> Generator[Item, None, None]:
    """Yield the same items; a thread prepares at most `ahead` of them in advance.

    An exception in the thread is raised in place of its item. Closing waits for the current item.
    """
    over = object()
    worker = ThreadPoolExecutor(1, "text")
    try:
        waiting = deque(worker.submit(next, items, over) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not over:
            waiting.append(worker.submit(next, items, over))
            yield item  # pyright: ignore[reportReturnType]
    finally:
        worker.shutdown(cancel_futures=True)
