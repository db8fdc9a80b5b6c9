"""Memory and FLOPs of a training, computed from shapes on torch's meta device.

See docs/scale.md.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from specheads.base.ends import BaseEnds, ServedBase
from specheads.base.file_checks import attention_of, auto_class
from specheads.base.gguf import load_path
from specheads.base.loading import load_config
from specheads.base.model import FrozenBase
from specheads.base.recurrent import refuse_unserved
from specheads.config.commands import Train
from specheads.config.shared import BaseSettings
from specheads.config.training import DistillSettings, Phase
from specheads.core.drafter import Head
from specheads.core.features import Features
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_head, choose_layers, head_sizes, load_head
from specheads.training.distill.engines import REFILL
from specheads.training.features import (
    FETCHED_BATCHES,
    FeatureSource,
    features_of,
    server_layers,
    server_token_bytes,
)
from specheads.training.objective import Objective, draft_labels
from specheads.training.schedule import (
    ScheduledPhase,
    adapter_settings,
    roles,
    row_tokens,
    text_tokens,
)
from specheads.training.step import MicroBatch, Teacher, compute_loss

FLOAT32_BYTES = 4
"""Bytes of a trained number, its gradient, and each moment."""
DOCUMENTS_PER_ROW = 3
"""Assumed documents of a row of best-fit packing."""


def random_batch(
    settings: Train, phase: Phase, rows: int, base: BaseEnds, head: Head
) -> TokenBatch:
    """Return a random batch of a phase, with tokens from the draft vocabulary."""
    shape = rows, row_tokens(phase, settings.data, base.max_length)
    tokens = head.to_tokens(torch.randint(head.drafted_size, shape, device=base.device))
    loss_mask = torch.ones_like(tokens, dtype=torch.bool)
    if phase.distill is not None and phase.answers_only:
        loss_mask[:, : phase.distill.prompt_tokens] = False
    document_ids = None
    if phase.packing == "best_fit" and phase.distill is None:
        ends = torch.rand(rows, 1, DOCUMENTS_PER_ROW - 1, device=base.device) * shape[1]
        positions = torch.arange(shape[1], device=base.device)[:, None]
        document_ids = (positions >= ends).sum(-1)
    return TokenBatch(tokens, loss_mask, document_ids)


def planned_teacher(settings: Train, base: BaseEnds, head: Head) -> Teacher:
    """Return the teacher of a training; random states replace those of a server."""
    source = None
    if settings.features.source == "vllm":
        source = RandomStates(base, head.aux_layers, server_layers(head, base))
    return Teacher(base, head, source, adapter_settings(settings.schedule), settings.seed)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Largest memory of one process in a stage of a training, by use."""

    libraries_bytes: int = 0
    """Python and the libraries, on a CPU."""
    base_weights_bytes: int = 0
    head_weights_bytes: int = 0
    optimizer_state_bytes: int = 0
    keys_and_values_bytes: int = 0
    """Cache of the texts that the base generates, with the states of recurrent layers."""
    activations_bytes: int = 0
    """Activations and logits, and gradients in training."""
    fetched_features_bytes: int = 0
    """Hidden states of the next batches from servers."""

    @property
    def total_bytes(self) -> int:
        """Sum of all uses."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class TrainingStepCost:
    """What a step costs one process."""

    memory: StageMemory
    """Its peak."""
    flops_per_row: float


class MetaTraining:
    """A training on the meta device, where tensors have shapes and no content.

    The head computes in the base's dtype, as in mixed precision.
    """

    def __init__(self, settings: Train, device: torch.device) -> None:
        self.settings, self.on_cpu = settings, device.type == "cpu"
        self.is_served = settings.features.source == "vllm"
        """Whether servers have the layers of the base."""
        default = "float32" if self.on_cpu else "bfloat16"
        dtype = getattr(torch, settings.base.dtype.replace("auto", default))
        shape_base = meta_served_base if self.is_served else meta_base
        self.base = shape_base(settings.base, dtype)
        self.head = meta_head(settings, self.base)
        self.head.to(dtype)
        self.teacher = planned_teacher(settings, self.base, self.head)
        self.objective = Objective(self.head.train())
        joint = self.teacher.joint
        adapter = joint.adapter.parameters if joint else ()
        roles_of_parameters = roles(self.head, settings.schedule, adapter)
        self.parameters = [
            parameter for parameters in roles_of_parameters.values() for parameter in parameters
        ]
        # AdamW has two moments of a number, and Muon one
        moments = 2 * _count_numbers(self.parameters)
        moments -= _count_numbers(roles_of_parameters["hidden"])
        self.optimizer_bytes = FLOAT32_BYTES * moments
        """Bytes that the optimizers keep."""
        self.head_bytes = FLOAT32_BYTES * _count_numbers(self.head.state_dict().values())
        """Bytes of the saved head."""
        self.server_layers = server_layers(self.head, self.base)
        """Layers that a server gives."""
        width = self.base.width
        self.feature_bytes_per_token = (
            server_token_bytes(self.server_layers, width, server_dtype(settings.base.dtype))
            if self.is_served
            else (1 + len(self.head.aux_layers)) * width * dtype.itemsize
        )
        """Bytes of a token's features in a cache, or in a server's file."""

    def fixed_memory(self) -> StageMemory:
        """Return the memory that does not depend on the batch."""
        size = self.base.dtype.itemsize
        # mixed precision keeps a second copy during a step
        copies = size * _count_numbers(self.parameters) if size < FLOAT32_BYTES else 0
        return StageMemory(
            base_weights_bytes=weights_bytes(self.base.model),
            head_weights_bytes=self.head_bytes + copies,
            optimizer_state_bytes=self.optimizer_bytes,
        )

    def measure_step(self, phase: ScheduledPhase, rows: int) -> TrainingStepCost:
        """Return the cost of a step with `rows` rows in a process, before the optimizer."""
        self.teacher.begin(phase)
        micro_batches = phase.settings.accumulation_steps
        rows = -(-rows // micro_batches)
        batch = random_batch(self.settings, phase.settings, rows, self.base, self.head)
        # with several micro-batches the second one runs next to the gradients of the first
        passes = min(micro_batches, 2)
        peak_bytes, flops = run_on_meta(
            self.teacher, self.objective, phase, batch, batch.loss_mask.numel(), passes
        )
        num_gradients = _count_numbers(
            parameter for parameter in self.parameters if parameter.grad is not None
        )
        for parameter in self.parameters:
            parameter.grad = None
        # real gradients are float32
        peak_bytes += num_gradients * max(FLOAT32_BYTES - self.base.dtype.itemsize, 0)
        fetched_bytes = 0
        if self.is_served and self.on_cpu:
            fetched_tokens = FETCHED_BATCHES * micro_batches * batch.tokens.numel()
            fetched_bytes = fetched_tokens * self.feature_bytes_per_token
        memory = replace(
            self.fixed_memory(), activations_bytes=peak_bytes, fetched_features_bytes=fetched_bytes
        )
        return TrainingStepCost(memory, flops / (passes * rows))

    def text_memory(self, distill: DistillSettings) -> StageMemory:
        """Return the peak of text generation with the local engine."""
        prompts = torch.empty(distill.batch_size, distill.prompt_tokens, dtype=torch.long)
        assert isinstance(self.base, FrozenBase)
        with self.teacher.base_as_loaded(), FusedKernels(), PeakMemory() as memory:
            self.base.read(prompts.to("meta"), self.head.aux_layers)
        with FusedKernels():
            state_bytes = self.base.state_bytes
        # new texts have their own rows until they are copied into the batch
        rows = distill.batch_size + distill.batch_size // REFILL
        slots = rows * (text_tokens(distill) + 2 * self.head.depth)
        return replace(
            self.fixed_memory(),
            keys_and_values_bytes=slots * self.base.slot_bytes + rows * state_bytes,
            activations_bytes=memory.peak,
        )


def count_step_flops(base: BaseEnds, head: Head, phase: ScheduledPhase, batch: TokenBatch) -> int:
    """Return the FLOPs of a step on a batch, from shapes: nothing is computed on the device.

    The batch is one process's share of the step. Documents of a row count as masks of attention.
    """
    with torch.random.fork_rng(devices=[]):
        model = _meta_model(base.model.config, base.dtype, base.config.num_hidden_layers)
        shapes: dict[int, Any] = {id(value): value.to("meta") for value in head.buffers()}
        shapes |= {id(value): nn.Parameter(value.to("meta")) for value in head.parameters()}
        meta_base = FrozenBase(model, prepare=False)
        teacher = Teacher(meta_base, copy.deepcopy(head, shapes), joint=phase.settings.joint)
        teacher.begin(phase)
        objective, num_labels = Objective(teacher.head), int(batch.loss_mask.sum())
        _, flops = run_on_meta(
            teacher, objective, phase, batch.to(torch.device("meta")), num_labels
        )
    return flops


def run_on_meta(
    teacher: Teacher,
    objective: Objective,
    phase: ScheduledPhase,
    batch: TokenBatch,
    num_labels: int,
    passes: int = 1,
) -> tuple[int, int]:
    """Return the peak bytes and the FLOPs of forward and backward passes of a batch."""
    num_scored = int(num_labels * phase.settings.scored_share)
    with FusedKernels(), PeakMemory(num_scored) as memory, flop_counter() as counter:
        for _ in range(passes):
            labels = draft_labels(teacher.head, batch, batch.loss_mask)
            part = MicroBatch(phase, phase.first, 0, batch, labels, labels.count(batch))
            compute_loss(part, teacher, objective)[0].backward()
    return memory.peak, counter.get_total_flops()


def flop_counter() -> FlopCounterMode:
    """Return torch's counter of floating-point operations, two per multiplication.

    It counts products and fused attention, also the products with packed weights on a CPU.
    """

    def linear(rows: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
        return 2 * rows[-1] * math.prod(out_shape)

    def attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
        # two products
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

    def attention_backward(_: torch.Size, *shapes: Any, **__: Any) -> int:
        # five products: the scores again, and the gradients of scores, queries, keys and values
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])

    kernels = (torch.ops.mkl, "_mkl_linear"), (torch.ops.mkldnn, "_linear_pointwise")
    packed = [getattr(library, name, None) for library, name in kernels]
    # torch 2.11 refuses to count queries with more heads than their keys
    fused = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
    formulas = {kernel: linear for kernel in packed if kernel}
    formulas |= {getattr(torch.ops.aten, name): attention for name in fused}
    formulas |= {getattr(torch.ops.aten, f"{name}_backward"): attention_backward for name in fused}
    return FlopCounterMode(display=False, custom_mapping=formulas)


# --- models without content ----------------------------------------------------------------------


def server_dtype(dtype: str) -> torch.dtype:
    """Return the precision of a server: `auto` is that of GPUs."""
    return getattr(torch, dtype.replace("auto", "bfloat16"))


def meta_base(base: BaseSettings, dtype: torch.dtype) -> FrozenBase:
    """Return a base on the meta device; only its config.json is read."""
    config = load_config(load_path(base.model), revision=base.revision)
    num_layers = config.get_text_config().num_hidden_layers
    # no checks of the attention: there are no values to compare
    return FrozenBase(_meta_model(config, dtype, num_layers), prepare=False)


def meta_served_base(base: BaseSettings, dtype: torch.dtype) -> ServedBase:
    """Return the ends of a base on the meta device; only its config.json is read."""
    config = load_config(load_path(base.model), revision=base.revision)
    refuse_unserved(config.get_text_config())
    return ServedBase(_meta_model(config, dtype, num_layers=0))


def _meta_model(config: Any, dtype: torch.dtype, num_layers: int) -> PreTrainedModel:
    """Return a model on the meta device with its first layers; its config names all of them."""
    config = copy.deepcopy(config)
    named_layers = config.get_text_config().num_hidden_layers
    config.get_text_config().num_hidden_layers = num_layers
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_of(config, "sdpa"),
            trust_remote_code=False,
        )
    model.config.get_text_config().num_hidden_layers = named_layers
    return model.eval().requires_grad_(False)


def meta_head(settings: Train, base: BaseEnds) -> Head:
    """Return the head of a training on the meta device."""
    if settings.init:
        head = load_head(settings.init).to("meta")
    else:
        with torch.device("meta"):
            head = build_head(settings.head, **head_sizes(base))
    choose_layers(head, base.num_layers)
    return head


class RandomStates(FeatureSource):
    """Replacement for a server in a plan."""

    def __init__(self, base: BaseEnds, aux_layers: tuple[int, ...], layers: Sequence[int]) -> None:
        self.base, self.aux_layers, self.layers = base, aux_layers, layers

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> Features:
        """Return random features of a batch."""
        shape = (*batch.tokens.shape, len(self.layers), self.base.width)
        states = torch.rand(shape, dtype=self.base.dtype, device=self.base.device)
        return features_of(states, self.layers, self.aux_layers, self.base, batch)


def weights_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights; tied weights share a storage."""
    storages = {_storage_id(weight): weight.untyped_storage() for weight in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def _count_numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


# --- modes of torch that count -------------------------------------------------------------------


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record new storages in its result."""
        del types
        arguments = _tensors_with_storage((args, kwargs))
        is_meta = bool(arguments) and arguments[0].is_meta
        if is_meta and func is torch.ops.aten.nonzero.default:
            rows = min(self.rows, arguments[0].numel())
            out = torch.empty((rows, arguments[0].ndim), dtype=torch.long, device="meta")
        elif is_meta and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if arguments[0].is_floating_point() else 1
        else:
            out = func(*args, **(kwargs or {}))
        # views and in-place results share a storage with the arguments
        old_ids = {_storage_id(tensor) for tensor in arguments} | self._alive.keys()
        for tensor in _tensors_with_storage(out):
            if _storage_id(tensor) not in old_ids:
                self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive = {
            id: (reference, size)
            for id, (reference, size) in self._alive.items()
            if not reference.expired()
        }
        self._alive[_storage_id(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def _tensors_with_storage(values: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if torch._C._has_storage(tensor)]


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FusedKernels(TorchFunctionMode):
    """Makes attention and experts on the meta device allocate as their kernels do.

    Otherwise attention would use the math kernel, which stores the whole attention matrix. The
    grouped product of experts has no shapes there except in bfloat16. Recurrent layers run
    transformers' own code, because fla, mamba-ssm and causal-conv1d compute on GPUs only.
    """

    def __enter__(self) -> "FusedKernels":
        """Begin."""
        # the wrappers of kernels run transformers' own code when a model is exported
        name = "is_torchdynamo_exporting"
        self.exporting = patch.object(hub_kernels, name, lambda: True, create=True)
        self.exporting.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        self.exporting.stop()
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function."""
        del types
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            func = _fused_attention
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].is_meta:
            # all rows by one expert's matrix have the shapes of the grouped product
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


def _fused_attention(
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
        key, value = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
    bias = None
    if attn_mask is not None:
        # kernels add it as a bias
        bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    has_backward = torch.is_grad_enabled() and query.requires_grad
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, has_backward
    )[0]
