"""Memory of a training step from shapes alone, on torch's meta device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.base.gguf import located
from specheads.base.loading import load_config
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.packing import TokenBatch
from specheads.data.settings import Data
from specheads.heads.load import build, load_head
from specheads.training import optimizers
from specheads.training import schedule as schedules
from specheads.training.cost import flop_counter
from specheads.training.distill.engines.local import REFILL
from specheads.training.objective import Objective, label_counts
from specheads.training.schedule import PlacedPhase, row_tokens, text_tokens
from specheads.training.settings import Distill, Phase, Schedule
from specheads.training.teacher import Step, Teacher

LEARNED_BYTES = 4
"""Bytes of a trained number, its gradient, and each moment: all are float32."""

DOCUMENTS = 3
"""Assumed documents per row of best-fit packing."""

Parts = dict[str, int]
"""Bytes of each part."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training to plan."""

    base: dict[str, Any]
    """Arguments of `FrozenBase.load`."""
    head: dict[str, Any]
    """`kind` of the head and its settings."""
    init: str
    """Folder or Hub id of a head to start from; empty starts from random weights."""
    schedule: Schedule
    data: Data
    seed: int
    validation_rows: int = 0
    caches_features: bool = False
    """Whether the run stores the base's features on disk."""

    def batch(self, phase: Phase, rows: int, base: FrozenBase, head: Head) -> TokenBatch:
        """Return a random batch of a phase, with tokens from the draft vocabulary."""
        length = row_tokens(phase, self.data, base.max_length)
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


def device_of(base: dict[str, Any], accelerator: Accelerator) -> torch.device:
    """Return the device of a base, which this machine need not have."""
    name = str(accelerator.device) if base["device"] == "auto" else base["device"]
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"base.device must name a torch device, got {name!r:.80}; use cpu, cuda, or auto"
        ) from error


class Shapes:
    """A training on the meta device, where tensors have shapes and no content.

    The head computes in the base's dtype, as in mixed precision.
    """

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.setup, base = setup, setup.base
        config = load_config(located(base["model"]), revision=base["revision"])
        auto = "float32" if device.type == "cpu" else "bfloat16"
        dtype = getattr(torch, base["dtype"].replace("auto", auto))
        init = load_head(setup.init) if setup.init else None
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
            # no checks of the attention: there are no values to compare
            self.base = FrozenBase(model.eval().requires_grad_(False), owned=False)
            sizes = {"width": self.base.width, "vocab_size": self.base.vocab_size}
            self.head = build(setup.head, **sizes) if init is None else init.to("meta")
        self.head.to(dtype)
        self.head.choose_aux_layers(self.base.num_layers)
        adapter = schedules.adapter_settings(setup.schedule)
        self.teacher = Teacher(self.base, self.head, adapter, setup.seed)
        self.objective = Objective(self.head.train())
        learned = [*self.head.parameters(), *self.teacher.parameters]
        self.learned = [one for one in learned if one.requires_grad]
        self.row_flops: dict[str, float] = {}
        """FLOPs of a sequence in a step of each phase."""

        roles = optimizers.roles(self.head, setup.schedule, self.teacher.parameters)
        # AdamW has two moments of a number, and Muon one
        self.moments = LEARNED_BYTES * sum(
            (1 if role == "hidden" else 2) * sum(one.numel() for one in parameters)
            for role, parameters in roles.items()
        )
        """Bytes that the optimizers keep."""
        numbers = self.head.state_dict().values()
        self.saved_bytes = LEARNED_BYTES * sum(one.numel() for one in numbers)
        """Bytes of the head."""

    def weights(self) -> Parts:
        """Return the memory that does not depend on the batch."""
        size = self.base.dtype.itemsize
        # mixed precision keeps a second copy during a step
        cast = size * sum(one.numel() for one in self.learned) if size < LEARNED_BYTES else 0
        return {
            "base weights": stored(self.base.model.parameters()),
            "head weights": self.saved_bytes + cast,
            "optimizer state": self.moments,
        }

    def step(self, phase: PlacedPhase, rows: int) -> Parts:
        """Return the peak of a process in a step with `rows` rows, before the optimizer."""
        self.teacher.begin(phase)
        settings, parts = phase.settings, phase.settings.accumulation_steps
        rows = -(-rows // parts)
        batch = self.setup.batch(settings, rows, self.base, self.head)
        batch = batch.to(torch.device("meta"))
        loss_mask = batch.loss_mask
        counted = int(loss_mask.numel() * settings.scored_share)
        with FusedAttention(), PeakMemory(counted) as memory, flop_counter() as counter:
            # with several parts the second one runs next to the gradients of the first
            for _ in range(min(parts, 2)):
                counts = label_counts(
                    self.head, batch.tokens, batch.document_ids, loss_mask, settings
                )
                step = Step(phase, phase.first, 0, batch, loss_mask, counts)
                self.teacher.losses(step, self.objective)[0].backward()
        self.row_flops[phase.name] = counter.get_total_flops() / (min(parts, 2) * rows)
        gradients = memory.at_peak(one.grad for one in self.learned if one.grad is not None)
        for one in self.learned:
            one.grad = None
        return self.weights() | {
            "gradients": gradients * LEARNED_BYTES // self.base.dtype.itemsize,
            "activations and logits": memory.peak - gradients,
        }

    def text(self, distill: Distill) -> Parts:
        """Return the peak of text generation, with a drafter if the settings allow one."""
        prompts = torch.empty(distill.batch_size, distill.prompt_tokens, dtype=torch.long)
        with self.teacher.as_loaded(), FusedAttention(), PeakMemory() as memory:
            self.base.read(prompts.to("meta"), self.head.aux_layers)
        # new texts have their own rows until they are copied into the batch
        rows = distill.batch_size + distill.batch_size // REFILL
        slots = rows * (text_tokens(distill) + 2 * self.head.depth)
        return self.weights() | {
            "keys and values": slots * self.base.slot_bytes,
            "drafter": stored(self.head.parameters()) if distill.use_head else 0,
            "activations and logits": memory.peak,
        }


def stored(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; a shared storage counts once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


class PeakMemory(TorchDispatchMode):
    """Tracks the storages that are created and alive inside the context.

    On the meta device tensors have no content: a mask selects `rows` elements, and values are one.
    """

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self.peak = 0
        """Highest sum of the bytes."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_peak: dict[int, tuple[StorageWeakRef, int]] = {}

    def at_peak(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes at the peak that belong to tensors that are still alive."""
        keys = {_key(one) for one in tensors}
        found = [self._alive[key] for key in keys if key in self._alive]
        return sum(one[1] for one in found if self._at_peak.get(one[0].cdata) is one)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record new storages in its result."""
        del types
        given = _stored((args, kwargs))
        is_meta = bool(given) and given[0].is_meta
        if is_meta and func is torch.ops.aten.nonzero.default:
            rows = min(self.rows, given[0].numel())
            out = torch.empty((rows, given[0].ndim), dtype=torch.long, device="meta")
        elif is_meta and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if given[0].is_floating_point() else 1
        else:
            out = func(*args, **(kwargs or {}))
        # views and in-place results share a storage with the arguments
        known = {_key(one) for one in given} | self._alive.keys()
        for one in _stored(out):
            if _key(one) not in known:
                self._add(one)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self._alive[_key(tensor)] = StorageWeakRef(storage), storage.nbytes()
        now = sum(size for _, size in self._alive.values())
        if now > self.peak:
            self.peak, self._at_peak = now, dict(self._alive)


def _stored(values: Any) -> list[Tensor]:
    """Return the tensors among some values that have a torch storage."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [one for one in tensors if torch._C._has_storage(one)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FusedAttention(TorchFunctionMode):
    """Makes attention on the meta device allocate as the fused kernels do.

    Otherwise it would use the math kernel, which stores the whole attention matrix.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function."""
        del types
        is_attention = func is F.scaled_dot_product_attention and args[0].is_meta
        return (_fused if is_attention else func)(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    enable_gqa: bool = False,
    **__: Any,
) -> Tensor:
    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    bias = None
    if attn_mask is not None:
        # kernels add it as a bias
        bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    learns = torch.is_grad_enabled() and query.requires_grad
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, learns)[
        0
    ]
