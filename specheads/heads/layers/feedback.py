"""A layer that reads its own output, and one more token each time: what EAGLE-3 drafts with."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specheads.core.drafter import pick_parents
from specheads.core.features import Committed, Features, document_lengths
from specheads.heads.layers.attention import Attention, AttentionShape, GatedMlp, Slots
from specheads.heads.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a draft stands: the nodes of a level, and what each has seen on its way."""

    hidden: Float[Tensor, "batch node width"]
    """The layer's output at the nodes."""
    path: Tensor
    """(batch, 2, shared head, node, level, head_dim): keys and values of drafted tokens."""
    memory: Slots


class FeedbackLayer(nn.Module):
    """A Llama layer that goes over its own output, and reads one more token in each round.

    Its attention reads the token's embedding beside the stream. It sees the first round of all
    positions so far, which the base has read, and the later rounds of its own path alone, which
    the base has not.

    Args:
        width: Width of the stream and of the embeddings.
        inner: Width of the MLP, as `GatedMlp` takes it.
        epsilon: Epsilon of the norms.
        norm_before_residual: Whether the residual starts from the normed stream.
        shape: Heads of its attention.
    """

    def __init__(
        self,
        width: int,
        *,
        inner: int,
        epsilon: float,
        norm_before_residual: bool,
        shape: AttentionShape,
    ) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(width, epsilon)
        self.hidden_norm = RMSNorm(width, epsilon)
        self.self_attn = Attention(2 * width, width, shape)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        self.mlp = GatedMlp(width, inner)

    def rounds(
        self,
        hidden: Float[Tensor, "batch time width"],
        embedded: Iterable[Tensor],
        features: Features,
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield each round's output, of every position at once: drafting from each of them.

        Args:
            hidden: What is made of the base's features.
            embedded: Embeddings of the tokens that a round reads, (batch, time, width) each.
            features: Which say where the positions stand in their texts, and what each may see.
        """
        past = path = visible = None
        lengths: list[int] = []
        places = features.places()
        # many small products are fast on a processor, and slow to launch elsewhere
        if hidden.device.type == "cpu":
            lengths = document_lengths(places.expand(len(hidden), -1))
        else:
            visible = features.visible()
        for level, tokens in enumerate(embedded):
            inputs, fresh = self._read(hidden, tokens, places + level)
            if past is None or path is None:
                past, path = fresh, _no_path(fresh)
            else:
                path = torch.cat([path, fresh[..., None, :]], dim=4)
            hidden = self(hidden, inputs, places + level, past, visible, path, lengths)
            yield hidden

    def commit(
        self,
        hidden: Float[Tensor, "batch time width"],
        embedded: Float[Tensor, "batch time width"],
        committed: Committed,
        memory: Slots,
    ) -> Branch:
        """Remember what the base has read; return the first round at the last counted position."""
        inputs, fresh = self._read(hidden, embedded, memory.following(hidden.shape[1]))
        memory.append(fresh, committed.counts)
        branch = Branch(committed.last(hidden), _no_path(fresh[:, :, :, :1]), memory)
        return self._go(branch, committed.last(inputs), memory.lengths[:, None] - 1)

    def branch(
        self,
        above: Branch,
        embedded: Float[Tensor, "batch node width"],
        parents: Int[Tensor, "batch node"],
    ) -> Branch:
        """Go one round further, from each node's parent in the level above."""
        hidden = pick_parents(above.hidden, parents)
        path = above.path.take_along_dim(parents[:, None, None, :, None, None], dim=3)
        positions = (above.memory.lengths[:, None] + path.shape[4]).expand_as(parents)
        inputs, fresh = self._read(hidden, embedded, positions)
        path = torch.cat([path, fresh[..., None, :]], dim=4)
        return self._go(Branch(hidden, path, above.memory), inputs, positions)

    def _go(self, branch: Branch, inputs: Tensor, positions: Tensor) -> Branch:
        past, visible = branch.memory.past()
        hidden = self(branch.hidden, inputs, positions, past, visible, branch.path)
        return Branch(hidden, branch.path, branch.memory)

    def _read(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads, twice the width, and its keys and values."""
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        return inputs, self.self_attn.keys_values(inputs, positions)

    def forward(self, hidden: Tensor, inputs: Tensor, *attended: Any) -> Tensor:
        """Return the stream after this layer; `attended` is what `Attention` takes."""
        stream = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        stream = stream + self.self_attn(inputs, *attended)
        return stream + self.mlp(self.post_attention_layernorm(stream))


def _no_path(fresh: Tensor) -> Tensor:
    """Return paths of length zero."""
    return fresh[..., None, :][..., :0, :]
