"""Compiled forwards: one graph for all shapes on a CPU, one CUDA graph per shape on a GPU.

See docs/bases.md.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.core.errors import InputError

EXTENT = 256
"""On CUDA a forward reads a multiple of this many slots, which limits the number of graphs."""
WARMUP_CALLS = 2
"""Calls of a shape before its graph is recorded: they compile kernels and warm up."""
MAX_GRAPHS, MAX_BYTES = 64, 2**30
"""Most recordings kept per cache or drafter, and most bytes of their outputs, such as the logits of
all nodes."""
LARGE_BATCH = 128
"""Largest number of rows that is padded to a power of two; larger ones to a multiple of it."""


def compile_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled at its first call for any number of rows, nodes and slots."""
    graphs = torch.compile(function, dynamic=True)

    def call(*args: Any, **settings: Any) -> Any:
        with _compiling():
            return graphs(*args, **settings)

    return call


@contextmanager
def _compiling() -> Iterator[None]:
    # imported late: it takes a second or two
    from torch._inductor.exc import InductorError

    try:
        # with more shapes than this, a function runs uncompiled
        with torch._dynamo.config.patch(recompile_limit=128):
            yield
    except InductorError as error:
        raise InputError(
            f"compile=true needs a working compiler, C++ on a CPU and Triton on CUDA: "
            f"{str(error).splitlines()[0]}; install one (g++), or leave compile=true out"
        ) from error


class Recorder:
    """Records functions of tensors and replays them: each is one CUDA graph per shape.

    On a CPU, where tests run the same code, a replay calls the function on the same buffers.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        """Stream on which graphs are recorded."""
        self._failed: set[str] = set()
        """Names of functions that cannot be recorded."""

    def __call__(
        self,
        graphs: dict[Hashable, Any],
        key: tuple[str, *tuple[Hashable, ...]],
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        buffers: Sequence[Tensor] = (),
    ) -> Any:
        """Return the outputs of a function, replayed from the recording of this key in `graphs`.

        Inputs and outputs are nests of tuples, lists, dataclasses and tensors. A replay reads
        copies of the inputs, and the next one overwrites the outputs. All else that depends on the
        step must be in the key, which begins with the name of the function, or in `buffers`, which
        the function may also write. Another address of a buffer is another recording. The first
        `WARMUP_CALLS` run without one.
        """
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors_in(inputs)]
        name, full_key = key[0], (*key, *shapes, *(buffer.data_ptr() for buffer in buffers))
        # memory allocated in inference mode cannot be written to outside of it
        with torch.inference_mode(mode=False), torch.no_grad():
            # a number of calls, until it is recorded
            recording = graphs.pop(full_key, 0)
            is_replay = isinstance(recording, Recording)
            if recording == WARMUP_CALLS and name not in self._failed:
                recording = self._record(graphs, name, function, inputs) or recording
            is_recorded = isinstance(recording, Recording)
            graphs[full_key] = recording if is_recorded else min(recording + 1, WARMUP_CALLS)
            # a replay adds nothing
            while not is_replay and _exceed_limits(graphs):
                least_recently_used = next(iter(graphs))
                del graphs[least_recently_used]
            if is_recorded:
                return recording(function, inputs)
            # a compiler tells a copy from a tensor of inference mode
            return function(*map_tensors(_copy_contiguous, inputs))

    def _record(
        self,
        graphs: dict[Hashable, Any],
        name: str,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
    ) -> "Recording | None":
        """Record a function over copies of its inputs; None, with a warning, if that fails."""
        fixed = map_tensors(_copy_contiguous, inputs)
        device = tensors_in(fixed)[0].device
        if device.type != "cuda":
            return Recording(name, fixed)
        recordings = [entry for entry in graphs.values() if isinstance(entry, Recording)]
        # a replay overwrites all other memory of its pool, and with it what another function
        # returned in this step; torch frees a pool with its last graph
        pools = [recording.graph.pool() for recording in recordings if recording.name == name]
        pool = pools[0] if pools else torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        # prefetching threads may allocate memory meanwhile
        capture = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        try:
            # the outer context leaves the stream if the end of the capture fails
            with torch.cuda.stream(self._stream), capture:
                outputs = function(*_rebuilt(fixed))
        except RuntimeError as error:
            with suppress(RuntimeError):
                # torch would refuse to free memory from now on
                torch._C._cuda_endAllocateToPool(device.index, pool)
            self._failed.add(name)
            # the end of the capture hides the first error
            reason = str(error.__context__ or error).splitlines()[0][:160]
            warnings.warn(f"{name} runs without a CUDA graph: {reason}", stacklevel=2)
            return None
        return Recording(name, fixed, outputs, graph)


@dataclass(slots=True)
class Recording:
    """A recorded function: its copies of the inputs, its outputs, and its CUDA graph."""

    name: str
    inputs: tuple[Any, ...]
    outputs: Any = None
    graph: Any = None
    """None on a CPU."""

    def __call__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Return the outputs for new inputs; without a graph the function is called again."""
        copy_tensors(self.inputs, inputs)
        if self.graph is not None:
            self.graph.replay()
        elif self.outputs is None:
            self.outputs = map_tensors(torch.clone, function(*_rebuilt(self.inputs)))
        else:
            copy_tensors(self.outputs, function(*_rebuilt(self.inputs)))
        return self.outputs


def _exceed_limits(graphs: Mapping[Hashable, Any]) -> bool:
    outputs = [graph.outputs for graph in graphs.values() if isinstance(graph, Recording)]
    num_bytes = sum(tensor.nbytes for tensor in tensors_in(outputs))
    return len(graphs) > MAX_GRAPHS or (len(graphs) > 1 and num_bytes > MAX_BYTES)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of tuples, lists and dataclasses with a function applied to their tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        # a named tuple takes its items one by one
        return getattr(value, "_make", type(value))(items)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    result = copy(value)
    for field in fields(value):
        # frozen ones too, and without computing other fields again
        object.__setattr__(result, field.name, map_tensors(function, getattr(value, field.name)))
    return result


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    items = value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def copy_tensors(targets: Any, sources: Any) -> None:
    """Copy tensors into the first rows, and slots, of those at the same places in `targets`."""
    for target, source in zip(tensors_in(targets), tensors_in(sources), strict=True):
        if target.data_ptr() != source.data_ptr():
            target[tuple(map(slice, source.shape))].copy_(source)


def _rebuilt(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same tensors in new objects, because a function may assign their fields."""
    return map_tensors(lambda tensor: tensor, inputs)


def _copy_contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of a recorded step, which many batches share."""
    if num_rows > LARGE_BATCH:
        return -(-num_rows // LARGE_BATCH) * LARGE_BATCH
    return 1 << (num_rows - 1).bit_length()


def pad_batch(value: Any, num_rows: int) -> Any:
    """Return a batch of more rows: its last one is repeated."""

    def pad(tensor: Tensor) -> Tensor:
        missing = padded_rows(num_rows) - num_rows
        # other tensors have one value for the batch
        if not missing or len(tensor) != num_rows:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])

    return map_tensors(pad, value)


class CompiledLayers:
    """The layers of a model, which share their code and so are compiled once, or run as they are.

    `attention.LayerAttention` hides the cache from the compiler.
    """

    def __init__(self, layers: list[nn.Module], backend: str | None = "inductor") -> None:
        self.layers, self.is_compiled = layers, backend is not None
        self._forward: Any = type(layers[0]).forward
        if backend is not None:
            self._forward = torch.compile(self._forward, dynamic=True, backend=backend)

    @contextmanager
    def active(self, arguments: Sequence[dict[str, Any]]) -> Iterator[list[Tensor]]:
        """Run the layers compiled in this context, each with arguments of its own.

        Yields a list of each layer's input.
        """
        streams: list[Tensor] = []

        def run(number: int, *args: Any, **settings: Any) -> Any:
            streams.append(args[0] if args else settings["hidden_states"])
            return self._forward(self.layers[number], *args, **settings | arguments[number])

        restores = [_remove_hooks(module) for layer in self.layers for module in layer.modules()]
        for number, layer in enumerate(self.layers):
            layer.forward = partial(run, number)
        compiling = _compiling() if self.is_compiled else nullcontext()
        try:
            # sizes that happen to be equal, as those of a batch and its memory, make no graph
            # pyright sees no functions in torch's modules of settings
            with cast(Any, fx_config).patch(use_duck_shape=False), compiling:
                yield streams
        finally:
            for layer in self.layers:
                del layer.forward
            for restore in restores:
                restore()


def find_layers(model: PreTrainedModel, backend: str | None = "inductor") -> CompiledLayers | None:
    """Return the layers, compiled unless `backend` is None.

    None if transformers names no layers, or those of two classes.
    """
    names, config = set(model._no_split_modules or ()), model.config.get_text_config()
    layers = [module for module in model.base_model.modules() if type(module).__name__ in names]
    if len(layers) != config.num_hidden_layers or len(set(map(type, layers))) != 1:
        return None
    return CompiledLayers(layers, backend)


def _remove_hooks(module: nn.Module) -> Callable[[], None]:
    """Remove transformers' output hooks, which would break graphs; return a function to undo it."""
    hooks = module._forward_hooks
    homes = {key: getattr(hook, "__module__", "") for key, hook in hooks.items()}
    removed = {key: hooks.pop(key) for key, home in homes.items() if "output_capturing" in home}
    return lambda: hooks.update(removed)
