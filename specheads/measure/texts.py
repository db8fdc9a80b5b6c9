"""Decoded texts, step by step: the contents of texts.json, see docs/evaluate.md."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStep:
    """One forward of the base: the tree that was drafted, and what was kept of it."""

    tokens: list[str]
    """Text of each node, the root first."""
    parents: list[int]
    """Parent of each node, -1 for the root and for nodes that are padding."""
    path: list[int]
    """Accepted nodes, the root first."""
    bonus: str
    """What the base added itself."""
    num_copied: int = 0
    """How many of the last nodes were copied, not drafted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedText:
    """What was decoded for one prompt."""

    category: str
    prompt: str
    first: str
    """The first new token, which the base gave reading the prompt."""
    steps: list[TextStep]
    num_tokens: int
    """New tokens kept: the last step may have given more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """texts.json."""

    schema: int = 1
    texts: list[DecodedText] = field(default_factory=list)
