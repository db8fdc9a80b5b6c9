"""Memory of a step from shapes alone, for a device or weights that this machine does not have."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specheads.base.gguf import located
from specheads.base.loading import load_config
from specheads.base.model import FrozenBase
from specheads.config import Base, Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.packing import TokenBatch
from specheads.heads.load import build, load_head
from specheads.training import optimizers
from specheads.training import schedule as schedules
from specheads.training.distill.engines.local import REFILL
from specheads.training.objective import Objective, label_counts
from specheads.training.plan.ledger import KEYS, FusedAttention, Ledger
from specheads.training.schedule import PlacedPhase, row_tokens, text_tokens
from specheads.training.settings import Distill, Phase
from specheads.training.teacher import Step, Teacher

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Target:
    """Device and base of a planned run."""

    device: torch.device
    is_here: bool
    """Whether this machine has the device."""
    source: str
    """Folder or Hub id of the base."""
    config: PreTrainedConfig
    dtype: torch.dtype
    has_weights: bool
    """Whether the base's weights are on this machine."""

    @property
    def kind(self) -> str:
        """Kind of memory: cpu, or cuda for every other device."""
        return "cpu" if self.device.type == "cpu" else "cuda"


def target_of(base: Base, accelerator: Accelerator) -> Target:
    """Return device and config of a base; reads its config.json only."""
    name = str(accelerator.device) if base.device == "auto" else base.device
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"base.device must name a torch device, got {name!r:.80}; use cpu, cuda, or auto"
        ) from error
    source = located(base.model)
    config = load_config(source, revision=base.revision)
    half = device.type != "cpu" and base.dtype == "auto"
    dtype = getattr(torch, "bfloat16" if half else base.dtype.replace("auto", "float32"))
    has_weights = _has_weights(source, base.revision)
    return Target(device, _is_here(device), source, config, dtype, has_weights)


def _is_here(device: torch.device) -> bool:
    try:
        return torch.empty(0, device=device).device.type != "meta"
    except (AssertionError, ImportError, NotImplementedError, RuntimeError):
        return False


def _has_weights(source: str, revision: str) -> bool:
    folder = Path(source)
    if folder.is_dir():
        return any(folder.glob("*.safetensors"))
    found = (try_to_load_from_cache(source, name, revision=revision) for name in WEIGHTS)
    return any(isinstance(one, str) for one in found)


BASE_WEIGHTS, HEAD_WEIGHTS = "base weights", "head weights"
GRADIENTS, OPTIMIZER = "gradients", "optimizer state"
DRAFTER = "drafter while text is written"
LEARNED_BYTES = 4
"""Bytes of a trained number, its gradient, and each moment: all are float32."""

DOCUMENTS = 3
"""Assumed documents per row of best-fit packing."""

MANY_ROWS = 64, 128
"""Two step sizes whose difference gives the memory per row."""

Parts = dict[str, int]
"""Bytes of each part."""


class Shapes:
    """A training on the meta device, where tensors have shapes and no content.

    The head computes in the base's dtype, as in mixed precision.
    """

    def __init__(self, settings: Train, target: Target) -> None:
        self.settings = settings
        init = load_head(settings.init) if settings.init else None
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                target.config,
                dtype=target.dtype,
                attn_implementation=settings.base.attention,
                trust_remote_code=False,
            )
            # no checks of the attention: there are no values to compare
            self.base = FrozenBase(model.eval().requires_grad_(False), owned=False)
            sizes = {"width": self.base.width, "vocab_size": self.base.vocab_size}
            self.head = build(settings.head, **sizes) if init is None else init.to("meta")
        self.head.to(target.dtype)
        self.head.choose_aux_layers(self.base.num_layers)
        adapter = schedules.adapter_settings(settings.schedule)
        self.teacher = Teacher(self.base, self.head, adapter, settings.seed)
        self.objective = Objective(self.head.train())

    def weights(self) -> Parts:
        """Return the memory that does not depend on the batch."""
        size = self.base.dtype.itemsize
        # mixed precision keeps a second copy during a step
        cast = self.gradients // LEARNED_BYTES * size if size < LEARNED_BYTES else 0
        return {
            BASE_WEIGHTS: stored(self.base.model.parameters()),
            HEAD_WEIGHTS: self.saved_bytes + cast,
            OPTIMIZER: self.moments,
        }

    @property
    def saved_bytes(self) -> int:
        """Bytes of the head."""
        return LEARNED_BYTES * sum(value.numel() for value in self.head.state_dict().values())

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        learned = [*self.head.parameters(), *self.teacher.parameters]
        return LEARNED_BYTES * sum(one.numel() for one in learned if one.requires_grad)

    @property
    def moments(self) -> int:
        """Bytes that the optimizers keep: two moments of AdamW, one of Muon."""
        roles = optimizers.roles(self.head, self.settings.schedule, self.teacher.parameters)
        return LEARNED_BYTES * sum(
            (1 if role == "hidden" else 2) * sum(one.numel() for one in parameters)
            for role, parameters in roles.items()
        )

    def step(self, phase: PlacedPhase, rows: int) -> Parts:
        """Return the peak of a process in a step with `rows` rows, before the optimizer."""
        self.teacher.begin(phase)
        settings = phase.settings
        length = row_tokens(settings, self.settings.data, self.base.max_length)
        parts = settings.accumulation_steps
        batch = made_up(-(-rows // parts), length, settings, self.head).to(torch.device("meta"))
        loss_mask = batch.loss_mask
        learned = [*self.head.parameters(), *self.teacher.parameters]
        with FusedAttention(), Ledger(int(loss_mask.numel() * settings.scored_share)) as ledger:
            # with several parts the second one runs next to the gradients of the first
            for _ in range(min(parts, 2)):
                counts = label_counts(
                    self.head, batch.tokens, batch.document_ids, loss_mask, settings
                )
                step = Step(phase, phase.first, 0, batch, loss_mask, counts)
                self.teacher.losses(step, self.objective)[0].backward()
        for one in learned:
            if one.grad is not None:
                ledger.belongs(one.grad, GRADIENTS)
                one.grad = None
        found = ledger.peak
        found[GRADIENTS] = found.get(GRADIENTS, 0) * LEARNED_BYTES // self.base.dtype.itemsize
        return self.weights() | found

    def row_bytes(self, phase: PlacedPhase) -> int:
        """Return the memory of one more row, in steps so large that the loss works in chunks."""
        few, many = (sum(self.step(phase, rows).values()) for rows in MANY_ROWS)
        return max(1, (many - few) // (MANY_ROWS[1] - MANY_ROWS[0]))

    def write(self, distill: Distill) -> Parts:
        """Return the peak of text generation, with a drafter if the settings allow one."""
        drafts = distill.use_head.lower() != "false"
        prompts = torch.empty(distill.batch_size, distill.prompt_tokens, dtype=torch.long)
        with self.teacher.as_loaded(), FusedAttention(), Ledger() as ledger:
            self.base.read(prompts.to("meta"), self.head.aux_layers)
        # new texts have their own rows until they are copied into the batch
        rows = distill.batch_size + distill.batch_size // REFILL
        slots = rows * (text_tokens(distill) + 2 * self.head.depth)
        copy = stored(self.head.parameters()) if drafts else 0
        return self.weights() | ledger.peak | {KEYS: slots * self.base.slot_bytes, DRAFTER: copy}


def stored(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; a shared storage counts once."""
    # the local shard of a sharded base
    own = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in own}
    return sum(one.nbytes() for one in storages.values())


def made_up(rows: int, length: int, phase: Phase, head: Head) -> TokenBatch:
    """Return a random batch of a phase's shape, with tokens from the draft vocabulary."""
    drafted = torch.randint(head.drafted_size, (rows, length), device="cpu")
    known = head.draft_ids
    tokens = drafted if known is None or known.is_meta else known.cpu()[drafted]
    loss_mask = torch.ones(rows, length, dtype=torch.bool, device="cpu")
    if phase.distill is not None and phase.answers_only:
        loss_mask[:, : phase.distill.prompt_tokens] = False
    document_ids = None
    if phase.packing == "best_fit" and phase.distill is None:
        ends = torch.rand(rows, DOCUMENTS - 1).sort(dim=1).values * length
        document_ids = (torch.arange(length)[None, :, None] >= ends[:, None]).sum(-1)
    return TokenBatch(tokens, loss_mask, document_ids)
