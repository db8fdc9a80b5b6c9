"""Draft with a smaller language model that has the same vocabulary."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.base.cache import KVCache, upload
from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, refuse_scattering
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftModelCache:
    """The draft model's own KV cache."""

    cache: KVCache

    def keep(self, rows: Int[Tensor, " kept"]) -> "DraftModelCache":
        """Return the cache of these rows."""
        self.cache.keep_rows(rows.tolist())
        return self

    def join(self, other: "DraftModelCache") -> "DraftModelCache":
        """Return the cache with the rows of both batches."""
        self.cache.join(other.cache)
        return self

    scatter = refuse_scattering


@dataclass(frozen=True, slots=True)
class _Draft:
    """State of a draft."""

    cache: KVCache
    tree: TokenTree | None
    """All levels that the model has read, without the root, which is committed."""
    above: int
    """First node of the level read last."""


class DraftModel(Drafter):
    """Drafts with another causal LM, which has its own KV cache.

    Committed tokens, with the root, are read once and kept, at most `chunk` tokens per forward. The
    nodes of a draft, at most `max_nodes`, are read into the cache's scratch and dropped with the
    next draft. Each level is one forward over all nodes so far, for a tree as for a chain.

    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """

    def __init__(
        self,
        model: FrozenBase,
        depth: int,
        base: FrozenBase,
        *,
        max_nodes: int = 128,
        chunk: int = 512,
    ) -> None:
        if depth < 1:
            raise InputError(f"a draft model needs a depth of at least 1, got {depth}")
        refuse_vocabulary(model, base)
        self.model, self.depth = model, depth
        self.max_nodes, self.chunk = max_nodes, chunk
        # both projections may have padding rows without a token
        self.vocab_size = self.drafted_size = min(model.vocab_size, base.vocab_size)

    def memory(self, batch: int, capacity: int) -> DraftModelCache:
        """Return an empty cache of the draft model."""
        return DraftModelCache(self.model.cache(batch, capacity + self.max_nodes))

    def begin(
        self, committed: Committed, memory: DraftModelCache
    ) -> tuple[Float[Tensor, "batch 1 vocab"], _Draft]:
        """Read the committed tokens and the root in one forward."""
        read, tokens, cache = committed.features.tokens, committed.next_tokens, memory.cache
        assert read is not None
        # the root of the last draft has been read; only a new row starts at its first token
        text = torch.cat([read[:, :1], tokens], dim=1)
        is_new = [length == 0 for length in cache.row_lengths]
        first = 1 - upload(is_new, tokens.device)
        places = first[:, None] + torch.arange(text.shape[1], device=tokens.device)
        reading = text.gather(1, places.clamp(max=text.shape[1] - 1))
        counts = [new + old for new, old in zip(is_new, committed.counts.tolist(), strict=True)]
        reading = reading[:, : max(counts)]
        logits, _ = self.model.prefill(reading, cache, counts, chunk=self.chunk)
        return logits[:, None, : self.vocab_size], _Draft(cache, None, 0)

    def extend(
        self, state: _Draft, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], _Draft]:
        """Read the tree so far and this level."""
        if (old := state.tree) is None:
            tree, above = TokenTree(tokens, torch.full_like(tokens, -1)), 0
        else:
            parents, above = state.above + parents, old.tokens.shape[1]
            tree = TokenTree(
                torch.cat([old.tokens, tokens], dim=1), torch.cat([old.parents, parents], dim=1)
            )
        logits = self.model.verify(tree, state.cache).logits[:, above:]
        return logits[..., : self.vocab_size], _Draft(state.cache, tree, above)


def refuse_vocabulary(model: FrozenBase, base: FrozenBase) -> None:
    """Refuse a vocabulary that differs from the base's; without tokenizers compare the sizes."""
    if model.tokenizer is None or base.tokenizer is None:
        equal = model.vocab_size == base.vocab_size
    else:
        equal = model.tokenizer.get_vocab() == base.tokenizer.get_vocab()
    if not equal:
        raise InputError(
            f"a draft model must share the base's vocabulary: {model.name!r} has "
            f"{model.vocab_size} tokens, {base.name!r} has {base.vocab_size}, and they differ; "
            "choose a smaller model of the same family"
        )
