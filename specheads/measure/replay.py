"""Replay: a stored text walked as the loop would, and the loop's own integers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.prompt_lookup import continuation as lookup_continuation
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_for, own_tree
from specheads.measure.counts import DepthCounts


@dataclass(frozen=True, slots=True)
class Copied:
    """What prompt lookup copies at each place that could be a root, held against the text."""

    right: list[int]
    """Leading tokens that are what the base went on to say."""
    length: list[int]
    """Tokens that are copied."""
    size: int
    """New nodes that a tree has for them."""


def copied(lookup: PromptLookup, prompt: list[int], continuation: list[int], size: int) -> Copied:
    """Return what a lookup copies at each place of a stored text: see `guess_ranks`."""
    text = torch.tensor([prompt + continuation], device=lookup.device)
    num_roots = max(len(continuation) - 1, 0)
    rows = []
    for root in range(len(prompt), len(prompt) + num_roots):
        known, last = text[:, : root + 1], torch.tensor([root], device=text.device)
        guessed = lookup_continuation(
            known, last, lookup.depth, lookup.max_ngram, lookup.min_ngram
        )[0].tolist()
        wanted = text[0, root + 1 :].tolist()
        pairs = zip(guessed, wanted, strict=False)
        agreed = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        most = min(len(guessed), len(wanted))
        rows.append((most if agreed is None else agreed, sum(one >= 0 for one in guessed)))
    return Copied([right for right, _ in rows], [length for _, length in rows], size)


def replay(
    ranks: Int[Tensor, "drafted depth"],
    tree: policies.Static,
    source: str = "",
    copies: Copied | None = None,
) -> DepthCounts:
    """Walk one stored continuation as the loop would and return the loop's own integers.

    The first token comes from reading the prompt and is no forward. Where `room` tokens are
    left to say after the root, a forward gives at most that many, the last of them always the
    base's own, so at most `room - 1` drafts count as accepted: `measure.online` counts alike.
    With `copies` the copied path is joined to the tree as `trees.hybrid` does it.

    Equal to the last integer where the arithmetic is: reading a text at once and token by
    token round differently, so a tie between the two best guesses may fall the other way.
    """
    paths, inner = {(), *tree.paths}, {path[:-1] for path in tree.paths}
    counts = DepthCounts.zeros(tree.depth + (copies.size if copies else 0), source)
    rows: list[list[int]] = ranks.tolist()
    anchor = 0
    while anchor < len(rows):
        room = len(rows) - anchor
        path: tuple[int, ...] = ()
        while len(path) < min(room - 1, tree.depth):
            longer = (*path, rows[anchor][len(path)])
            if longer not in paths:
                break
            path = longer
        kept, beyond = len(path), path in inner
        if copies is not None:
            # the copied path shares what the tree has of it, and goes on for `size` nodes
            reach = min(copies.length[anchor], kept + copies.size)
            followed = min(copies.right[anchor], reach, room - 1)
            if followed >= kept:
                beyond = reach > followed or (followed == kept and beyond)
                kept = followed
        counts.add(kept, drafted_beyond=beyond)
        anchor += kept + 1
    return counts


def fixed(tree: policies.TreePolicy) -> policies.Static | None:
    """Return what a tree drafts in every step, copied text aside; None where steps differ."""
    own = own_tree(tree)
    return own if isinstance(own, policies.Static) and not own.confidence else None


def replay_texts(
    base: FrozenBase,
    tree: policies.TreePolicy,
    ranks: Sequence[Int[Tensor, "drafted depth"]],
    texts: Sequence[tuple[list[int], list[int]]],
    sources: Sequence[str] = (),
) -> list[DepthCounts]:
    """Return the counts of each text, by a fixed tree with or without copied text.

    Texts are prompts and what the base wrote after them; ranks are theirs, by `guess_ranks`.
    """
    own, copies = fixed(tree), [None] * len(texts)
    assert own is not None
    if isinstance(tree, HybridTree):
        lookup = lookup_for(tree, base)
        copies = [copied(lookup, *text, tree.size) for text in texts]
    rows = zip(ranks, sources or [""] * len(texts), copies, strict=True)
    return [replay(one, own, source, copy) for one, source, copy in rows]
