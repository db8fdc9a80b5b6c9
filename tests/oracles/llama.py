"""One Llama layer, as engines compute it for EAGLE-3, and for DFlash and DSpark."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.oracles.shared import Stored, frequencies, rms, rotate, silu


class Layer:
    """One Llama layer after its first norm, applied in rounds to its own output.

    The settings have the names of a Llama config.json; attention reads `size_read` channels. Norms
    of queries and keys (Qwen3) are used if they are stored.
    """

    def __init__(self, stored: Stored, name: str, config: dict[str, Any], size_read: int) -> None:
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.shared, self.epsilon = config["num_key_value_heads"], config["rms_norm_eps"]
        self.size = config.get("head_dim") or width // self.heads
        self.turn = partial(rotate, *frequencies(config, self.size))

        def take(suffix: str, *shape: int) -> Tensor:
            return stored.take(f"{name}.{suffix}.weight", *shape)

        self.norm = take("post_attention_layernorm", width)
        counts = {"q": self.heads, "k": self.shared, "v": self.shared}
        self.weights = {
            matrix: take(f"self_attn.{matrix}_proj", count * self.size, size_read)
            for matrix, count in counts.items()
        }
        self.norms = {
            matrix: take(f"self_attn.{matrix}_norm", self.size)
            for matrix in "qk"
            if f"{name}.self_attn.{matrix}_norm.weight" in stored
        }
        self.out = take("self_attn.o_proj", width, self.heads * self.size)
        inner = config["intermediate_size"]
        self.gate, self.up = (take(f"mlp.{matrix}_proj", inner, width) for matrix in ("gate", "up"))
        self.down = take("mlp.down_proj", width, inner)
        slides = "sliding_attention" in (config.get("layer_types") or ())
        self.window = config["sliding_window"] if slides else None
        self.kept: list[tuple[Tensor, Tensor]] = []

    def round(self, inputs: Tensor, residual: Tensor) -> Tensor:
        """Compute one more drafting round for every position."""
        at = torch.arange(len(inputs)) + len(self.kept)
        self.kept.append(self.keys_values(inputs, at))
        return self.ended(residual, self._attend(self.queries(inputs, at)))

    def queries(self, inputs: Tensor, at: Tensor) -> Tensor:
        """Return the queries of each head at these positions."""
        return self.turn(self._split(inputs, "q"), at)

    def keys_values(self, inputs: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, repeated for each attention head."""
        group_size = self.heads // self.shared
        keys, values = self.turn(self._split(inputs, "k"), at), self._split(inputs, "v")
        return keys.repeat_interleave(group_size, 1), values.repeat_interleave(group_size, 1)

    def ended(self, stream: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output after its attention."""
        stream = stream + mixed.reshape(len(stream), -1) @ self.out.T
        inputs = rms(stream, self.norm, self.epsilon)
        return stream + (silu(inputs @ self.gate.T) * (inputs @ self.up.T)) @ self.down.T

    def _split(self, inputs: Tensor, matrix: str) -> Tensor:
        """Return queries, keys or values of each head, before rotary embedding."""
        heads = (inputs @ self.weights[matrix].T).view(len(inputs), -1, self.size)
        norm = self.norms.get(matrix)
        return heads if norm is None else rms(heads, norm, self.epsilon)

    def _attend(self, queries: Tensor) -> Tensor:
        """Attend to the first round up to this position, and to later rounds of the own draft.

        A window counts the later rounds, too.
        """
        (keys, values), rounds = self.kept[0], self.kept[1:]
        positions = torch.arange(len(queries))
        scores = torch.einsum("thd,shd->ths", queries, keys)
        hidden = positions[:, None] < positions
        if self.window is not None:
            hidden |= positions <= positions[:, None] + len(rounds) - self.window
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        drafted = [(queries * own_keys).sum(-1, keepdim=True) for own_keys, _ in rounds]
        weights = (torch.cat([scores, *drafted], -1) / math.sqrt(self.size)).softmax(-1)
        mixed = torch.einsum("ths,shd->thd", weights[..., : len(values)], values)
        for column, (_, own_values) in enumerate(rounds, start=len(values)):
            mixed = mixed + weights[..., column : column + 1] * own_values
        return mixed
