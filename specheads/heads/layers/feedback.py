"""EAGLE-3, MTP and the first level of EAGLE-GRU: rounds that read their own output and a token.

Each layer attends to the first round of all earlier positions, which the base has read, and to the
later rounds of its own path, which the base has not read.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Anchors, Guesses, Nodes, State, States, Tokens
from specheads.core.features import Committed, Features, PackedDocuments
from specheads.heads.layers.attention import (
    AttentionContext,
    HeadCache,
    LayerInputs,
    LlamaLayer,
    layer_windows,
)
from specheads.heads.layers.common import BorrowingHead, RMSNorm, pick_parents


@dataclass(frozen=True, slots=True)
class DraftBranches:
    """State of a draft: the nodes of a level, and the keys and values of their paths."""

    hidden: Float[Tensor, "batch node width"]
    """Input of the next round at the nodes."""
    paths: tuple[Tensor, ...]
    """Keys and values of drafted tokens, per layer: (batch, key head, 2, node, level, head_dim)."""
    cache: HeadCache


class FeedbackHead(BorrowingHead):
    """`depth` rounds of the same layers; training runs them from every position at once.

    So each round trains on what it reads when drafting.
    """

    norm: RMSNorm
    feeds_normed: bool
    """Whether a round reads the normalised output of the previous one."""

    def windows(self, level: int) -> list[int | None]:
        """Return the positions of the text that a level sees in each layer; None is all of them."""
        return layer_windows(self.config, len(self.blocks()))

    @abstractmethod
    def blocks(self) -> Sequence[LlamaLayer]:
        """Return the layers of a round."""

    def initialise_layer(self, tensors: Mapping[str, Tensor], norm: Tensor) -> None:
        """Start as the base's last layer, given its tensors and the weight of the final norm."""
        self.blocks()[0].copy_layer(tensors)

    @abstractmethod
    def first_input(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the input of the first round, from the base."""

    def join_token(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the residual stream of a round, from its input and the embedding of its token."""
        return hidden

    def next_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the next round, from the output of a round."""
        return self.norm(hidden) if self.feeds_normed else hidden

    def embed_in_layer_dtype(self, tokens: Int[Tensor, "*any"]) -> Float[Tensor, "*any width"]:
        """Return the embeddings of tokens in the dtype of the layers."""
        return self.embed(tokens, self.norm.weight)

    def embed_rounds(self, tokens: Tokens) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield the embeddings that each round of training reads."""
        # one lookup for all levels: the gradient of each lookup is as large as the table
        embedded = self.embed_in_layer_dtype(tokens)
        return (embedded.roll(-1 - level, 1) for level in range(self.depth))

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield each round's state, of every position at once."""
        layers, start = self.blocks(), features.positions()
        hidden, texts, paths = self.first_input(features), list[Tensor](), list[Tensor]()
        documents = split_documents(features)
        for level, embedded in enumerate(self.embed_rounds(tokens)):
            hidden = self.next_input(hidden) if level else hidden
            hidden, positions = self.join_token(hidden, embedded), start + level
            for index, (layer, window) in enumerate(zip(layers, self.windows(level), strict=True)):
                inputs = layer.prepare(hidden, positions, embedded)
                if level:
                    paths[index] = append_node(paths[index], inputs)
                else:
                    texts.append(inputs.keys_values)
                    paths.append(empty_path(inputs.keys_values))
                context = AttentionContext(texts[index], None, paths[index], documents, window)
                hidden = layer(inputs, context)
            yield self.norm(hidden)

    def memory(self, batch: int, capacity: int) -> HeadCache:
        """Return empty slots for the keys and values of committed positions."""
        return HeadCache.empty(self.blocks(), batch, capacity, self.windows(0))

    @torch.no_grad()
    def begin(self, committed: Committed, memory: HeadCache) -> Guesses:
        """Store the keys and values of all positions; return the logits after the last."""
        hidden = self.first_input(committed.features)
        return self.guess(self.run_committed(hidden, committed.next_tokens, committed, memory))

    @torch.no_grad()
    def store_committed(self, committed: Committed, memory: HeadCache) -> None:
        """Store the keys and values of all positions; the last layer's output is not computed."""
        hidden = self.first_input(committed.features)
        self.run_committed(hidden, committed.next_tokens, committed, memory, drafts=False)

    def run_committed(
        self,
        hidden: Float[Tensor, "batch read width"],
        tokens: Int[Tensor, "batch read"],
        committed: Committed,
        cache: HeadCache,
        *,
        drafts: bool = True,
    ) -> DraftBranches:
        """Store the committed positions; return the first round at the last one of each row.

        Further positions of `hidden` follow each row's last one and are computed with it. Without
        `drafts` the result is not used, and the last layer only stores its keys and values.
        """
        layers, time = self.blocks(), committed.next_tokens.shape[1]
        num_further = hidden.shape[1] - time
        committed_positions = cache.advance(time, committed.counts)
        newest = cache.lengths[:, None] - 1
        last_positions = newest + torch.arange(num_further + 1, device=newest.device)
        further, positions = last_positions[:, 1:], committed_positions
        if num_further:
            positions = torch.cat([committed_positions, further], dim=1)
        # padding sees what the last position sees
        ends = torch.cat([committed_positions.minimum(newest), further], dim=1)
        embedded = self.embed_in_layer_dtype(tokens)
        # the compiler cannot trace a call of list[Tensor]
        paths: list[Tensor] = []

        def select_last(values: Tensor) -> Tensor:
            """Return the values at the last committed position and at those that follow it."""
            last = committed.gather_last(values[:, :time])
            return torch.cat([last, values[:, time:]], dim=1)

        hidden = self.join_token(hidden, embedded)
        for index, layer in enumerate(layers):
            inputs = layer.prepare(hidden, positions, embedded)
            fresh = inputs.keys_values
            cache.write(fresh[:, :, :, :time], committed_positions, index)
            if index + 1 == len(layers):
                if not drafts:
                    break
                inputs, ends = inputs.select(select_last, last_positions), last_positions
            text, visible = cache.text(index), cache.visible(ends, self.windows(0)[index])
            if num_further:
                text = torch.cat([text, fresh[:, :, :, time:]], dim=3)
                is_before = further[:, None] <= inputs.positions[..., None]
                visible = torch.cat([visible, is_before], dim=2)
            paths.append(empty_path(fresh[:, :, :, :1]))
            hidden = layer(inputs, AttentionContext(text, visible))
        return DraftBranches(hidden, tuple(paths), cache)

    @torch.no_grad()
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state, with attention to its path."""
        cache, level = state.cache, state.paths[0].shape[4] + 1
        paths: list[Tensor] = []
        positions = (cache.lengths[:, None] - 1 + level).expand_as(parents)
        embedded = self.embed_in_layer_dtype(tokens)
        hidden = self.join_token(pick_parents(state.hidden, parents), embedded)
        windows = self.windows(level)
        masks = {window: cache.visible(window=window) for window in {*windows}}
        for index, layer in enumerate(self.blocks()):
            inputs = layer.prepare(hidden, positions, embedded)
            path = state.paths[index].take_along_dim(parents[:, None, None, :, None, None], dim=3)
            paths.append(append_node(path, inputs))
            visible = masks[windows[index]]
            hidden = layer(inputs, AttentionContext(cache.text(index), visible, paths[-1]))
        return self.guess(DraftBranches(hidden, tuple(paths), cache))

    def guess(self, output: DraftBranches) -> Guesses:
        """Return the logits of a round, and the state with the input of the next one."""
        normed = self.norm(output.hidden)
        state = replace(output, hidden=normed) if self.feeds_normed else output
        return self.logits(normed, output.paths[0].shape[4]), state


def split_documents(features: Features) -> PackedDocuments:
    """Return the documents of packed rows, within which heads attend."""
    positions = features.positions().expand(len(features.hidden), -1)
    return features.documents or PackedDocuments.of(positions)


def empty_path(keys_values: Tensor) -> Tensor:
    """Return paths without drafted tokens, given keys and values of the positions."""
    return keys_values[..., None, :][..., :0, :]


def append_node(path: Tensor, inputs: LayerInputs) -> Tensor:
    """Return paths with the keys and values of their last node appended."""
    return torch.cat([path, inputs.keys_values[..., None, :]], dim=4)
