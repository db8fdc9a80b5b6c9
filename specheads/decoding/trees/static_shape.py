"""What follows from the paths of a tree that is the same in every step: worked out once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.core.tree import TreeShape

Path = tuple[int, ...]


class Level(NamedTuple):
    """One level of a static tree; only nodes with children are read by the drafter."""

    parents: Int[Tensor, " node"]
    """Each node's parent, counted among the nodes of the level above that were read."""
    guesses: Int[Tensor, " node"] | None
    """Place of each node among the guesses of all parents; None if every guess is a node."""
    inner: Int[Tensor, " node"] | None
    """The nodes that are read; None is all."""
    inner_parents: Int[Tensor, " node"]
    """Parents of the nodes that are read."""
    width: int
    """Guesses that are asked for."""

    def guessed(self, best: Int[Tensor, "batch level width"]) -> Int[Tensor, "batch node"]:
        """Return the guess of each node, from the best guesses of each parent."""
        flat = best.flatten(1)
        return flat if self.guesses is None else flat.index_select(1, self.guesses)

    def read(self, drafted: Int[Tensor, "batch node"]) -> Int[Tensor, "batch inner"]:
        """Return the tokens of the nodes that are read."""
        return drafted if self.inner is None else drafted.index_select(1, self.inner)


@dataclass(frozen=True, slots=True)
class StaticShape:
    """A static tree without its tokens, all of it on one device: a step uploads none of it."""

    shape: TreeShape
    parents: Int[Tensor, " node"]
    """As `TokenTree.parents`."""
    levels: list[Level]

    @classmethod
    def of(cls, paths: Sequence[Path], device: torch.device) -> "StaticShape":
        """Return the shape of rank paths that are sorted by length and closed under prefixes."""
        known = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
        parents = [-1] + [known[path[:-1]] for path in paths]
        depth = max(map(len, paths), default=0)
        return cls(
            TreeShape.of(parents, device),
            torch.tensor(parents).to(device),
            [_level(paths, length, device) for length in range(1, depth + 1)],
        )


def _level(paths: Sequence[Path], length: int, device: torch.device) -> Level:
    has_children = {path[:-1] for path in paths}
    above = [path for path in paths if len(path) == length - 1 and path in has_children]
    here = [path for path in paths if len(path) == length]
    read = {path: place for place, path in enumerate(above or [()])}
    inner = [place for place, path in enumerate(here) if path in has_children]
    parents = [read[path[:-1]] for path in here]
    width = 1 + max(path[-1] for path in here)
    guesses = [parent * width + path[-1] for parent, path in zip(parents, here, strict=True)]
    places = torch.tensor(parents).to(device)
    index = torch.tensor(inner, dtype=torch.long).to(device)
    return Level(
        places,
        None if guesses == list(range(len(read) * width)) else torch.tensor(guesses).to(device),
        None if len(inner) == len(here) else index,
        places[index],
        width,
    )
