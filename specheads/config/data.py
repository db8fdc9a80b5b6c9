"""Settings of the training text."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

from specheads.config.shared import Ordered
from specheads.core.ranges import (
    GlobPattern,
    NonNegativeInt,
    PathOrId,
    PrintableText,
    Weight,
    one_of,
)


class SourceKind(NamedTuple):
    """What one kind of source gives."""

    rows: Literal["text", "conversations", "traces"]
    """Plain text, chat messages, or recorded token ids."""
    needs_path: bool = True


SOURCES = {
    "python_stdlib": SourceKind("text", needs_path=False),
    "files": SourceKind("text"),
    "text": SourceKind("text"),
    "jsonl": SourceKind("text"),
    "parquet": SourceKind("text"),
    "hub": SourceKind("text"),
    "chat": SourceKind("conversations"),
    "traces": SourceKind("traces"),
}
PATHLESS_SOURCES = [name for name, kind in SOURCES.items() if not kind.needs_path]


@dataclass(kw_only=True)
class SourceSettings:
    """A source of documents."""

    source: Annotated[str, one_of(*SOURCES)]
    """Kind of source; docs/data.md describes each."""
    path: PathOrId = ""
    """Folder, file, glob or Hub id. Empty for the sources that come with Python."""
    config: PrintableText = ""
    """Configuration of a Hub data set. Empty is its default."""
    split: PrintableText = "train"
    """Split of a Hub data set."""
    column: PrintableText = "text"
    """Column that holds the text; not used for conversations."""
    ignore: list[PrintableText] = field(default_factory=list)
    """Columns of conversations, and keys of their messages, that are not read."""
    bad_rows: Annotated[str, one_of("stop", "drop")] = "stop"
    """What to do with rows that cannot be used: stop and list them, or drop and count them."""
    revision: PrintableText = "main"
    """Revision of a Hub data set."""
    patterns: list[GlobPattern] = field(default_factory=list)
    """Globs that select files of a folder or a Hub data set. Empty selects all."""
    max_documents: NonNegativeInt = 0
    """Documents to draw with the seed, before the split. Zero uses all."""

    @property
    def kind(self) -> SourceKind:
        """What the source gives."""
        return SOURCES[self.source]


@dataclass(kw_only=True)
class MixtureSource(SourceSettings):
    """One source of a mixture."""

    weight: Weight = 1.0
    """Share of the mixture's tokens, relative to the other sources; in a distilled phase, how often
    each of its conversations is asked. Zero leaves the source out."""


@dataclass(kw_only=True)
class DataSettings(SourceSettings):
    """The training text."""

    source: Annotated[str, one_of(*SOURCES, "mixture")]
    """Kind of source, or mixture; docs/data.md describes each."""
    sources: Annotated[dict[str, MixtureSource], Ordered()] = field(default_factory=dict)
    """Sources of a mixture, by names of your choice."""

    @property
    def active_sources(self) -> list[SourceSettings]:
        """The sources in use: those of a mixture with a weight, or the one source itself."""
        if self.source != "mixture":
            return [self]
        return [source for source in self.sources.values() if source.weight]

    def split_by_rows(self) -> "Iterator[DataSettings | None]":
        """Yield the conversations, the traces and the text, None for rows that are missing."""
        for rows in ("conversations", "traces", "text"):
            if self.source != "mixture":
                yield self if self.kind.rows == rows else None
                continue
            sources = {
                name: source for name, source in self.sources.items() if source.kind.rows == rows
            }
            data = replace(self, sources=sources)
            yield data if data.active_sources else None
