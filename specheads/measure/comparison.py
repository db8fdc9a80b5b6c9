"""What a comparison amounts to, as compare.json holds it: see docs/evaluate.md."""

from dataclasses import dataclass, field

from specheads.measure.rates import Gain
from specheads.measure.results import (
    Acceptance,
    BaseSummary,
    HeadSummary,
    PromptSummary,
    Speed,
)
from specheads.runs.provenance import Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSettings:
    """How drafters were compared."""

    max_new_tokens: int
    draft_model: str
    draft_depth: int
    copied_tokens: int
    max_ngram: int
    sinks: int
    window: int
    dtype: str
    device: str
    seed: int
    coupled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRow(Acceptance):
    """One drafter of a comparison."""

    tree: str
    num_nodes: int
    speed: Speed
    batches: bool = True
    """Whether it decodes prompts together; else it took them one by one, whatever the batch."""
    over: dict[str, Gain] = field(default_factory=dict)
    """Its tokens per second over those of each other drafter, paired by prompt."""
    accepted_over: dict[str, Gain] = field(default_factory=dict)
    """Its tokens per forward over those of each other drafter, paired by prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """All drafters at one temperature and batch."""

    temperature: float
    batch_size: int
    ranking: list[str]
    """Drafters by tokens per second, the fastest first."""
    drafters: dict[str, DrafterRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """compare.json."""

    schema: int = 2
    head: HeadSummary
    heads: dict[str, HeadSummary]
    base: BaseSummary
    prompts: PromptSummary
    settings: CompareSettings
    conditions: list[Condition]
    provenance: Provenance

    @property
    def drafters(self) -> dict[str, DrafterRow]:
        """Those of the first condition."""
        return self.conditions[0].drafters
