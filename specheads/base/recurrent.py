"""Recurrent layers of a base: which states they keep, and how rejected tokens leave them.

A mixer is the module of a layer that reads and writes states: linear attention, a state space or a
short convolution. It depends on its own input only. So a cache keeps the states before a forward
and the mixer's arguments, and `commit` lets the mixer alone read the kept positions again.
See docs/tree_verification.md.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, LinearAttentionLayer, get_layer_types_and_kwargs

from specheads.core.errors import InputError
from specheads.core.machine import to_device

STATEFUL = ("conv", "linear_attention", "hybrid")
"""Kinds of layers that transformers gives states; a hybrid one has keys and values too."""
WITH_KEYS = ("full_attention", "sliding_attention", "hybrid")
STATELESS = ("dummy", "moe", "mlp")
"""Kinds of layers that keep nothing."""
WRITES = ("update_conv_state(", "update_recurrent_state(")
"""Calls in the code of a mixer."""
SERVED = ("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Bases with states whose streams vLLM 0.32 and SGLang give to a head, and which they roll back."""
MEMORY_COPIES = 3
"""Copies of a row's states in a step: the states, those before it, and rows that are read again."""

States = dict[tuple[str, int], Tensor]
"""States (row, ...) of one layer by their attribute in transformers and their index."""
Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a mixer, given it, its own forward, and the arguments."""


class LayerKind(NamedTuple):
    """What a layer keeps for each row."""

    has_keys: bool
    num_states: int


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return what each layer of a base keeps; nothing if all have keys and values only."""
    if not {*STATEFUL}.intersection(getattr(config, "layer_types", None) or ()):
        return ()
    kinds, settings = get_layer_types_and_kwargs(config)
    return tuple(
        LayerKind(kind in WITH_KEYS, setting.get("number_of_states", 0))
        for kind, setting in zip(kinds, settings, strict=True)
    )


def refuse_unserved(config: Any) -> None:
    """Refuse a base with states for which vLLM has no hidden states of inner layers."""
    if layer_kinds(config) and config.model_type not in SERVED:
        raise InputError(
            "features=vllm needs a base whose layers vLLM gives: of those with states "
            f"{', '.join(SERVED)}, got {config.model_type!r}; leave features=vllm out"
        )


def find_mixers(model: Any, kinds: Sequence[LayerKind]) -> list[Any]:
    """Return the mixer of each layer with states; refuse a base with states of its own."""
    mixers = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and any(call in _code(type(module)) for call in WRITES)
    ]
    layers = [layer for layer, kind in enumerate(kinds) if kind.num_states]
    if sorted(mixer.layer_idx for mixer in mixers) != layers:
        raise InputError(
            "a base with recurrent layers must keep their states in the cache of transformers, and "
            f"{model.config.model_type!r} keeps them elsewhere; choose another base"
        )
    return mixers


@cache
def _code(cls: type[nn.Module]) -> str:
    return inspect.getsource(cls.forward) if cls.__module__.startswith("transformers.") else ""


def must_step(mixer: Any, *, drafting: bool) -> bool:
    """Return whether a mixer with a state must read several positions one at a time.

    transformers computes them differently at once: the scan of Mamba-1 starts without the state.
    Nemotron-H and Zamba2 limit time steps in scans only. Mamba-2 rounds the state of a single
    position to 16 bits, and scans in float32. A prompt is scanned by the base alone too.
    """
    code = _code(type(mixer))
    if "mamba_selective_scan(" in code:
        return True
    limit = tuple(getattr(mixer, "time_step_limit", None) or (0.0, float("inf")))
    rounds = "mamba2_" in code and next(mixer.parameters()).dtype.itemsize == 2
    return drafting and (rounds or limit != (0.0, float("inf")))


@contextmanager
def running(mixers: Sequence[Any], run: Run) -> Iterator[None]:
    """Let mixers run so in this context."""
    before = [(mixer, mixer.__dict__.get("forward")) for mixer in mixers]
    for mixer in mixers:
        mixer.forward = partial(_call, run, mixer, mixer.forward)
    try:
        yield
    finally:
        for mixer, forward in before:
            del mixer.forward
            if forward is not None:
                mixer.forward = forward


def _call(run: Run, mixer: Any, forward: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    return run(mixer, forward, args, settings)


def _hidden(args: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    """Return the input (row, time, width) of a mixer."""
    values = (*args, *settings.values())
    return next(value for value in values if isinstance(value, Tensor) and value.ndim == 3)


def _cache(args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    return next((value for value in (*args, *settings.values()) if isinstance(value, Cache)), None)


def _with_changes(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    settings: dict[str, Any],
    change: Callable[[Any], Any],
) -> tuple[Tensor, ...]:
    """Return the outputs of a mixer for changed arguments."""
    changed = {name: change(value) for name, value in settings.items()}
    outputs = forward(*map(change, args), **changed)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _as_returned(outputs: Sequence[Tensor]) -> Any:
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


# --- documents of a packed batch ---------------------------------------------------------------


def by_document(lengths: list[int]) -> Run:
    """Return how mixers run over packed rows: each document is a row of its own, padded."""

    def run(
        _: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        hidden = _hidden(args, settings)
        if {*lengths} == {hidden.shape[1]}:
            return forward(*args, **settings)
        documents = hidden.flatten(0, 1).split(lengths)
        pieces: dict[int, list[Tensor]] = {}
        # documents of similar length together, so that padding at most doubles the positions
        for digits in sorted({(length - 1).bit_length() for length in lengths}):
            group = [n for n, length in enumerate(lengths) if (length - 1).bit_length() == digits]
            padded = pad_sequence([documents[number] for number in group], batch_first=True)
            change = partial(_replace, hidden, padded)
            outputs = _with_changes(forward, args, settings, change)
            for row, number in enumerate(group):
                pieces[number] = [output[row, : lengths[number]] for output in outputs]
        columns = zip(*(pieces[number] for number in range(len(lengths))), strict=True)
        return _as_returned([torch.cat(rows).unflatten(0, hidden.shape[:2]) for rows in columns])

    return run


def _replace(old: Tensor, new: Any, value: Any) -> Any:
    return new if value is old else value


# --- states of a cache ---------------------------------------------------------------------------


CACHE = object()
"""Stands for the cache in kept arguments: with itself it would be a cycle, and be freed late."""


class MixerCall(NamedTuple):
    """The last call of a mixer, which `commit` repeats over fewer positions."""

    mixer: Any
    args: tuple[Any, ...]
    """With `CACHE` in place of the cache, as the settings."""
    settings: dict[str, Any]
    steps: bool
    before: States | None
    """The states before it; None if every row keeps all positions."""

    def repeat(self, rows: Tensor, count: int, layer: "RecurrentLayer") -> States:
        """Return the states of some rows after their first `count` positions."""
        assert self.before is not None
        layer.set_states({key: states[rows] for key, states in self.before.items()})
        if count:
            shape = _hidden(self.args, self.settings).shape[:2]
            cache = Cache(layers=[layer] * (self.mixer.layer_idx + 1))

            def change(value: Any) -> Any:
                if isinstance(value, Tensor) and value.shape[:2] == shape:
                    return value[rows, :count]
                return cache if value is CACHE else value

            settings = {name: change(value) for name, value in self.settings.items()}
            _run_steps(self.mixer.forward, tuple(map(change, self.args)), settings, self.steps)
        return layer.states()


def keeping_states(*, drafting: bool, undo: bool) -> Run:
    """Return how mixers run over a cache: `undo` keeps what a commit of fewer positions needs."""

    def run(
        mixer: Any, forward: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        layer = _cache(args, settings).layers[mixer.layer_idx]
        layer.discard()
        # kernels of single positions write in place
        before = {key: states.clone() for key, states in layer.states().items()} if undo else None
        steps = bool(layer.states()) and must_step(mixer, drafting=drafting)
        kept_args = tuple(map(_without_cache, args))
        kept_settings = {name: _without_cache(value) for name, value in settings.items()}
        layer.call = MixerCall(mixer, kept_args, kept_settings, steps, before)
        return _run_steps(forward, args, settings, steps)

    return run


def _without_cache(value: Any) -> Any:
    return CACHE if isinstance(value, Cache) else value


def _run_steps(
    forward: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any], steps: bool
) -> Any:
    """Return the output of a mixer that may have to read one position at a time."""
    hidden = _hidden(args, settings)
    if not steps or hidden.shape[1] == 1:
        return forward(*args, **settings)
    outputs = [
        _with_changes(forward, args, settings, partial(_replace, hidden, position))
        for position in hidden.split(1, dim=1)
    ]
    return _as_returned([torch.cat(pieces, dim=1) for pieces in zip(*outputs, strict=True)])


class RecurrentLayer(LinearAttentionLayer):
    """The states of one layer after each row's committed tokens."""

    call: MixerCall | None = None
    """The forward that is not committed yet."""

    def states(self) -> States:
        """Return the states that exist."""
        return {
            (name, index): states
            for name in ("conv_states", "recurrent_states")
            for index, states in getattr(self, name).items()
            if states is not None
        }

    def set_states(self, states: States) -> None:
        """Replace all states."""
        for index in range(self.number_of_states):
            for name in ("conv_states", "recurrent_states"):
                value = states.get((name, index))
                getattr(self, name)[index] = value
                getattr(self, f"is_{name}_initialized")[index] = value is not None
            self.has_previous_state[index] = any(number == index for _, number in states)
            if (conv := self.conv_states[index]) is not None:
                self.conv_kernel_size[index] = conv.shape[-1]
                self.dtype, self.device = conv.dtype, conv.device

    def discard(self) -> None:
        """Forget a forward that was not committed."""
        if self.call is not None and self.call.before is not None:
            self.set_states(self.call.before)
        self.call = None

    def commit(self, counts: list[int]) -> None:
        """Keep the first `counts[b]` positions of the last forward in each row b."""
        call, self.call = self.call, None
        if call is None:
            return
        hidden = _hidden(call.args, call.settings)
        for count in sorted({*counts} - {hidden.shape[1]}):
            rows = [row for row, row_count in enumerate(counts) if row_count == count]
            index = to_device(torch.tensor(rows), hidden.device)
            states = call.repeat(index, count, RecurrentLayer(self.number_of_states))
            for key, value in self.states().items():
                # a row without a token has no state yet
                value[index] = states.get(key, 0)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.discard()
        self.set_states({key: states[rows] for key, states in self.states().items()})

    def join(self, new_rows: "RecurrentLayer", num_rows: int, num_new: int) -> None:
        """Append the `num_new` rows of another batch to the `num_rows` of this one."""
        self.discard()
        new_rows.discard()
        old, new = self.states(), new_rows.states()
        joined = {}
        for key, some in (old | new).items():
            # rows without a token have no state yet
            sides = (old.get(key), num_rows), (new.get(key), num_new)
            joined[key] = torch.cat(
                [
                    some.new_zeros(size, *some.shape[1:]) if states is None else states
                    for states, size in sides
                ]
            )
        self.set_states(joined)
