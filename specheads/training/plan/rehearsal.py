"""Real steps of training and writing on tensors without content: what they would hold at most."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specheads.base.model import FrozenBase
from specheads.config import Distill, Phase, Train
from specheads.core.drafter import Head
from specheads.core.weight_layout import packed_bytes
from specheads.data.packing import TokenBatch
from specheads.heads.load import build
from specheads.training import schedule as schedules
from specheads.training.losses.depth_loss import BLOCK_LOGITS, CHUNK_LOGITS
from specheads.training.plan.heap import Heap
from specheads.training.plan.ledger import BASE, GRADIENTS, HEAD, OPTIMIZER, Ledger
from specheads.training.teacher import teacher_of
from specheads.training.trainer import steps_alone

PACKED = "base weights, packed once more"
DRAFTER = "drafter while text is written"
KEYS = "keys and values"
CHUNK = 512
"""Tokens of a prompt that are read at once."""

DOCUMENTS = 2
"""Documents that a row of best fit is taken to hold: more than one have to be masked."""

Parts = dict[str, int]
"""Bytes of each part."""


class _Alone(Accelerator):
    """One process that moves and wraps nothing: tensors without content are nowhere."""

    num_processes = 1  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def prepare_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return model

    def prepare_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> Any:
        return optimizer

    def backward(self, loss: Any, **_: Any) -> None:
        loss.backward()

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, *_: Any, **__: Any) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


class Rehearsal:
    """A training whose tensors have shapes and no content.

    Args:
        settings: Of the run.
        config: Of the base.
        dtype: Of the base's weights.
        device: Kind of device that is meant, cpu or cuda; nothing is put there.
    """

    def __init__(
        self,
        settings: Train,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.settings, self.device = settings, device
        accelerator = _Alone(cpu=not torch.accelerator.is_available())
        self._bf16 = device != "cpu" or accelerator.mixed_precision == "bf16"
        self._ledger = Ledger(Heap() if device == "cpu" else None)
        with self._fake() as ledger:
            with ledger.part(BASE):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=settings.base.attention
                )
                # what is loaded was tried before; here there is nothing to try
                self.base = FrozenBase(model.eval().requires_grad_(False), owned=False)
            with ledger.part(HEAD):
                self.head = self._made()
                self.head.choose_aux_layers(self.base.num_layers)
            adapter = schedules.adapter_settings(settings.schedule)
            self.teacher = teacher_of(self.base, self.head, adapter, settings.seed)
            self._step, self.optimizers = steps_alone(
                self.teacher, settings.schedule, accelerator, settings.seed
            )
        self.flops = 0
        """Of the step that was rehearsed last."""
        self.packs = packed_bytes(self.base.model) if device == "cpu" else 0
        learned = [*self.head.parameters(), *self.teacher.parameters]
        self.learned = [one for one in learned if one.requires_grad]

    def fresh(self) -> "Rehearsal":
        """Forget what earlier steps left in memory, and go on."""
        self._ledger.fresh()
        return self

    def step(self, phase: schedules.PlacedPhase, rows: int) -> Parts:
        """Return what a process holds at most in a step of a phase, of so many rows."""
        settings, length = phase.settings, length_of(phase.settings)
        counter = FlopCounterMode(display=False)
        with self._fake() as ledger:
            with ledger.part(HEAD):
                self.teacher.begin(phase)
            counted = range(settings.distill.prompt_tokens if settings.distill else 0, length)
            part = -(-rows // settings.accumulation_steps)
            # a third part finds memory as the second one did
            parts = min(settings.accumulation_steps, 2)
            phase = replace(phase, settings=replace(settings, accumulation_steps=parts))
            ledger.rows = round(
                part * min(len(counted), length - self.head.depth - 1) * settings.scored_share
            )
            hooks = [
                one.register_post_accumulate_grad_hook(self._own_gradient) for one in self.learned
            ]
            batch = synthetic(parts * part, length, settings, self.head)
            with counter:
                self._step(batch, phase)
            self.flops = counter.get_total_flops() * settings.accumulation_steps // parts
            self._own_state()
            # what optimizers keep is there from the second step on
            self._step(batch, phase)
            for one in hooks:
                one.remove()
            ledger.rows = None
            return self._parts()

    def write(self, distill: Distill) -> Parts:
        """Return what is held at most while the base writes text here, with a drafter if it may.

        The engine itself is not rehearsed: a batch of prompts is read beside keys and values, which
        are there twice, as while rows join.
        """
        batch, length = distill.batch_size, longest_of(distill)
        drafts = distill.use_head.lower() != "false"
        with self._fake() as ledger, self.teacher.as_loaded(), torch.no_grad():
            with ledger.part(DRAFTER):
                # not a copy: torch 2.13 damages its memory when copies of fake tensors go
                drafter = self._made().requires_grad_(False) if drafts else None
                room = batch, length + 2 * self.head.depth
                held: list[Any] = [drafter.memory(*room) for _ in range(2)] if drafter else []
            with ledger.part(KEYS):
                slots = 2 * batch * (length + 2 * self.head.depth)
                held.append(torch.empty(slots * self.base.slot_bytes, dtype=torch.uint8))
            prompts = torch.zeros(batch, min(distill.prompt_tokens, CHUNK), dtype=torch.long)
            features = self.base.read(prompts, self.head.aux_layers)
            held.append(self.base.projection(features.hidden[:, -1]))
            parts = self._parts()
        packs = packed_bytes(self.head) if drafts and self.device == "cpu" else 0
        return parts | {DRAFTER: parts.get(DRAFTER, 0) + packs}

    def _made(self) -> Head:
        sizes = {"width": self.base.width, "vocab_size": self.base.vocab_size}
        return build(self.settings.head, **sizes)

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """Bytes of the head, and of what optimizers keep, as they are saved."""
        head = sum(value.nbytes for value in self.head.state_dict().values())
        states = [held for one in self.optimizers for held in one.state.values()]
        return head, sum(value.nbytes for held in states for value in held.values())

    def _own_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._ledger.belongs(parameter.grad, GRADIENTS)

    def _own_state(self) -> None:
        for optimizer in self.optimizers:
            for held in optimizer.state.values():
                for value in held.values():
                    self._ledger.belongs(value, OPTIMIZER)

    def _parts(self) -> Parts:
        packs = {PACKED: self.packs} if self.packs else {}
        return self._ledger.peak() | packs

    @contextmanager
    def _fake(self) -> Iterator[Ledger]:
        """Compute with shapes only, in the chunks that the device would take."""
        before = [(table, table["cpu"]) for table in (CHUNK_LOGITS, BLOCK_LOGITS)]
        try:
            for table, _ in before:
                table["cpu"] = table.get(self.device, table["cuda"])
            precise = torch.autocast("cpu", torch.bfloat16, enabled=self._bf16)
            with self._ledger.open() as ledger, precise:
                yield ledger
        finally:
            for table, size in before:
                table["cpu"] = size


def length_of(phase: Phase) -> int:
    """Return the tokens of a row, at most."""
    return phase.sequence_length or (longest_of(phase.distill) if phase.distill else 0)


def longest_of(distill: Distill) -> int:
    """Return the tokens of a text that is continued, at most."""
    return distill.prompt_tokens + distill.new_tokens


def synthetic(rows: int, length: int, phase: Phase, head: Head) -> TokenBatch:
    """Return a batch of the shape of a phase's, of tokens that the head can draft."""
    drafted = torch.randint(head.drafted_size, (rows, length), device="cpu")
    tokens = drafted if head.draft_ids is None else head.draft_ids.cpu()[drafted]
    counted = torch.ones(rows, length, dtype=torch.bool)
    if phase.distill is not None:
        counted[:, : phase.distill.prompt_tokens] = False
    documents = None
    if phase.packing == "best_fit" and phase.distill is None:
        documents = (torch.arange(length) * DOCUMENTS // length).expand(rows, -1).contiguous()
    return TokenBatch(tokens, counted, documents)
