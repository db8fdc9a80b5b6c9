"""Prompt lookup: copy what followed the last few tokens at an earlier place in the text."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, refuse_scattering
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import refuse_nodes

MAX_NGRAM, MIN_NGRAM = 3, 1
"""Default length of the longest and of the shortest suffix that is looked for."""


@dataclass(slots=True)
class LookupText:
    """Prompt and new text of each row; slots after a row's root are never read."""

    tokens: Int[Tensor, "batch slot"]
    lengths: Int[Tensor, " batch"]
    """Tokens that the base has read; the root follows them."""
    extent: int = 0
    """Slots that any row may use, known on the host."""

    def append(self, committed: Committed) -> None:
        """Append the committed tokens and the root to each row's text."""
        read, root, counts = committed.features.tokens, committed.root(), committed.counts
        assert read is not None
        new = torch.cat([read, root], dim=1).scatter(1, counts[:, None], root)
        slots = self.lengths[:, None] + torch.arange(new.shape[1], device=new.device)
        self.tokens.scatter_(1, slots, new)
        self.lengths = self.lengths + counts
        self.extent += new.shape[1] - 1

    def keep(self, rows: Int[Tensor, " kept"]) -> "LookupText":
        """Return the texts of these rows. Reading their lengths synchronises."""
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
    """State of a draft: which nodes copy the text so far, and which token comes next."""

    continuation: Int[Tensor, "batch copied"]
    copying: Tensor
    """(batch, node): whether the path down to the node is the copied text."""
    level: int


class PromptLookup(Drafter):
    """Copies what followed the same tokens earlier in prompt and new text.

    It looks for the longest suffix of `min_ngram` to `max_ngram` tokens that occurs earlier in the
    text, and copies up to `depth` tokens from there. If there are several places, it prefers the
    most recent one that is followed by enough text. Without a match the tree policy `hybrid.Lookup`
    drafts nothing; other policies always draft, and get equal logits for all tokens. The texts are
    kept on the base's device.

    Source: Saxena 2023, apoorvumang/prompt-lookup-decoding. The longest suffix has 3 tokens there
    and here, and 2 in transformers. Both copy from the first place, not from the most recent one.
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
        # padding may go past a row's own capacity, at most by the tokens of one step
        tokens = torch.zeros(batch, 2 * capacity + 1, dtype=torch.long, device=self.device)
        return LookupText(tokens, torch.zeros_like(tokens[:, 0]))

    def copy(self, committed: Committed, memory: LookupText) -> Int[Tensor, "batch copied"]:
        """Read the committed tokens; return the copied continuation, padded with -1."""
        memory.append(committed)
        # the slots in use, roots included
        text = memory.tokens[:, : memory.extent + 1]
        return continuation(text, memory.lengths, self.depth, self.max_ngram, self.min_ngram)

    def peek(self, committed: Committed, memory: LookupText) -> Int[Tensor, "batch copied"]:
        """Return what `copy` returns, without storing the tokens: they will come again."""
        # the new tokens are written after the end of the stored text
        return self.copy(committed, replace(memory))

    def read(self, committed: Committed, memory: LookupText) -> None:
        """Store the committed tokens."""
        memory.append(committed)

    def begin(
        self, committed: Committed, memory: LookupText
    ) -> tuple[Float[Tensor, "batch 1 vocab"], _Place]:
        """Read the committed tokens; all mass is on the first copied token, if any."""
        copied = self.copy(committed, memory)
        everywhere = torch.ones_like(copied[:, :1], dtype=torch.bool)
        return self._next(_Place(copied, everywhere, 0))

    def extend(
        self, state: _Place, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], _Place]:
        """Continue copying below the nodes that are copies themselves."""
        agrees = tokens == state.continuation[:, state.level, None]
        copying = state.copying.gather(1, parents) & agrees
        return self._next(_Place(state.continuation, copying, state.level + 1))

    def _next(self, place: _Place) -> tuple[Tensor, _Place]:
        following = place.continuation[:, place.level, None].expand_as(place.copying)
        known = (place.copying & (following >= 0))[..., None]
        one_hot = torch.nn.functional.one_hot(following.clamp(min=0), self.vocab_size)
        # one token is certain, or all are equally likely
        return torch.where(known, one_hot, 1).float().log(), place


def continuation(
    text: Int[Tensor, "batch slot"],
    lengths: Int[Tensor, " batch"],
    copied: int,
    max_ngram: int,
    min_ngram: int = 1,
) -> Int[Tensor, "batch copied"]:
    """Return what followed an earlier occurrence of the text's longest suffix, padded with -1.

    All places of all rows are compared at once. Between places that match equally many tokens,
    prefer one with a full continuation, then the most recent one. Row b of the text has
    `lengths[b] + 1` tokens. If its last `min_ngram` tokens occur nowhere else, all values are -1.
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
    """The n-grams of one growing text, on the host.

    It finds the same as `continuation`, in constant time.
    """

    def __init__(
        self, tokens: Sequence[int], *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM
    ) -> None:
        self.min_ngram, self._text = min_ngram, list[int]()
        # for n-grams of 1, 2, ... tokens: the places of their last tokens, except the text's end
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            last = len(self._text) - 1
            for length, ends in enumerate(self._ends, start=1):
                if length <= len(self._text):
                    ends.setdefault(tuple(self._text[-length:]), []).append(last)
            self._text.append(token)

    def find(self, copied: int) -> tuple[int, list[int]]:
        """Return the length of the longest suffix that occurs earlier, and what followed it there.

        Prefer the most recent match with a full continuation, else the longest continuation.
        Without a match, return zero and an empty list.
        """
        for length in range(len(self._ends), self.min_ngram - 1, -1):
            if length > len(self._text):
                continue
            if ends := self._ends[length - 1].get(tuple(self._text[-length:])):
                whole = bisect_right(ends, len(self._text) - 1 - copied)
                begin = ends[max(whole - 1, 0)] + 1
                return length, self._text[begin : begin + copied]
        return 0, []


def common_prefix_length(copied: Iterable[int], decoded: Iterable[int]) -> int:
    """Return how many leading tokens are equal."""
    return sum(takewhile(bool, map(eq, copied, decoded)))
