"""Draft with a smaller language model, or with the base itself over a window of the text."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.base.cache import KVCache, RowCache, upload
from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Guesses, Nodes
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import TokenTree, chain


class DraftState(NamedTuple):
    """State of a draft between two levels."""

    cache: KVCache
    tree: TokenTree
    """All levels that the model has read, without the root, which is committed."""
    level_start: int
    """First node of the level read last; -1 is the root."""


class DraftModel(Drafter):
    """Drafts with another causal LM, which has its own KV cache.

    Committed tokens, with the root, are read once, at most `chunk` per forward. The nodes of a
    draft, at most `max_nodes`, stay in the cache's scratch. Each level is one forward over all
    nodes so far.

    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """

    def __init__(
        self, model: FrozenBase, depth: int, base: FrozenBase, *, max_nodes: int = 128
    ) -> None:
        refuse_vocabulary(model, base)
        self.model, self.depth, self.max_length = model, depth, model.max_length
        self.max_nodes, self.chunk = max_nodes, 512
        # both projections may have padding rows without a token
        self.drafted_size = min(model.vocab_size, base.vocab_size)

    def memory(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of the draft model."""
        return self.model.cache(batch, capacity + self.max_nodes)

    def begin(self, committed: Committed, memory: KVCache) -> Guesses:
        """Read the committed tokens and the root in one forward."""
        tokens, next_tokens, cache = committed.features.tokens, committed.next_tokens, memory
        assert tokens is not None
        # the root of the last draft has been read; only a new row starts at its first token
        text = torch.cat([tokens[:, :1], next_tokens], dim=1)
        # the base may have more padding rows, and can emit their tokens
        text = text.clamp(max=len(self.model.embedding) - 1)
        is_new = [length == 0 for length in cache.row_lengths]
        first = 1 - upload(is_new, text.device)
        positions = first[:, None] + torch.arange(text.shape[1], device=text.device)
        unread = text.gather(1, positions.clamp(max=text.shape[1] - 1))
        counts = [new + old for new, old in zip(is_new, committed.counts.tolist(), strict=True)]
        unread = unread[:, : max(counts)]
        logits, _ = self.model.prefill(unread, cache, counts, chunk=self.chunk)
        empty = text[:, :0]
        return logits[:, None, : self.drafted_size], DraftState(cache, TokenTree(empty, empty), -1)

    def extend(self, state: DraftState, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read the tree so far and this level."""
        cache, tree, level_start = state
        if self.model.has_states and tokens.shape[1] > 1:
            raise InputError(
                "a draft model with recurrent layers drafts chains only, as a state belongs to "
                f"one path, got {tokens.shape[1]} nodes in a level; take a tree without branches"
            )
        first = tree.tokens.shape[1]
        tree = TokenTree(
            torch.cat([tree.tokens, tokens], dim=1),
            torch.cat([tree.parents, level_start + parents], dim=1),
        )
        logits = self.model.verify(tree, cache).logits[:, first:]
        return logits[..., : self.drafted_size], DraftState(cache, tree, first)


def refuse_vocabulary(model: FrozenBase, base: FrozenBase) -> None:
    """Refuse a vocabulary that differs from the base's; without tokenizers compare the sizes."""
    if model.tokenizer is None or base.tokenizer is None:
        equal = model.vocab_size == base.vocab_size
    else:
        equal = model.tokenizer.get_vocab() == base.tokenizer.get_vocab()
    if not equal:
        raise InputError(
            f"a draft model needs the base's vocabulary: {model.name!r} has {model.vocab_size} "
            f"tokens, {base.name!r} has {base.vocab_size}; choose one of the same family"
        )


class WindowCache(KVCache):
    """A KV cache that keeps a text's first tokens (sinks) and its most recent ones (window).

    Keys keep their position in the full text. One forward has `scratch` slots.
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
        """Position of each row's next token in the full text: (batch)."""
        return self.lengths + self.dropped

    def slot_positions(self, end: int) -> Tensor:
        """Return the position in the full text of each slot's token: (batch, end)."""
        slots = torch.arange(end, device=self.device)
        return slots + (slots >= self.sinks) * self.dropped[:, None]

    def skip(self, count: Int[Tensor, " batch"]) -> None:
        """Skip the next `count[b]` tokens of each row's text; the sinks must be committed."""
        self.dropped = self.dropped + count

    def commit(self, paths: list[list[int]], *, moved: bool = False) -> None:
        """Commit nodes `paths[b]` of the last forward, and drop what leaves the window."""
        super().commit(paths, moved=moved)
        capacity = self.sinks + self.window
        excess = [max(length - capacity, 0) for length in self.row_lengths]
        if not any(excess):
            return
        target = torch.arange(self.sinks, capacity, device=self.device).expand(len(excess), -1)
        leaving = upload(excess, self.device)
        self._copy(target, target + leaving[:, None])
        self.skip(leaving)
        self._set_lengths([min(length, capacity) for length in self.row_lengths])

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        super().keep_rows(rows)
        self.dropped = self.dropped[upload(rows, self.device)]

    def join(self, new_rows: RowCache) -> RowCache:
        """Append another cache's rows; both are copied to new, larger tensors."""
        assert isinstance(new_rows, WindowCache)
        dropped = torch.cat([self.dropped, new_rows.dropped])
        super().join(new_rows)
        self.dropped = dropped
        return self


class Streaming(DraftModel):
    """The base as its own draft model, over attention sinks and a window of recent text.

    The size of its cache and the time of a draft do not grow with the context. It reads only the
    sinks (at least one) and the window of a long prompt, and then every committed token.
    `max_nodes` limits the nodes of a draft and the tokens of one forward.

    Source: Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049; Xiao et al. 2023, StreamingLLM,
    arXiv:2309.17453, which numbers positions within the cache; here they are those of the text.
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
                f"streaming needs sinks >= 1 and a window above {depth}, got {sinks} and {window}"
            )
        if base.has_states:
            raise InputError(
                "streaming needs a base with keys and values only, because states keep all of the "
                f"text, and those of {base.config.model_type!r} do; choose another drafter"
            )
        super().__init__(base, depth, base, max_nodes=max_nodes)
        self.sinks, self.window, self.chunk = sinks, window, max_nodes
        # with more unread positions than the window it would take the row for a new one
        self.max_unread_positions = min(self.max_unread_positions, window)

    def memory(self, batch: int, capacity: int) -> KVCache:
        """Return an empty window; its size does not depend on the capacity."""
        sinks, window, scratch = self.sinks, self.window, self.max_nodes
        return WindowCache(self.model, batch, sinks=sinks, window=window, scratch=scratch)

    def begin(self, committed: Committed, memory: KVCache) -> Guesses:
        """Read the committed tokens; only the end of a long prompt that fits the window."""
        features, tokens, counts = committed.features, committed.next_tokens, committed.counts
        assert isinstance(memory, WindowCache)
        if tokens.shape[1] > self.window:
            assert features.tokens is not None
            start = self._skip_to_window(features.tokens, counts, memory)
            longest = int((counts - start).max())
            recent = start[:, None] + torch.arange(longest, device=counts.device)
            recent = recent.clamp(max=tokens.shape[1] - 1)
            committed = Committed(features.gather(recent), tokens.gather(1, recent), counts - start)
        return super().begin(committed, memory)

    def _skip_to_window(
        self, tokens: Int[Tensor, "batch time"], counts: Int[Tensor, " batch"], cache: WindowCache
    ) -> Int[Tensor, " batch"]:
        """Read each new row's sinks, skip to its window, return the position before that."""
        is_new = upload([length == 0 for length in cache.row_lengths], counts.device)
        first = counts.clamp(max=self.sinks) * is_new
        self.model.verify(chain(tokens[:, : self.sinks]), cache)
        cache.commit([list(range(length)) for length in first.tolist()])
        # the root follows the last position, and is part of the window
        skipped = (counts + 1 - first - self.window).clamp(min=0) * is_new
        cache.skip(skipped)
        return (first + skipped - 1).clamp(min=0)
