"""Settings of the training text."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

from specheads.core.ranges import (
    GlobPattern,
    NonNegativeInt,
    PathOrId,
    PrintableText,
    Weight,
    one_of,
)

NO_PATH = ("python_stdlib", "stdlib_instructions")
CONVERSATIONS, TRACES = ("stdlib_instructions", "chat"), ("traces",)
TEXTS = ("python_stdlib", "files", "text", "jsonl", "parquet", "hub")
SOURCES = (*TEXTS, *CONVERSATIONS, *TRACES)


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
    sources: dict[str, MixtureSource] = field(default_factory=dict)
    """Sources of a mixture, by names of your choice."""

    @property
    def parts(self) -> list[SourceSettings]:
        """The sources in use: those of a mixture with a weight, or the one source itself."""
        if self.source != "mixture":
            return [self]
        return [one for one in self.sources.values() if one.weight]

    def divided(self) -> "Iterator[DataSettings | None]":
        """Yield the conversations, the traces and the text, None for a part that is missing."""
        for kinds in (CONVERSATIONS, TRACES, TEXTS):
            if self.source != "mixture":
                yield self if self.source in kinds else None
                continue
            some = {name: one for name, one in self.sources.items() if one.source in kinds}
            data = replace(self, sources=some)
            yield data if data.parts else None
