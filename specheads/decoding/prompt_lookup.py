"""Prompt lookup: what followed the last few tokens when they stood in the text before."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.bounds import refuse_nodes
from specheads.core.drafter import Drafter, refuse_scattering
from specheads.core.errors import InputError
from specheads.core.features import Committed

MAX_NGRAM, MIN_NGRAM = 3, 1
"""Most and fewest tokens that must stand in the text before, unless others are asked for."""


@dataclass(slots=True)
class LookupText:
    """Prompt and new text of each row; what lies beyond a row's root is never looked at."""

    tokens: Int[Tensor, "batch slot"]
    lengths: Int[Tensor, " batch"]
    """Tokens that the base has read; the root stands right behind them."""
    extent: int = 0
    """Slots that any row may use, known without asking the device."""

    def append(self, committed: Committed) -> None:
        """Write what was committed behind what stands there, and the root behind that."""
        read, root, counts = committed.features.tokens, committed.root(), committed.counts
        assert read is not None
        new = torch.cat([read, root], dim=1).scatter(1, counts[:, None], root)
        slots = self.lengths[:, None] + torch.arange(new.shape[1], device=new.device)
        self.tokens.scatter_(1, slots, new)
        self.lengths = self.lengths + counts
        self.extent += new.shape[1] - 1

    def keep(self, rows: Int[Tensor, " kept"]) -> "LookupText":
        """Return the texts of these rows, and ask the device how long they are."""
        lengths = self.lengths[rows]
        return LookupText(self.tokens[rows], lengths, int(lengths.max()))

    def join(self, other: "LookupText") -> "LookupText":
        """Return the texts of both batches' rows."""
        lengths = torch.cat([self.lengths, other.lengths])
        tokens = torch.cat([self.tokens, other.tokens])
        return LookupText(tokens, lengths, max(self.extent, other.extent))

    scatter = refuse_scattering


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a draft stands: nodes that copy the text so far, and what would come next."""

    continuation: Int[Tensor, "batch copied"]
    copying: Tensor
    """(batch, node): whether the path down to the node is the copied text."""
    level: int


class PromptLookup(Drafter):
    """Copies what followed the same tokens earlier in prompt and new text.

    The longest suffix of at most `max_ngram` tokens that stands earlier in the text decides,
    and of several such places the most recent that is followed by enough text. Where none does,
    the tree policy `hybrid.Lookup` drafts nothing; any other drafts something always, and gets
    equal logits for all tokens. Suffixes have `min_ngram` tokens at least, `depth` are copied at
    most, and the texts lie on the base's device.

    Source: Saxena 2023, apoorvumang/prompt-lookup-decoding, whose longest suffix is 3 tokens as
    here; transformers' is 2. Both copy from the first place, not from the most recent.
    """

    def __init__(
        self,
        vocab_size: int,
        depth: int = 10,
        *,
        max_ngram: int = MAX_NGRAM,
        min_ngram: int = MIN_NGRAM,
        device: torch.device | str = "cpu",
    ) -> None:
        if depth < 1 or not 1 <= min_ngram <= max_ngram:
            raise InputError(
                "prompt lookup needs a depth of at least 1 and n-grams with 1 <= min <= max, got "
                f"depth {depth}, min_ngram {min_ngram} and max_ngram {max_ngram}"
            )
        refuse_nodes(max(depth, max_ngram), "copied_tokens, max_ngram")
        self.vocab_size, self.drafted_size, self.depth = vocab_size, vocab_size, depth
        self.max_ngram, self.min_ngram, self.device = max_ngram, min_ngram, device

    def memory(self, batch: int, capacity: int) -> LookupText:
        """Return empty texts of at most `capacity` tokens."""
        # a row's padding may reach past its own capacity, by what one step commits at most
        tokens = torch.zeros(batch, 2 * capacity + 1, dtype=torch.long, device=self.device)
        return LookupText(tokens, torch.zeros_like(tokens[:, 0]))

    def copy(self, committed: Committed, memory: LookupText) -> Int[Tensor, "batch copied"]:
        """Read what was committed; return the copied continuation, -1 where there is none."""
        memory.append(committed)
        # the slots in use, roots included
        text = memory.tokens[:, : memory.extent + 1]
        return continuation(text, memory.lengths, self.depth, self.max_ngram, self.min_ngram)

    def peek(self, committed: Committed, memory: LookupText) -> Int[Tensor, "batch copied"]:
        """Return what `copy` does, and remember nothing: what was committed comes again."""
        # what is written lies beyond the memory's own end
        return self.copy(committed, replace(memory))

    def read(self, committed: Committed, memory: LookupText) -> None:
        """Remember what was committed."""
        memory.append(committed)

    def begin(
        self, committed: Committed, memory: LookupText
    ) -> tuple[Float[Tensor, "batch 1 vocab"], _Place]:
        """Read what was committed; all mass is on the first copied token, if any."""
        copied = self.copy(committed, memory)
        everywhere = torch.ones_like(copied[:, :1], dtype=torch.bool)
        return self._next(_Place(copied, everywhere, 0))

    def extend(
        self, state: _Place, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], _Place]:
        """Go on copying below the nodes that are copies themselves."""
        agrees = tokens == state.continuation[:, state.level, None]
        copying = state.copying.gather(1, parents) & agrees
        return self._next(_Place(state.continuation, copying, state.level + 1))

    def _next(self, place: _Place) -> tuple[Tensor, _Place]:
        following = place.continuation[:, place.level, None].expand_as(place.copying)
        known = (place.copying & (following >= 0))[..., None]
        one_hot = torch.nn.functional.one_hot(following.clamp(min=0), self.vocab_size)
        # the logarithm of one token's certainty, or of nothing known
        return torch.where(known, one_hot, 1).float().log(), place


def continuation(
    text: Int[Tensor, "batch slot"],
    lengths: Int[Tensor, " batch"],
    copied: int,
    max_ngram: int,
    min_ngram: int = 1,
) -> Int[Tensor, "batch copied"]:
    """Return what followed the text's longest suffix where it stood before, -1 beyond the end.

    All places of all rows are compared at once. Of places that agree in as many tokens, one with
    a whole continuation behind it is better, and of those the most recent. Row b of the text
    holds `lengths[b] + 1` tokens; where its last `min_ngram` stand nowhere else, all is -1.
    """
    num_slots = text.shape[1]
    slots = torch.arange(num_slots, device=text.device)
    last = lengths[:, None]
    # matched[b, i]: how many tokens up to place i agree with as many up to the last one
    matched = torch.zeros_like(text)
    agrees = slots < last
    for back in range(max_ngram):
        suffix = text.gather(1, (last - back).clamp(min=0))
        earlier = text.roll(back, dims=1)
        agrees = agrees & (slots >= back) & (earlier == suffix)
        matched = matched + agrees
    # three criteria as one number, in which no two places are equal
    room = (last - slots).clamp(0, copied)
    best = ((matched * (copied + 1) + room) * num_slots + slots).argmax(-1, keepdim=True)
    found = matched.gather(1, best) >= min_ngram
    places = best + 1 + torch.arange(copied, device=text.device)
    following = text.gather(1, places.clamp(max=num_slots - 1))
    return torch.where(found & (places <= last), following, -1)


class LookupIndex:
    """A text as it grows, and where its last tokens stood in it before.

    It finds what `prompt_lookup.continuation` finds in the same text, in a time that does not grow
    with it.
    """

    def __init__(
        self, tokens: Sequence[int], *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM
    ) -> None:
        self.min_ngram, self._text = min_ngram, list[int]()
        # of 1, 2, ... tokens in a row, the places of their last, but for the end of the text
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what follows."""
        for token in tokens:
            last = len(self._text) - 1
            for length, ends in enumerate(self._ends, start=1):
                if length <= len(self._text):
                    ends.setdefault(tuple(self._text[-length:]), []).append(last)
            self._text.append(token)

    def find(self, copied: int) -> tuple[int, list[int]]:
        """Return how many of the last tokens stood together before, and what followed them there.

        Of several places the most recent with so many tokens behind it, or else the one with most.
        Where there is none it is zero, and nothing.
        """
        for length in range(len(self._ends), self.min_ngram - 1, -1):
            if length > len(self._text):
                continue
            if ends := self._ends[length - 1].get(tuple(self._text[-length:])):
                whole = bisect_right(ends, len(self._text) - 1 - copied)
                begin = ends[max(whole - 1, 0)] + 1
                return length, self._text[begin : begin + copied]
        return 0, []


def common_prefix_length(copied: Iterable[int], said: Iterable[int]) -> int:
    """Return how many leading tokens of both are the same."""
    return sum(takewhile(bool, map(eq, copied, said)))
