"""What follows from the paths of a tree that is the same in every step: worked out once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.core.tree import TokenTree

Path = tuple[int, ...]


class Level(NamedTuple):
    """One level of a static tree; only nodes with children are read by the drafter."""

    parents: Int[Tensor, " node"]
    """Each node's parent, counted among the nodes of the level above that were read."""
    ranks: Int[Tensor, " node"]
    """Which of its parent's guesses each node is."""
    inner: Int[Tensor, " node"]
    """The nodes that are read."""
    inner_parents: Int[Tensor, " node"]
    """Parents of the nodes that are read."""
    width: int
    """Guesses that are asked for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A static tree without its tokens, all of it on one device: a step uploads none of it."""

    parents: Int[Tensor, " node"]
    reach: Bool[Tensor, "1 node node"]
    """Who has whom above: `TokenTree.ancestors`."""
    levels: list[Level]

    @classmethod
    def of(cls, paths: Sequence[Path], device: torch.device) -> "Shape":
        """Return the shape of rank paths that are sorted by length and closed under prefixes."""
        known = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
        parents = torch.tensor([-1] + [known[path[:-1]] for path in paths]).to(device)
        depth = max(map(len, paths), default=0)
        return cls(
            parents,
            TokenTree(parents[None], parents[None]).ancestors(),
            [_level(paths, length, device) for length in range(1, depth + 1)],
        )


def _level(paths: Sequence[Path], length: int, device: torch.device) -> Level:
    has_children = {path[:-1] for path in paths}
    above = [path for path in paths if len(path) == length - 1 and path in has_children]
    here = [path for path in paths if len(path) == length]
    read = {path: place for place, path in enumerate(above or [()])}
    inner = [place for place, path in enumerate(here) if path in has_children]
    parents = torch.tensor([read[path[:-1]] for path in here]).to(device)
    index = torch.tensor(inner, dtype=torch.long).to(device)
    ranks = torch.tensor([path[-1] for path in here]).to(device)
    return Level(parents, ranks, index, parents[index], 1 + max(path[-1] for path in here))
