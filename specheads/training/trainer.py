"""The one training loop over phases. accelerate lives here and nowhere below."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Bool
from rich.progress import Progress, TaskID
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config import Phase, Schedule
from specheads.core.drafter import Features, Head
from specheads.data.packing import Text, TokenBatch
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker
from specheads.training.joint import JointBase, average_gradients, head_weight
from specheads.training.log import Meter, describe, figures, progress_bar, refuse_divergence
from specheads.training.losses.depth_loss import LABELS_ONLY, DepthLoss, whole_chains
from specheads.training.objective import Objective
from specheads.training.schedule import (
    adapter_settings,
    learning_rate_share,
    optimizers,
    peak_rates,
)
from specheads.training.signals import on_interrupt

OpenText = Callable[[Phase, Progress], Text]
"""Gives a phase its text when it begins, so that text can be written then, with progress."""


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
        base: Reads the text and gives its law. Its weights are never changed: what joint phases
            teach it is saved as an adapter in the run directory, and taken out of it at the end.
        head: Trained in place, and saved in the run directory after each phase.
        schedule: Phases, in order, and the optimizer's settings.
        open_text: Gives each phase its text.
        run: Holds checkpoints and phases.
        tracker: Where rows of metrics go, on the main process.
        accelerator: Made by the caller.
        seed: Of the positions that are scored, and of the adapter.
        log_every: Steps between two rows.
        checkpoint_every: Steps between two checkpoints; zero keeps those at phase ends only.

    Raises:
        ValueError: The loss is no longer finite, or the newest checkpoint was written by another
            number of processes. Joint phases disagree about their adapter, or the base has no
            layers for it.
    """
    trainer = _Trainer(base, head, schedule, run, tracker, accelerator, seed, log_every)
    try:
        trainer.resume()
        first = 0
        with trainer.bar:
            for name, phase in schedule.phases.items():
                if trainer.at.step < first + phase.steps:
                    trainer.run_phase(name, phase, first, open_text, checkpoint_every)
                first += phase.steps
    finally:
        if trainer.tuned is not None:
            trainer.tuned.adapter.remove()


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
        joint = adapter_settings(schedule)
        self.tuned = JointBase(base, joint, seed) if joint else None
        self.learned = self.tuned.adapter.parameters if self.tuned else []
        self.optimizers = [
            accelerator.prepare_optimizer(optimizer)
            for optimizer in optimizers(head, schedule, self.learned)
        ]
        self.objective = accelerator.prepare_model(Objective(head.train()))
        self.project = base.projection.rows(head.draft_ids)
        self.at = Progressed()
        self.stop = False
        self.bar = progress_bar(shown=accelerator.is_main_process)

    def run_phase(
        self, name: str, phase: Phase, first: int, open_text: OpenText, checkpoint_every: int
    ) -> None:
        """Train from wherever the phase stands to its end."""
        text = self._open(phase, open_text)
        task = self.bar.add_task(
            name, total=phase.steps, completed=self.at.step - first, numbers=""
        )
        meter = Meter()
        batches = text.batches(self.at.cursor)
        end = first + phase.steps
        if self.tuned is not None:
            self.tuned.adapter.learn(phase.joint is not None)
        self._follow_base()
        with on_interrupt(self._ask_to_stop):
            while self.at.step < end:
                batch, self.at.cursor = next(batches)
                meter.add(self._step(batch, phase, first), self._world_tokens(batch))
                self.at.step += 1
                self.at.tokens += self._world_tokens(batch)
                if self.at.step % self.log_every == 0 or self.at.step == end:
                    self._log(name, phase, first, meter, task)
                self.bar.update(task, completed=self.at.step - first)
                due = checkpoint_every and self.at.step % checkpoint_every == 0
                if self.at.step < end and (due or self.stop):
                    self.save()
                if self.at.step < end and self.stop:
                    raise KeyboardInterrupt
            self.at.cursor = None
            if self.accelerator.is_main_process:
                self.run.save_phase(name, self.head)
                if self.tuned and phase.joint:
                    self.run.save_adapter(self.tuned.adapter)
            self.save()
        if self.stop:
            raise KeyboardInterrupt

    def _open(self, phase: Phase, open_text: OpenText) -> Text:
        """Return the phase's text; what the base writes for it, it writes without an adapter."""
        if self.tuned is None:
            return open_text(phase, self.bar)
        with self.tuned.adapter.off():
            return open_text(phase, self.bar)

    def _log(self, name: str, phase: Phase, first: int, meter: Meter, task: TaskID) -> None:
        """Write what happened since the last row, and show it."""
        row: dict[str, Any] = {"step": self.at.step, "phase": name, "tokens": self.at.tokens}
        row |= meter.take(self._mean)
        share = learning_rate_share(self.at.step - 1 - first, phase)
        row["learning_rate"] = share * phase.learning_rate
        if phase.joint:
            row["learning_rate/base"] = share * phase.joint.learning_rate
        refuse_divergence(row)
        if self.accelerator.is_main_process:
            self.tracker.log(row)
        self.bar.update(task, numbers=describe(row))

    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes."""
        mean = self.accelerator.reduce(values, reduction="mean")
        assert isinstance(mean, Tensor)
        return mean

    def _world_tokens(self, batch: TokenBatch) -> int:
        return batch.tokens.numel() * self.accelerator.num_processes

    def _step(self, batch: TokenBatch, phase: Phase, first: int) -> dict[str, Tensor]:
        """Make one optimizer step; return what is logged of it."""
        tokens = batch.tokens.to(self.base.device)
        drawn = self._drawn(batch, phase).to(self.base.device)
        if phase.joint and self.tuned:
            total, values = self._joint_loss(self.tuned, phase, tokens, drawn, first)
        else:
            loss = self._head_loss(
                self.base.read(tokens, self.head.aux_layers), tokens, drawn, phase
            )
            total, values = loss.total, figures(loss)
        self.accelerator.backward(total)
        average_gradients(self.learned, self._mean)
        trained = [*self.head.parameters(), *self.learned]
        self.accelerator.clip_grad_norm_(trained, self.schedule.clip_norm)
        share = learning_rate_share(self.at.step - first, phase)
        peaks = peak_rates(phase, self.schedule)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * peaks[group["role"]]
            optimizer.step()
            optimizer.zero_grad()
        return values

    def _head_loss(
        self, features: Features, tokens: Tensor, drawn: Tensor, phase: Phase
    ) -> DepthLoss:
        scored = drawn.clone()
        # the first labels have no position early enough for the deepest head
        scored[:, : self.head.depth + 1] = False
        project = None if phase.loss in LABELS_ONLY else self.project
        return self.objective(features, tokens, scored, project, phase)

    def _joint_loss(
        self, tuned: JointBase, phase: Phase, tokens: Tensor, drawn: Tensor, first: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the base's own loss plus the weighted loss of the head, and what to log."""
        assert phase.joint is not None
        # dropout is drawn from the step's number, so that a resumed run draws the same
        torch.manual_seed(self._draw())
        features, own = tuned.read(tokens, self.head.aux_layers, drawn, phase.joint)
        self._follow_base()
        loss = self._head_loss(features, tokens, drawn, phase)
        weight = head_weight(phase.joint, (self.at.step - first) / max(phase.steps - 1, 1))
        total = own + weight * loss.total
        values = {"loss": total, "loss/base": own, "head_weight": torch.full_like(own, weight)}
        return total, figures(loss) | {name: value.detach() for name, value in values.items()}

    def _follow_base(self) -> None:
        """Take up the base's law as it is now: what a head learns from, and what it borrows."""
        projection = self.base.projection
        self.project = projection.rows(self.head.draft_ids)
        self.head.bind(self.base.embedding, projection.scaled_weight)

    def _drawn(self, batch: TokenBatch, phase: Phase) -> Bool[Tensor, "batch time"]:
        """Return which labels the losses cover, drawn among the counted ones."""
        counted = batch.counted
        if phase.weighting == "dpace":
            counted = whole_chains(counted, self.head.depth)
        if phase.scored_share == 1.0:
            return counted
        # drawn from the step's number, so that a resumed run draws the same
        generator = torch.Generator().manual_seed(self._draw())
        drawn = torch.rand(counted.shape, generator=generator) < phase.scored_share
        return counted & drawn

    def _draw(self) -> int:
        """Return a seed of this step and process."""
        rank = self.accelerator.process_index
        return (self.seed * 1_009 + rank) * 10_000_019 + self.at.step

    def save(self) -> None:
        """Write a checkpoint on the main process; every process waits for it."""
        cursors = gather_object([self.at.cursor])
        if self.accelerator.is_main_process:
            state = {"step": self.at.step, "tokens": self.at.tokens, "cursors": cursors}
            optimizer = {
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "random": torch.get_rng_state(),
            }
            adapter = self.tuned.adapter.weights() if self.tuned else None
            self.run.save_checkpoint(state, self.head.state_dict(), optimizer, adapter)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        found = self.run.load_checkpoint()
        if found is None:
            return
        state, weights, saved, adapter = found
        cursors, processes = state["cursors"], self.accelerator.num_processes
        if len(cursors) != processes:
            raise ValueError(
                f"a run resumes with as many processes as wrote it: {len(cursors)} then, "
                f"{processes} now; launch {len(cursors)}"
            )
        place = cursors[self.accelerator.process_index]
        self.at = Progressed(state["step"], state["tokens"], place)
        self.head.load_state_dict(weights)
        if self.tuned is not None:
            self.tuned.adapter.load(adapter)
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        torch.set_rng_state(saved["random"])

    def _ask_to_stop(self) -> None:
        self.stop = True
