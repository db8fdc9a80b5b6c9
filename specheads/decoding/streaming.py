"""Self-speculation: the base drafts for itself, seeing the text's first tokens and its last."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.base.cache import KVCache, RowCache, upload
from specheads.base.model import FrozenBase
from specheads.core.drafter import State
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import chain
from specheads.decoding.draft_model import DraftModel, DraftModelCache


class WindowCache(KVCache):
    """A cache that keeps a text's first tokens and its most recent ones.

    Keys keep the place in the text at which they were read, so any kind of position encoding
    will do, and a window as long as the text is the text. One forward has `scratch` slots.
    """

    def __init__(
        self, base: FrozenBase, batch: int, *, sinks: int, window: int, scratch: int
    ) -> None:
        slots = sinks + window + scratch
        base.refuse_slots(batch * slots, "lower window or max_nodes")
        super().__init__(base.num_layers, batch, slots, base.device)
        self.sinks, self.window = sinks, window
        self.dropped = torch.zeros_like(self.lengths)

    @property
    def positions(self) -> Tensor:
        """Where in the text each row's next token stands: (batch)."""
        return self.lengths + self.dropped

    def slot_positions(self, end: int) -> Tensor:
        """Return where in the text each committed slot's token stands: (batch, end)."""
        slots = torch.arange(end, device=self.device)
        return slots + (slots >= self.sinks) * self.dropped[:, None]

    def skip(self, count: Int[Tensor, " batch"]) -> None:
        """Leave out the next `count[b]` tokens of each row's text; the sinks must stand."""
        self.dropped = self.dropped + count

    def commit(self, paths: list[list[int]]) -> None:
        """Keep nodes `paths[b]` of the last forward, and let go of what leaves the window."""
        super().commit(paths)
        most = self.sinks + self.window
        excess = [max(length - most, 0) for length in self.row_lengths]
        if not any(excess):
            return
        target = torch.arange(self.sinks, most, device=self.device).expand(len(excess), -1)
        leaving = upload(excess, self.device)
        self._copy(target, target + leaving[:, None])
        self.skip(leaving)
        self._set_lengths([min(length, most) for length in self.row_lengths])

    def keep_rows(self, rows: list[int]) -> None:
        """Forget every row but these, in this order."""
        super().keep_rows(rows)
        self.dropped = self.dropped[upload(rows, self.device)]

    def join(self, other: RowCache) -> None:
        """Take over another cache's rows; both are copied into new, larger tensors."""
        assert isinstance(other, WindowCache)
        dropped = torch.cat([self.dropped, other.dropped])
        super().join(other)
        self.dropped = dropped


class Streaming(DraftModel):
    """The base as its own draft model, over attention sinks and a window of recent text.

    Neither its cache nor the time of a draft grows with the context. Of a long prompt it reads
    the sinks, at least one, and the window only, and from then on every token that is committed.
    With a window as long as the context the draft is the base. `max_nodes` bounds the nodes of a
    draft and the tokens of one forward.

    Source: Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049; Xiao et al. 2023, StreamingLLM,
    arXiv:2309.17453, who number positions within the cache where we keep those of the text.
    """

    def __init__(
        self,
        base: FrozenBase,
        depth: int,
        *,
        sinks: int = 4,
        window: int = 508,
        max_nodes: int = 128,
    ) -> None:
        if sinks < 1 or window <= depth:
            raise InputError(
                f"streaming needs sinks >= 1 and a window longer than its depth of {depth}, got "
                f"{sinks} and {window}"
            )
        super().__init__(base, depth, base, max_nodes=max_nodes, chunk=max_nodes)
        self.sinks, self.window = sinks, window
        # of more than the window it would take a row for a new one, and skip what lies before
        self.most_unread = min(self.most_unread, window)

    def memory(self, batch: int, capacity: int) -> DraftModelCache:
        """Return an empty window, however long the text will be."""
        del capacity
        sinks, window, scratch = self.sinks, self.window, self.max_nodes
        return DraftModelCache(
            WindowCache(self.model, batch, sinks=sinks, window=window, scratch=scratch)
        )

    def begin(
        self, committed: Committed, memory: DraftModelCache
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Read what was committed; of a long prompt what the window can hold."""
        features, tokens, counts = committed.features, committed.next_tokens, committed.counts
        assert isinstance(memory.cache, WindowCache)
        if tokens.shape[1] > self.window:
            assert features.tokens is not None
            start = self._skip(features.tokens, counts, memory.cache)
            recent = start[:, None] + torch.arange(
                int((counts - start).max()), device=counts.device
            )
            recent = recent.clamp(max=tokens.shape[1] - 1)
            committed = Committed(features.at(recent), tokens.gather(1, recent), counts - start)
        return super().begin(committed, memory)

    def _skip(
        self,
        read: Int[Tensor, "batch time"],
        counts: Int[Tensor, " batch"],
        cache: WindowCache,
    ) -> Int[Tensor, " batch"]:
        """Read each new row's sinks, and skip to its window; return the position before that."""
        is_new = upload([length == 0 for length in cache.row_lengths], counts.device)
        first = counts.clamp(max=self.sinks) * is_new
        self.model.verify(chain(read[:, : self.sinks]), cache)
        cache.commit([list(range(length)) for length in first.tolist()])
        # the root stands behind the last position, and belongs to the window
        skipped = (counts + 1 - first - self.window).clamp(min=0) * is_new
        cache.skip(skipped)
        return (first + skipped - 1).clamp(min=0)
