"""Prompt lookup: copy what followed the last few tokens at an earlier place in the text."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.core.drafter import Drafter, refuse_scattering
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import refuse_nodes

MAX_NGRAM = 3
"""Default length of the longest suffix that is looked for."""


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


class CopyingDrafter(Drafter):
    """A drafter that copies text: a tree policy drafts its whole tree, not level by level."""

    def begin(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to draft one level."""
        raise InputError(
            f"{type(self).__name__} drafts whole trees: decode it with tree=Lookup(...), or with "
            "tree=HybridTree(...) and a head"
        )

    def extend(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to draft one level."""
        self.begin()


class PromptLookup(CopyingDrafter):
    """Copies what followed the same tokens earlier in prompt and new text.

    It looks for the longest suffix of up to `max_ngram` tokens that occurs earlier in the text, and
    copies up to `depth` tokens from there. If there are several places, it prefers the most recent
    one that is followed by enough text. Without a match it drafts nothing. The texts are kept on
    the base's device.

    Source: Saxena 2023, apoorvumang/prompt-lookup-decoding. The longest suffix has 3 tokens there
    and here, and 2 in transformers. Both copy from the first place, not from the most recent one.
    """

    def __init__(
        self,
        vocab_size: int,
        depth: int = 10,
        *,
        max_ngram: int = MAX_NGRAM,
        device: torch.device | str = "cpu",
    ) -> None:
        if depth < 1 or max_ngram < 1:
            raise InputError(
                "prompt lookup needs a depth and a max_ngram of at least 1, got "
                f"{depth} and {max_ngram}"
            )
        refuse_nodes(max(depth, max_ngram), "copied_tokens, max_ngram")
        self.vocab_size, self.drafted_size, self.depth = vocab_size, vocab_size, depth
        self.max_ngram, self.device = max_ngram, device

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
        return continuation(text, memory.lengths, self.depth, self.max_ngram)

    def peek(self, committed: Committed, memory: LookupText) -> Int[Tensor, "batch copied"]:
        """Return what `copy` returns, without storing the tokens: they will come again."""
        # the new tokens are written after the end of the stored text
        return self.copy(committed, replace(memory))

    def read(self, committed: Committed, memory: LookupText) -> None:
        """Store the committed tokens."""
        memory.append(committed)


def continuation(
    text: Int[Tensor, "batch slot"], lengths: Int[Tensor, " batch"], copied: int, max_ngram: int
) -> Int[Tensor, "batch copied"]:
    """Return what followed an earlier occurrence of the text's longest suffix, padded with -1.

    All places of all rows are compared at once. Between places that match equally many tokens,
    prefer one with a full continuation, then the most recent one. Row b of the text has
    `lengths[b] + 1` tokens. If its last token occurs nowhere else, all values are -1.
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
    found = matched.gather(1, best) > 0
    places = best + 1 + torch.arange(copied, device=text.device)
    following = text.gather(1, places.clamp(max=num_slots - 1))
    return torch.where(found & (places <= last), following, -1)


class LookupIndex:
    """The n-grams of one growing text, on the host.

    It finds the same as `continuation`, in constant time.
    """

    def __init__(self, tokens: Sequence[int], *, max_ngram: int = MAX_NGRAM) -> None:
        self._text: list[int] = []
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
        for length in range(min(len(self._ends), len(self._text)), 0, -1):
            if ends := self._ends[length - 1].get(tuple(self._text[-length:])):
                whole = bisect_right(ends, len(self._text) - 1 - copied)
                begin = ends[max(whole - 1, 0)] + 1
                return length, self._text[begin : begin + copied]
        return 0, []


def common_prefix_length(copied: Iterable[int], decoded: Iterable[int]) -> int:
    """Return how many leading tokens are equal."""
    return sum(takewhile(bool, map(eq, copied, decoded)))
