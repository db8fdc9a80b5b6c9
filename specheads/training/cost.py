"""What a training costs on GPUs that are not here, from shapes and datasheets."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from specheads.base.model import FrozenBase
from specheads.config.commands import Train
from specheads.training.memory import MetaTraining, weights_bytes
from specheads.training.plan import ServerPlan, disk_use, largest_folder, plan_server
from specheads.training.schedule import ScheduledPhase, row_tokens, schedule_phases, text_tokens

SHARE = 0.41
"""Share of the datasheet's FLOP/s that EAGLE-3 on a base of 8B takes on an H200
(recipes/gpu/train.json). Text is assumed to take as much of the bandwidth: this is not measured."""
USABLE = 0.9
"""Share of a GPU's memory that a run may use."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Datasheet of a GPU, dense bfloat16."""

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float


GPUS = (
    Gpu("L4", 24e9, 300e9, 121e12),
    Gpu("A100", 80e9, 2.039e12, 312e12),
    Gpu("H100", 80e9, 3.35e12, 989e12),
    Gpu("H200", 141e9, 4.8e12, 989e12),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a training on some GPUs."""

    way: str
    """ddp, fsdp2 or features=vllm, the first one that fits; empty if none does."""
    peak_bytes: float
    """Largest memory of a training process, with the least that fits."""
    text_hours: float
    train_hours: float
    tokens_per_second: float

    def __str__(self) -> str:
        if not self.way:
            return f"does not fit ({self.peak_bytes / 1e9:.0f} GB)"
        return (
            f"{self.way}, text {self.text_hours:.1f} h, training {self.train_hours:.1f} h, "
            f"{self.tokens_per_second:,.0f} tokens/s, peak {self.peak_bytes / 1e9:.0f} GB"
        )


class CostModel:
    """Costs of one training, from shapes that are computed once."""

    def __init__(self, settings: Train, source: str = "local") -> None:
        settings = copy.deepcopy(settings)
        settings.features.source = source
        self.training = MetaTraining(settings, torch.device("cuda"))
        base = self.training.base
        # the ends of a base write no text
        self._slot_bytes = base.slot_bytes if isinstance(base, FrozenBase) else 0
        self._phases = schedule_phases(self.training.settings.schedule)
        self._base_bytes = weights_bytes(base.model)
        # heads read the two tables, which every process has whole
        tables = {id(table): table for table in (base.embedding, base.projection.weight)}
        self._tables_bytes = sum(table.numel() * table.itemsize for table in tables.values())
        self._steps: dict[tuple[str, int], tuple[int, float]] = {}
        self.disk_bytes = disk_use(self.training).total_bytes
        """Bytes that a run writes."""

    def cost(self, gpu: Gpu, count: int) -> Cost:
        """Return the cost on `count` GPUs; rows of a step are split until they fit."""
        room = USABLE * gpu.memory_bytes
        layers_bytes = float(self._base_bytes - self._tables_bytes)
        elsewhere = {"ddp": 0.0, "fsdp2": layers_bytes * (1 - 1 / count)}
        if self._base_bytes <= room * (count - 1):
            # a server on other GPUs has the layers
            elsewhere["features=vllm"] = layers_bytes
        peaks = {way: self._peak_bytes(count, room, size) for way, size in elsewhere.items()}
        way = next((way for way, peak in peaks.items() if peak <= room), "")
        flops = tokens = 0.0
        for phase in self._phases:
            # of the GPU with the most rows; without a row a GPU waits
            rows = phase.settings.steps * -(-phase.settings.batch_size // count)
            data, context = self.training.settings.data, self.training.base.max_length
            flops += rows * self._step(phase, 1)[1]
            all_rows = phase.settings.steps * phase.settings.batch_size
            tokens += all_rows * row_tokens(phase.settings, data, context)
        seconds = flops / (SHARE * gpu.flops)
        peak_bytes, text_hours = peaks.get(way, min(peaks.values())), self._text_hours(gpu, count)
        return Cost(way, peak_bytes, text_hours, seconds / 3600, tokens / seconds)

    def _peak_bytes(self, count: int, room: float, elsewhere: float) -> float:
        """Return the memory of the largest step, with the most rows at once that fit, or one."""
        sizes = []
        for phase in self._phases:
            rows = -(-phase.settings.batch_size // count)
            while (size := self._step(phase, rows)[0] - elsewhere) > room and rows > 1:
                rows = -(-rows // 2)
            sizes.append(size)
        return max(sizes)

    def _step(self, phase: ScheduledPhase, rows: int) -> tuple[int, float]:
        """Return the bytes of a step that reads `rows` rows at once, and the FLOPs of a row."""
        key = phase.name, rows
        if key not in self._steps:
            # gradients of a part are there while the next one runs
            phase.settings.accumulation_steps = 2
            step = self.training.measure_step(phase, 2 * rows)
            self._steps[key] = step.memory.total_bytes, step.flops_per_row
        return self._steps[key]

    def _text_hours(self, gpu: Gpu, count: int) -> float:
        """Return the hours of all text, at the largest length, from the bytes that a step reads."""
        seconds = 0.0
        for phase in self._phases:
            if (text := phase.settings.distill) is None or text.folder:
                continue
            # half of a text is in the cache on average
            texts = min(text.batch_size, text.num_samples / count)
            cache = texts * text_tokens(text) / 2 * self._slot_bytes
            step = (self._base_bytes + cache) / (SHARE * gpu.bandwidth)
            seconds += text.num_samples / (count * texts) * text.new_tokens * step
        return seconds / 3600


def cost_lines(settings: Train, count: int) -> Sequence[str]:
    """Return a line for each GPU with the cost of a training on `count` of them."""
    model = CostModel(settings)
    if settings.features.source != "vllm":
        return [f"{count} x {gpu.name}: {model.cost(gpu, count)}" for gpu in GPUS]
    trainers = CostModel(settings, "vllm")
    server = plan_server(trainers.training, 1)
    return [
        f"{count} x {gpu.name}: {_served_cost(model, trainers, server, gpu, count)}" for gpu in GPUS
    ]


def _served_cost(
    whole: CostModel, trainers: CostModel, server: ServerPlan, gpu: Gpu, count: int
) -> str:
    """Return the cost of trainers, and of as many servers on the same GPUs as keep them busy."""
    cost, training = trainers.cost(gpu, count), trainers.training
    room = USABLE * gpu.memory_bytes
    sizes = [
        num_gpus
        for num_gpus, memory in server.memory_by_gpus.items()
        if memory.weights_bytes + memory.cache_bytes_of_open_requests <= room
    ]
    if not (cost.way and sizes):
        return str(cost) if sizes else "a server does not fit"
    # what one GPU would take for the layers alone
    layers_hours = whole.cost(gpu, 1).train_hours - trainers.cost(gpu, 1).train_hours
    num_servers = ceil(layers_hours / sizes[0] / cost.train_hours)
    # which write the text first
    text_hours = whole.cost(gpu, num_servers * sizes[0]).text_hours
    way = f"features=vllm from {num_servers} x {sizes[0]} GPUs"
    rate = cost.tokens_per_second * training.feature_bytes_per_token / 1e9
    pool = largest_folder(training, count, num_servers) / 1e9
    place = "store" if training.settings.features.transport == "mooncake" else "folder"
    cost = replace(cost, way=way, text_hours=text_hours)
    return f"{cost}, {rate:.2f} GB/s, {pool:.1f} GB in the {place}"
