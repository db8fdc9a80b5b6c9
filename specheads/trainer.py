"""The one training loop over phases. accelerate lives here and nowhere below."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Bool
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from specheads import losses
from specheads.base import FrozenBase
from specheads.checkpoint import RunDirectory
from specheads.config import Phase, Schedule
from specheads.drafter import Features, Head
from specheads.schedule import learning_rate_share, optimizers
from specheads.text.pack import Text, TokenBatch
from specheads.track import Tracker

OpenText = Callable[[Phase, Progress], Text]
"""Gives a phase its text when it begins, so that text can be written then, with progress."""


class Objective(nn.Module):
    """A head and its loss as one module, so that accelerate can wrap both together."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        features: Features,
        tokens: Tensor,
        scored: Bool[Tensor, "batch time"],
        project: Callable[[Tensor], Tensor] | None,
        phase: Phase,
    ) -> losses.DepthLoss:
        """Return the loss of every depth over the labels that `scored` marks."""
        depth = self.head.depth
        drafted = self.head.to_drafted(tokens)
        rows, labels = (scored & (drafted >= 0)).nonzero(as_tuple=True)
        states = [
            state[rows, labels - 2 - level]
            for level, state in enumerate(self.head.states(features, tokens))
        ]
        targets = losses.Targets(
            drafted[rows, labels], features.hidden[rows, labels - 1].detach(), project
        )
        projections = [self.head.projection(level) for level in range(depth)]
        loss = losses.depth_loss(states, projections, targets, kind=phase.loss, decay=phase.decay)
        # a label that cannot be drafted is a draft that the base will not accept
        covered = len(rows) / scored.sum().clamp(min=1)
        return replace(loss, agreement=loss.agreement * covered)


@dataclass(slots=True)
class Progressed:
    """Where training stands; what a checkpoint's state.json holds."""

    step: int = 0
    """Optimizer steps done, over all phases."""
    tokens: int = 0
    """Tokens read by the base, over all processes."""
    cursor: dict[str, Any] | None = None
    """Place in the current phase's text."""


def train(
    base: FrozenBase,
    head: Head,
    schedule: Schedule,
    open_text: OpenText,
    run: RunDirectory,
    tracker: Tracker,
    accelerator: Accelerator,
    *,
    seed: int = 0,
    log_every: int = 10,
    checkpoint_every: int = 0,
) -> None:
    """Train a head through every phase, going on from the newest checkpoint.

    An interrupt (SIGINT, SIGTERM) ends the step at hand, writes a checkpoint and raises
    KeyboardInterrupt.

    Args:
        base: Frozen; reads the text and gives its law.
        head: Trained in place, and saved in the run directory after each phase.
        schedule: Phases, in order, and the optimizer's settings.
        open_text: Gives each phase its text.
        run: Holds checkpoints and phases.
        tracker: Where rows of metrics go, on the main process.
        accelerator: Made by the caller.
        seed: Of the positions that are scored.
        log_every: Steps between two rows.
        checkpoint_every: Steps between two checkpoints; zero keeps those at phase ends only.

    Raises:
        ValueError: The loss is no longer finite, or the newest checkpoint was written by another
            number of processes.
    """
    trainer = _Trainer(base, head, schedule, run, tracker, accelerator, seed, log_every)
    trainer.resume()
    first = 0
    with trainer.bar:
        for name, phase in schedule.phases.items():
            if trainer.at.step < first + phase.steps:
                trainer.run_phase(name, phase, first, open_text, checkpoint_every)
            first += phase.steps


def last_step(run: RunDirectory) -> int:
    """Return the step of the newest whole checkpoint, zero when there is none."""
    found = run.load_checkpoint()
    return found[0]["step"] if found else 0


class _Trainer:
    """What the loop holds on to; `train` is its only user."""

    def __init__(
        self,
        base: FrozenBase,
        head: Head,
        schedule: Schedule,
        run: RunDirectory,
        tracker: Tracker,
        accelerator: Accelerator,
        seed: int,
        log_every: int,
    ) -> None:
        self.base, self.head, self.schedule = base, head, schedule
        self.run, self.tracker, self.accelerator = run, tracker, accelerator
        self.seed, self.log_every = seed, log_every
        self.optimizers = [
            accelerator.prepare_optimizer(optimizer) for optimizer in optimizers(head, schedule)
        ]
        self.objective = accelerator.prepare_model(Objective(head.train()))
        self.project = base.projector(head.draft_ids)
        self.at = Progressed()
        self.stop = False
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            disable=not accelerator.is_main_process,
        )

    def run_phase(
        self, name: str, phase: Phase, first: int, open_text: OpenText, checkpoint_every: int
    ) -> None:
        """Train from wherever the phase stands to its end."""
        text = open_text(phase, self.bar)
        task = self.bar.add_task(
            name, total=phase.steps, completed=self.at.step - first, numbers=""
        )
        meter = _Meter(self.head.depth, self.base.device)
        batches = text.batches(self.at.cursor)
        end = first + phase.steps
        with self._stopping_cleanly():
            while self.at.step < end:
                batch, self.at.cursor = next(batches)
                share = learning_rate_share(self.at.step - first, phase)
                meter.add(self._step(batch, phase, share), self._world_tokens(batch))
                self.at.step += 1
                self.at.tokens += self._world_tokens(batch)
                if self.at.step % self.log_every == 0 or self.at.step == end:
                    self._log(name, meter, share * phase.learning_rate, task)
                self.bar.update(task, completed=self.at.step - first)
                due = checkpoint_every and self.at.step % checkpoint_every == 0
                if self.at.step < end and (due or self.stop):
                    self.save()
                if self.at.step < end and self.stop:
                    raise KeyboardInterrupt
            self.at.cursor = None
            if self.accelerator.is_main_process:
                self.run.save_phase(name, self.head)
            self.save()
        if self.stop:
            raise KeyboardInterrupt

    def _log(self, name: str, meter: "_Meter", rate: float, task: TaskID) -> None:
        """Write what happened since the last row, and show it."""
        row: dict[str, Any] = {"step": self.at.step, "phase": name, "tokens": self.at.tokens}
        row |= meter.take(self.accelerator) | {"learning_rate": rate}
        _refuse_divergence(row)
        if self.accelerator.is_main_process:
            self.tracker.log(row)
        self.bar.update(task, numbers=_describe(row))

    def _world_tokens(self, batch: TokenBatch) -> int:
        return batch.tokens.numel() * self.accelerator.num_processes

    def _step(self, batch: TokenBatch, phase: Phase, share: float) -> losses.DepthLoss:
        tokens = batch.tokens.to(self.base.device)
        features = self.base.read(tokens, self.head.taps)
        scored = self._scored(batch, phase).to(self.base.device)
        project = None if phase.loss in losses.LABELS_ONLY else self.project
        loss = self.objective(features, tokens, scored, project, phase)
        self.accelerator.backward(loss.total)
        self.accelerator.clip_grad_norm_(self.head.parameters(), self.schedule.clip_norm)
        peaks = [phase.learning_rate, self.schedule.muon_learning_rate]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * peaks[group["is_muon"]]
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def _scored(self, batch: TokenBatch, phase: Phase) -> Bool[Tensor, "batch time"]:
        """Return which labels the loss covers: counted, and predicted by every depth."""
        scored = batch.counted.clone()
        # the first labels have no position early enough for the deepest head
        scored[:, : self.head.depth + 1] = False
        if phase.scored_share < 1.0:
            # drawn from the step's number, so that a resumed run draws the same
            generator = torch.Generator().manual_seed(
                (self.seed * 1_009 + self.accelerator.process_index) * 10_000_019 + self.at.step
            )
            drawn = torch.rand(scored.shape, generator=generator) < phase.scored_share
            scored &= drawn
        return scored

    def save(self) -> None:
        """Write a checkpoint on the main process; every process waits for it."""
        cursors = gather_object([self.at.cursor])
        if self.accelerator.is_main_process:
            state = {"step": self.at.step, "tokens": self.at.tokens, "cursors": cursors}
            optimizer = {
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "random": torch.get_rng_state(),
            }
            self.run.save_checkpoint(state, self.head.state_dict(), optimizer)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        found = self.run.load_checkpoint()
        if found is None:
            return
        state, weights, saved = found
        cursors, processes = state["cursors"], self.accelerator.num_processes
        if len(cursors) != processes:
            raise ValueError(
                f"a run resumes with as many processes as wrote it: {len(cursors)} then, "
                f"{processes} now; launch {len(cursors)}"
            )
        place = cursors[self.accelerator.process_index]
        self.at = Progressed(state["step"], state["tokens"], place)
        self.head.load_state_dict(weights)
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        torch.set_rng_state(saved["random"])

    @contextmanager
    def _stopping_cleanly(self) -> Iterator[None]:
        """Turn an interrupt into a request to stop after the step at hand.

        Only while steps are made: text is written shard by shard, and may be cut off at once.
        """

        def ask(number: int, frame: Any) -> None:
            del number, frame
            self.stop = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Meter:
    """Sums up what happened since the last row, on the device, read once a row."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self.sums = torch.zeros(1 + 2 * depth, device=device)
        self.steps, self.tokens, self.since = 0, 0, time.perf_counter()

    def add(self, loss: losses.DepthLoss, tokens: int) -> None:
        self.sums += torch.cat([loss.total.detach()[None], loss.by_depth, loss.agreement])
        self.steps += 1
        self.tokens += tokens

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Return means since the last call, over all processes, and begin again."""
        reduced = accelerator.reduce(self.sums / self.steps, reduction="mean")
        assert isinstance(reduced, Tensor)
        means = reduced.tolist()
        now, depth = time.perf_counter(), len(means) // 2
        row = {"loss": means[0]}
        row |= {f"loss/depth_{level}": means[1 + level] for level in range(depth)}
        row |= {f"accept/depth_{level}": means[1 + depth + level] for level in range(depth)}
        row["tokens_per_second"] = self.tokens / (now - self.since)
        self.sums.zero_()
        self.steps, self.tokens, self.since = 0, 0, now
        return row


def _refuse_divergence(row: dict[str, Any]) -> None:
    if not math.isfinite(row["loss"]):
        raise ValueError(
            f"training needs a finite loss, got {row['loss']} at step {row['step']}; lower "
            "learning_rate"
        )


def _describe(row: dict[str, Any]) -> str:
    accepted = (value for name, value in row.items() if name.startswith("accept/"))
    return (
        f"loss {row['loss']:.3f}  accept {' '.join(f'{value:.2f}' for value in accepted)}  "
        f"{row['tokens_per_second']:,.0f} tokens/s"
    )
