"""Layers of EAGLE-3 and MTP: each round reads the output of the previous one and one more token.

The first layer reads the token and the stream; further layers are plain Llama layers. Each layer
attends to the first round of all earlier positions, which the base has read, and to the later
rounds of its own path, which the base has not read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specheads.core.drafter import pick_parents
from specheads.core.features import Committed, Documents, Features
from specheads.heads.layers.attention import Attention, AttentionShape, GatedMlp, Slots
from specheads.heads.layers.common import RMSNorm
from specheads.heads.layers.path_attention import takes


@dataclass(frozen=True, slots=True)
class Branch:
    """State of a draft: the nodes of a level, and the keys and values of their paths."""

    hidden: Float[Tensor, "batch node width"]
    """Output of the last layer at the nodes."""
    paths: tuple[Tensor, ...]
    """Keys and values of drafted tokens, per layer: (batch, key head, 2, node, level, head_dim)."""
    memory: Slots


Reading = tuple[Tensor, Tensor, Tensor]


class FeedbackLayer(nn.Module):
    """A Llama layer over the stream and the embedding of the token that a round reads.

    Args:
        width: Width of the stream and of the embeddings.
        inner: Width of the MLP, as in `GatedMlp`.
        epsilon: Epsilon of the norms.
        shape: Heads of its attention.
        norm_before_residual: Whether the residual starts from the normalised stream.
        reads_tokens: Whether its attention reads the token's embedding; otherwise it is a plain
            Llama layer.
    """

    def __init__(
        self,
        width: int,
        *,
        inner: int,
        epsilon: float,
        shape: AttentionShape,
        norm_before_residual: bool = False,
        reads_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(width, epsilon)
        self.hidden_norm = RMSNorm(width, epsilon) if reads_tokens else None
        self.self_attn = Attention((1 + reads_tokens) * width, width, shape)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        self.mlp = GatedMlp(width, inner)

    def read(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Reading:
        """Return the residual stream, the input of attention, and its keys and values."""
        if self.hidden_norm is None:
            inputs = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            hidden = normed if self.norm_before_residual else hidden
        return hidden, inputs, self.self_attn.keys_values(inputs, positions)

    @property
    def attention(self) -> Attention:
        """The layer's attention."""
        return self.self_attn

    def forward(self, stream: Tensor, inputs: Tensor, *attended: Any) -> Tensor:
        """Return the stream after this layer; `attended` are further arguments of `Attention`."""
        stream = stream + self.self_attn(inputs, *attended)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class ProjectedLayer(nn.Module):
    """A Llama layer over a projection of the token's embedding and the previous stream.

    Parameter names are those of DeepSeek-V3.

    Args:
        width: Width of the stream and of the embeddings.
        inner: Width of the MLP, as in `GatedMlp`.
        epsilon: Epsilon of the norms.
        shape: Heads of its attention.
        hidden_first: Whether the projection reads [stream, token] instead of [token, stream].
    """

    def __init__(
        self, width: int, *, inner: int, epsilon: float, shape: AttentionShape, hidden_first: bool
    ) -> None:
        super().__init__()
        self.hidden_first = hidden_first
        self.enorm, self.hnorm = RMSNorm(width, epsilon), RMSNorm(width, epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = FeedbackLayer(
            width, inner=inner, epsilon=epsilon, shape=shape, reads_tokens=False
        )

    def read(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Reading:
        """Return the residual stream, the input of attention, and its keys and values."""
        parts = [self.enorm(embedded), self.hnorm(hidden)]
        stream = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.mtp_block.read(stream, embedded, positions)

    @property
    def attention(self) -> Attention:
        """The layer's attention."""
        return self.mtp_block.attention

    def forward(self, stream: Tensor, inputs: Tensor, *attended: Any) -> Tensor:
        """Return the stream after this layer; `attended` are further arguments of `Attention`."""
        return self.mtp_block(stream, inputs, *attended)


Layers = Sequence[FeedbackLayer | ProjectedLayer]


def rounds(
    layers: Layers,
    hidden: Float[Tensor, "batch time width"],
    embedded: Iterable[Tensor],
    features: Features,
    fed_back: Callable[[Tensor], Tensor],
) -> Iterator[Float[Tensor, "batch time width"]]:
    """Yield the output of each round at all positions, as if drafting from each of them.

    Args:
        layers: Layers of the head; the first one reads tokens.
        hidden: Input of the first round, from the base.
        embedded: Embeddings of the tokens of each round, (batch, time, width) each.
        features: Features with the positions and the documents.
        fed_back: Returns the input of the next round, given the output of a round.
    """
    pasts: list[Tensor] = []
    paths: list[Tensor] = []
    places = features.places()
    visible, documents = None, features.documents
    if hidden.device.type != "cpu" and not takes(hidden, layers[0].attention.head_dim):
        visible, documents = features.visible(), None
    elif documents is None:
        documents = Documents.of(places.expand(len(hidden), -1))
    for level, tokens in enumerate(embedded):
        hidden, at = fed_back(hidden) if level else hidden, places + level
        for place, layer in enumerate(layers):
            stream, inputs, fresh = layer.read(hidden, tokens, at)
            if level:
                paths[place] = torch.cat([paths[place], fresh[..., None, :]], dim=4)
            else:
                pasts.append(fresh)
                paths.append(_no_path(fresh))
            hidden = layer(stream, inputs, at, pasts[place], visible, paths[place], documents)
        yield hidden


def commit(
    layers: Layers,
    hidden: Float[Tensor, "batch time width"],
    embedded: Float[Tensor, "batch time width"],
    committed: Committed,
    memory: Slots,
) -> Branch:
    """Store the committed positions; return the first round at the last one of each row.

    If `hidden` has more positions than were committed, the additional ones follow each row's last
    one and are computed with it, with causal attention among them.
    """
    time = committed.next_tokens.shape[1]
    read = memory.advance(time, committed.counts)
    newest, behind = memory.lengths[:, None] - 1, hidden.shape[1] - time
    at = newest + torch.arange(behind + 1, device=newest.device)
    positions = torch.cat([read, at[:, 1:]], dim=1) if behind else read
    paths: list[Tensor] = []

    def last(values: Tensor) -> Tensor:
        """Return the values at the last committed position and at those that follow it."""
        return torch.cat([committed.last(values[:, :time]), values[:, time:]], dim=1)

    for place, layer in enumerate(layers):
        stream, inputs, fresh = layer.read(hidden, embedded, positions)
        memory.write(fresh[:, :, :, :time], read, place)
        if place + 1 == len(layers):
            stream, inputs, positions = last(stream), last(inputs), at
        past, visible = memory.past(positions.minimum(newest))
        past = past.chunk(len(layers), dim=1)[place]
        if behind:
            past = torch.cat([past, fresh[:, :, :, time:]], dim=3)
            visible = torch.cat([visible, at[:, None, 1:] <= positions[..., None]], dim=2)
        paths.append(_no_path(fresh[:, :, :, :1]))
        hidden = layer(stream, inputs, positions, past, visible)
    return Branch(hidden, tuple(paths), memory)


def branch(
    layers: Layers,
    above: Branch,
    embedded: Float[Tensor, "batch node width"],
    parents: Int[Tensor, "batch node"],
) -> Branch:
    """Compute the next round, from each node's parent in the previous level."""
    hidden, paths = pick_parents(above.hidden, parents), []
    level = above.paths[0].shape[4] + 1
    positions = (above.memory.lengths[:, None] - 1 + level).expand_as(parents)
    pasts, visible = above.memory.past()
    parts = zip(layers, above.paths, pasts.chunk(len(layers), dim=1), strict=True)
    for layer, path, past in parts:
        stream, inputs, fresh = layer.read(hidden, embedded, positions)
        path = path.take_along_dim(parents[:, None, None, :, None, None], dim=3)
        paths.append(torch.cat([path, fresh[..., None, :]], dim=4))
        hidden = layer(stream, inputs, positions, past, visible, paths[-1])
    return Branch(hidden, tuple(paths), above.memory)


def _no_path(fresh: Tensor) -> Tensor:
    """Return empty paths."""
    return fresh[..., None, :][..., :0, :]
