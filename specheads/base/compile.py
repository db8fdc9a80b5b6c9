"""Forwards as compiled graphs: one for all shapes on a CPU, a CUDA graph for each on a GPU.

See docs/bases.md.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.core.errors import InputError

EXTENT = 256
"""On CUDA a forward looks at a multiple of so many slots: as many graphs as a text is long."""

PLAIN = 2
"""Calls of a shape before its graph is recorded: they compile what they need, and warm up."""

MOST_GRAPHS = 32
"""Graphs kept for a cache; each holds what it returns, logits of all nodes among it."""

Outputs = tuple[Tensor | None, ...]
Forward = Callable[..., Outputs]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for any rows, nodes and slots, when it is called first.

    A ValueError that says what is missing to compile comes then.
    """
    graphs = torch.compile(function, dynamic=True)

    def call(*args: Any, **settings: Any) -> Any:
        with _compiling():
            return graphs(*args, **settings)

    return call


@contextmanager
def _compiling() -> Iterator[None]:
    # the compiler takes a second or two to import: whoever does not compile does without it
    from torch._inductor.exc import InductorError

    try:
        # beyond so many shapes a function runs as it is written
        with torch._dynamo.config.patch(recompile_limit=128):
            yield
    except InductorError as error:
        raise InputError(
            f"compile=true needs a working compiler, C++ on a CPU and Triton on CUDA: "
            f"{str(error).splitlines()[0]}; install one (g++), or leave compile=true out"
        ) from error


class CudaGraphs:
    """CUDA graphs of a base's forwards: one for each shape, over caches whose memory stays.

    `record` is for tests: it takes a forward and its inputs and returns what replays it.
    """

    def __init__(self, record: Callable[[Forward, tuple[Tensor, ...]], Forward] | None = None):
        self._record = record or self._captured
        self._pool: Any = None
        self._alive: WeakSet[Any] = WeakSet()
        """Recorded graphs that still exist: torch frees a memory pool with its last graph."""

    def __call__(
        self,
        graphs: dict[Hashable, Any],
        key: Hashable,
        forward: Forward,
        inputs: tuple[Tensor, ...],
    ) -> Outputs:
        """Return what the forward gives these inputs, by the graph of this key among `graphs`.

        What is returned is overwritten when the key is used again. The first `PLAIN` calls run the
        forward as it is. A ValueError says why a forward cannot be recorded.
        """
        # memory made in inference mode could not be written to outside of it
        with torch.inference_mode(mode=False), torch.no_grad():
            known = graphs.pop(key, 0)
            if known == PLAIN:
                known = self._record(forward, inputs)
            graphs[key] = known + 1 if isinstance(known, int) else known
            if len(graphs) > MOST_GRAPHS:
                # the one that was not used for longest
                del graphs[next(iter(graphs))]
            if isinstance(known, int):
                with _compiling():
                    return forward(*inputs)
            return known(*inputs)

    def _captured(self, forward: Forward, inputs: tuple[Tensor, ...]) -> Forward:
        fixed = [one.clone(memory_format=torch.contiguous_format) for one in inputs]
        graph = torch.cuda.CUDAGraph()
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # threads that prefetch may go on asking for memory of their own
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = forward(*fixed)
        except RuntimeError as error:
            raise InputError(
                f"compile=true records CUDA graphs, and this base's forward cannot be recorded "
                f"({str(error).splitlines()[0]:.160}); leave compile=true out"
            ) from error

        self._alive.add(graph)

        def replay(*new: Tensor) -> Outputs:
            for own, one in zip(fixed, new, strict=True):
                own.copy_(one)
            graph.replay()
            return outputs

        return replay


class CompiledLayers:
    """The layers of a model, which share their code and so are compiled once.

    Each is a function of tensors alone, because its keys and values go to the cache within an
    operator that no compiler looks into: see `deferred_attention`. A model whose layers are not
    known by name, or of several classes, runs as it is written.
    """

    def __init__(self, model: PreTrainedModel, backend: str = "inductor") -> None:
        names, count = set(model._no_split_modules or ()), model.config.get_text_config()
        found = [one for one in model.base_model.modules() if type(one).__name__ in names]
        kinds = {type(one) for one in found}
        fits = len(found) == count.num_hidden_layers and len(kinds) == 1
        self.layers = found if fits else []
        if fits:
            self._forward = torch.compile(kinds.pop().forward, dynamic=True, backend=backend)

    @contextmanager
    def active(self) -> Iterator[list[Tensor]]:
        """Let the layers run compiled, and list what each is given: its residual stream."""
        streams: list[Tensor] = []

        def run(layer: nn.Module, *args: Any, **settings: Any) -> Any:
            streams.append(args[0] if args else settings["hidden_states"])
            return self._forward(layer, *args, **settings)

        hooks = [_without_hooks(part) for layer in self.layers for part in layer.modules()]
        for layer in self.layers:
            layer.forward = partial(run, layer)
        try:
            yield streams
        finally:
            for layer in self.layers:
                del layer.forward
            for restore in hooks:
                restore()


def _without_hooks(module: nn.Module) -> Callable[[], None]:
    """Take away what transformers records outputs with, which would cut graphs; return the undo."""
    hooks = module._forward_hooks
    taken = {
        key: one
        for key, one in hooks.items()
        if "output_capturing" in getattr(one, "__module__", "")
    }
    for key in taken:
        del hooks[key]
    return lambda: hooks.update(taken)
