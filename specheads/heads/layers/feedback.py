"""EAGLE-3, MTP and the first level of EAGLE-GRU: rounds that read their own output and a token.

Each layer attends to the first round of all earlier positions, which the base has read, and to the
later rounds of its own path, which the base has not read.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.core.drafter import Anchors, Guesses, Nodes, State, States, Tokens
from specheads.core.features import Committed, Features, PackedDocuments
from specheads.core.kernels import flash_takes, product_dtype
from specheads.heads.layers.attention import HeadCache, LlamaLayer, near
from specheads.heads.layers.common import BorrowingHead, RMSNorm, pick_parents


@dataclass(frozen=True, slots=True)
class Branch:
    """State of a draft: the nodes of a level, and the keys and values of their paths."""

    hidden: Float[Tensor, "batch node width"]
    """Input of the next round at the nodes."""
    paths: tuple[Tensor, ...]
    """Keys and values of drafted tokens, per layer: (batch, key head, 2, node, level, head_dim)."""
    memory: HeadCache


class FeedbackHead(BorrowingHead):
    """`depth` rounds of the same layers; training runs them from every position at once.

    So each round trains on what it reads when drafting.
    """

    norm: RMSNorm
    feeds_normed: bool
    """Whether a round reads the normalised output of the previous one."""

    def window(self, level: int) -> int | None:
        """Return the number of positions of the text that a level sees; None is all of them."""
        return getattr(self.config, "sliding_window", None)

    @abstractmethod
    def blocks(self) -> Sequence[LlamaLayer]:
        """Return the layers of a round."""

    def initialise_layer(self, tensors: Mapping[str, Tensor], norm: Tensor) -> None:
        """Start as the base's last layer, given its tensors and the weight of the final norm."""
        self.blocks()[0].copy(tensors)

    @abstractmethod
    def first(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the input of the first round, from the base."""

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the residual stream of a round, from its input and its tokens."""
        return hidden

    def feed_back(self, hidden: Tensor) -> Tensor:
        """Return the input of the next round, from the output of a round."""
        return self.norm(hidden) if self.feeds_normed else hidden

    def embedded(self, tokens: Int[Tensor, "*any"]) -> Float[Tensor, "*any width"]:
        """Return the embeddings of tokens in the dtype of the layers."""
        return self.embed(tokens, self.norm.weight)

    def embeddings(self, tokens: Tokens) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield the embeddings that each round of training reads."""
        # one lookup for all levels: the gradient of each lookup is as large as the table
        own = self.embedded(tokens)
        return (own.roll(-1 - level, 1) for level in range(self.depth))

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield each round's state, of every position at once."""
        layers, places = self.blocks(), features.positions()
        hidden, pasts, paths = self.first(features), list[Tensor](), list[Tensor]()
        (visible, documents), sent = self.attended(features, hidden), None
        for level, embedded in enumerate(self.embeddings(tokens)):
            embedded = embedded if sent is None else self.embedded(sent)
            hidden, at = self.feed_back(hidden) if level else hidden, places + level
            hidden, window = self.enter(hidden, embedded), self.window(level)
            seen = visible if visible is None else near(visible, window)
            for place, layer in enumerate(layers):
                stream, inputs, fresh = layer.read(hidden, at, embedded)
                if level:
                    paths[place] = torch.cat([paths[place], fresh[..., None, :]], dim=4)
                else:
                    pasts.append(fresh)
                    paths.append(no_path(fresh))
                own = pasts[place], seen, paths[place], documents, window
                hidden = layer(stream, inputs, at, *own)
            sent = yield self.norm(hidden)

    def attended(
        self, features: Features, hidden: Tensor
    ) -> tuple[Bool[Tensor, "row time time"] | None, PackedDocuments | None]:
        """Return what positions see in training: a mask of pairs, or the documents of each row.

        The kernel for documents depends on the device and dtype of `hidden`, and on the width.
        """
        head_dim = self.blocks()[0].self_attn.kernel_dim
        if hidden.device.type != "cpu" and not flash_takes(product_dtype(hidden), head_dim):
            # no kernel for documents exists for this dtype or width
            return features.causal_mask(), None
        places = features.positions().expand(len(hidden), -1)
        return None, features.documents or PackedDocuments.of(places)

    def memory(self, batch: int, capacity: int) -> HeadCache:
        """Return empty slots for the keys and values of committed positions."""
        return HeadCache.empty(self.blocks(), batch, capacity, self.window(0))

    @torch.no_grad()
    def begin(self, committed: Committed, memory: HeadCache) -> Guesses:
        """Store the keys and values of all positions; return the logits after the last."""
        hidden = self.first(committed.features)
        return self._answer(self.commit(hidden, committed.next_tokens, committed, memory))

    @torch.no_grad()
    def store_committed(self, committed: Committed, memory: HeadCache) -> None:
        """Store the keys and values of all positions; the last layer's output is not computed."""
        hidden = self.first(committed.features)
        self.commit(hidden, committed.next_tokens, committed, memory, drafts=False)

    def commit(
        self,
        hidden: Float[Tensor, "batch read width"],
        tokens: Int[Tensor, "batch read"],
        committed: Committed,
        memory: HeadCache,
        *,
        drafts: bool = True,
    ) -> Branch:
        """Store the committed positions; return the first round at the last one of each row.

        Further positions of `hidden` follow each row's last one and are computed with it. Without
        `drafts` the result is not used, and the last layer only stores its keys and values.
        """
        layers, time = self.blocks(), committed.next_tokens.shape[1]
        read = memory.advance(time, committed.counts)
        newest, behind = memory.lengths[:, None] - 1, hidden.shape[1] - time
        at = newest + torch.arange(behind + 1, device=newest.device)
        positions = torch.cat([read, at[:, 1:]], dim=1) if behind else read
        # padding sees what the last position sees
        seen = torch.cat([read.minimum(newest), at[:, 1:]], dim=1)
        embedded, paths = self.embedded(tokens), list[Tensor]()

        def last(values: Tensor) -> Tensor:
            """Return the values at the last committed position and at those that follow it."""
            return torch.cat([committed.gather_last(values[:, :time]), values[:, time:]], dim=1)

        hidden = self.enter(hidden, embedded)
        for place, layer in enumerate(layers):
            stream, inputs, fresh = layer.read(hidden, positions, embedded)
            memory.write(fresh[:, :, :, :time], read, place)
            if place + 1 == len(layers):
                if not drafts:
                    break
                stream, inputs, positions, seen = last(stream), last(inputs), at, at
            past, visible = memory.past(seen, self.window(0))
            past = past.chunk(len(layers), dim=1)[place]
            if behind:
                past = torch.cat([past, fresh[:, :, :, time:]], dim=3)
                visible = torch.cat([visible, at[:, None, 1:] <= positions[..., None]], dim=2)
            paths.append(no_path(fresh[:, :, :, :1]))
            hidden = layer(stream, inputs, positions, past, visible)
        return Branch(hidden, tuple(paths), memory)

    @torch.no_grad()
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state, with attention to its path."""
        layers, paths = self.blocks(), list[Tensor]()
        level = state.paths[0].shape[4] + 1
        positions = (state.memory.lengths[:, None] - 1 + level).expand_as(parents)
        embedded = self.embedded(tokens)
        hidden = self.enter(pick_parents(state.hidden, parents), embedded)
        pasts, visible = state.memory.past(window=self.window(level))
        parts = zip(layers, state.paths, pasts.chunk(len(layers), dim=1), strict=True)
        for layer, path, past in parts:
            stream, inputs, fresh = layer.read(hidden, positions, embedded)
            path = path.take_along_dim(parents[:, None, None, :, None, None], dim=3)
            paths.append(torch.cat([path, fresh[..., None, :]], dim=4))
            hidden = layer(stream, inputs, positions, past, visible, paths[-1])
        return self._answer(Branch(hidden, tuple(paths), state.memory))

    def _answer(self, output: Branch) -> Guesses:
        """Return the logits of a round, and the state with the input of the next one."""
        normed = self.norm(output.hidden)
        state = replace(output, hidden=normed) if self.feeds_normed else output
        return self.logits(normed, output.paths[0].shape[4]), state


def no_path(fresh: Tensor) -> Tensor:
    """Return paths without drafted tokens, given keys and values of the positions."""
    return fresh[..., None, :][..., :0, :]
