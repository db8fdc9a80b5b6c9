"""Compiled forwards: one graph for all shapes on a CPU, one CUDA graph per shape on a GPU.

See docs/bases.md.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.core.errors import InputError

EXTENT = 256
"""On CUDA a forward reads a multiple of this many slots, which limits the number of graphs."""
WARMUP_CALLS = 2
"""Calls of a shape before its graph is recorded: they compile kernels and warm up."""
MAX_GRAPHS = 32
"""Graphs kept per cache; each owns its outputs, including the logits of all nodes."""
Outputs = tuple[Any, ...]
Forward = Callable[..., Outputs]


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


class CudaGraphs:
    """CUDA graphs of a base's forwards: one per shape, over caches whose memory does not move."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._alive: WeakSet[Any] = WeakSet()
        """Recorded graphs that still exist: torch frees a memory pool with its last graph."""

    def __call__(
        self, graphs: dict[Hashable, Any], key: Hashable, forward: Forward, inputs: tuple[Any, ...]
    ) -> Outputs:
        """Return the outputs of the forward, replayed from the graph of this key in `graphs`.

        The next call with this key overwrites them. The first `WARMUP_CALLS` run without a
        graph.
        """
        # memory allocated in inference mode cannot be written to outside of it
        with torch.inference_mode(mode=False), torch.no_grad():
            # a number of calls, until the graph is recorded
            graph = graphs.pop(key, 0)
            if graph == WARMUP_CALLS:
                graph = self.record(forward, inputs)
            graphs[key] = graph + 1 if isinstance(graph, int) else graph
            if len(graphs) > MAX_GRAPHS:
                least_recently_used = next(iter(graphs))
                del graphs[least_recently_used]
            if isinstance(graph, int):
                with _compiling():
                    return forward(*inputs)
            return graph(*inputs)

    def record(self, forward: Forward, inputs: tuple[Tensor, ...]) -> Forward:
        """Record a forward over copies of its inputs; return the function that replays it."""
        fixed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # prefetching threads may allocate memory meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = forward(*fixed)
        except RuntimeError as error:
            raise InputError(
                f"compile=true records CUDA graphs, and this base's forward cannot be recorded "
                f"({str(error).splitlines()[0]:.160}); leave compile=true out"
            ) from error

        self._alive.add(graph)

        def replay(*new_inputs: Tensor) -> Outputs:
            for fixed_input, new_input in zip(fixed, new_inputs, strict=True):
                fixed_input.copy_(new_input)
            graph.replay()
            return outputs

        return replay


class CompiledLayers:
    """The layers of a model, which share their code and so are compiled once.

    `attention.LayerAttention` hides the cache from the compiler.
    """

    def __init__(self, layers: list[nn.Module], backend: str = "inductor") -> None:
        self.layers = layers
        self._forward = torch.compile(type(layers[0]).forward, dynamic=True, backend=backend)

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
        try:
            # sizes that happen to be equal, as those of a batch and its memory, make no graph
            # pyright sees no functions in torch's modules of settings
            with cast(Any, fx_config).patch(use_duck_shape=False):
                yield streams
        finally:
            for layer in self.layers:
                del layer.forward
            for restore in restores:
                restore()


def find_layers(model: PreTrainedModel, backend: str = "inductor") -> CompiledLayers | None:
    """Return the compiled layers; None if transformers names none, or those of two classes."""
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
