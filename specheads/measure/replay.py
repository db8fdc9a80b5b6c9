"""Replay: a stored text walked as the loop would, and the loop's own integers."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import islice

from jaxtyping import Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.decoding.matches import Matches, agreed
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_for, own_tree
from specheads.measure.counts import DepthCounts

Path = tuple[int, ...]
"""Ranks of guesses, from the root down."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What prompt lookup copies at each place that could be a root, held against the text."""

    right: list[int]
    """Leading tokens that are what the base went on to say."""
    length: list[int]
    """Tokens that are copied."""
    matched: list[int]
    """Tokens before the place that stood in the text before."""
    size: int
    """New nodes that a tree has for them."""


def copied(lookup: PromptLookup, prompt: list[int], continuation: list[int], size: int) -> Copied:
    """Return what a lookup copies at each place of a stored text: see `guess_ranks`."""
    text = Matches(prompt, max_ngram=lookup.max_ngram, min_ngram=lookup.min_ngram)
    found = Copied([], [], [], size)
    for place in range(len(continuation) - 1):
        text.extend(continuation[place : place + 1])
        matched, guessed = text.find(lookup.depth)
        found.right.append(agreed(guessed, islice(continuation, place + 1, None)))
        found.length.append(len(guessed))
        found.matched.append(matched)
    return found


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
        path = accepted_path(paths, rows[anchor][: min(room - 1, tree.depth)])
        kept, beyond = len(path), path in inner
        if copies is not None:
            # the copied path shares what the tree has of it, and goes on for `size` nodes
            reach = min(copies.length[anchor], kept + copies.size)
            right = min(copies.right[anchor], reach, room - 1)
            if right >= kept:
                beyond = reach > right or (right == kept and beyond)
                kept = right
        counts.add(kept, drafted_beyond=beyond)
        anchor += kept + 1
    return counts


def accepted_path(paths: Set[Path], ranks: Sequence[int]) -> Path:
    """Return the longest of the paths, all their beginnings among them, by which a text goes on."""
    path: Path = ()
    for rank in ranks:
        longer = (*path, rank)
        if longer not in paths:
            break
        path = longer
    return path


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
