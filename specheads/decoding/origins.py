"""How each token of a text came: drafted at which depth, copied at which, or the base's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specheads.decoding.loop import Step


@dataclass(frozen=True, slots=True)
class Origin:
    """How one token came."""

    kind: Literal["base", "drafted", "copied"]
    depth: int
    """Edges below the tree's root; zero for the base's own."""

    def __str__(self) -> str:
        """Return it in words."""
        return "the base's own" if self.kind == "base" else f"{self.kind} at depth {self.depth}"


BASE = Origin("base", 0)


def node_origins(parents: Sequence[int], num_copied: int) -> list[Origin]:
    """Return how each node of a tree came, as a `Step` has it; the root is the base's own."""
    first_copied = len(parents) - num_copied
    origins = [BASE]
    for node, parent in enumerate(parents[1:], start=1):
        kind = "copied" if node >= first_copied else "drafted"
        # a node without a parent is padding, and never part of a text
        origins.append(Origin(kind, origins[parent].depth + 1 if parent >= 0 else 0))
    return origins


def step_origins(step: Step) -> list[Origin]:
    """Return how each of `step.tokens` came: the last is the base's own."""
    origins = node_origins(step.parents, step.num_copied)
    return [*(origins[node] for node in step.path[1:]), BASE]
