"""Contents of results.json, texts.json and compare.json: see docs/evaluate.md.

A field with a default was added later, or may not be measured.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from specheads.core.files import from_json, read_json
from specheads.decoding.calibration import Reliability
from specheads.decoding.trees.tuned import Tuned
from specheads.runs.provenance import Provenance

T = TypeVar("T")
Interval = tuple[float, float]
"""Ends of a 95 % bootstrap interval over prompts."""
OWN_FILE = Field(exclude=True)
"""Marks a field that is stored in a file of its own."""
IDENTICAL, TIED, WRONG = "identical", "parted at a tie", "wrong"
"""Verdicts of `Lossless`. Text that only shares the base's distribution has no verdict."""


def read_results(kind: type[T], file: str | Path) -> T | None:
    """Return the contents of a JSON file as this class; None if the file does not exist."""
    file = Path(file)
    return from_json(kind, read_json(file), str(file)) if file.is_file() else None


# --- rates and counts --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Tokens per forward, including the base's own token."""

    tokens_per_forward: float
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Ratio of one method to another, paired by prompt."""

    ratio: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of the drafts at one depth."""

    offered: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthRate:
    """Conditional acceptance at one depth: accepted / offered."""

    rate: float
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryRate(Rate):
    """Rate of a group of prompts, and vLLM's names for it: see docs/evaluate.md."""

    count: int = 0
    """Number of prompts."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    per_position_acceptance_rates: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRate(Rate):
    """Rate of a chain with the head as it was at the end of a phase."""

    phase: str


# --- what was measured -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSummary:
    """The head that was measured."""

    kind: str
    depth: int
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSummary:
    """The base of the head."""

    name: str
    revision: str
    fingerprint: str
    parameters: int
    adapter: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSummary:
    """The prompts."""

    name: str
    version: str
    count: int
    categories: dict[str, int] = field(default_factory=dict)
    sources: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """Settings of the decoding."""

    temperature: float
    max_new_tokens: int
    tree: str
    num_nodes: int
    batch_size: int
    dtype: str
    device: str
    seed: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    acceptance: str = "match"
    lossless: bool = True
    coupled: bool = False
    paths: list[list[int]] = field(default_factory=list)
    copied_tokens: int = 0


# --- sections of results.json ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Offline(Rate):
    """Replay over text that the base wrote."""

    per_depth: list[DraftCounts]
    top_k_accuracy: list[list[float]]
    forwards: int
    replayed: str
    conditional_acceptance: list[DepthRate] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Online(CategoryRate):
    """Decoding in the real loop."""

    tokens_per_forward_without_bonus: float
    per_depth: list[DraftCounts]
    by_category: dict[str, CategoryRate]
    by_input_length: dict[str, CategoryRate] = field(default_factory=dict)
    by_thinking: dict[str, CategoryRate] = field(default_factory=dict)
    subsets: Annotated[list[tuple[dict[str, str], CategoryRate]], OWN_FILE] = field(
        default_factory=list, compare=False
    )
    """Rows of acceptance.csv: the prompts of one category, input length and thinking."""
    forwards: int
    new_tokens: int
    conditional_acceptance: list[DepthRate] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Timed decoding, compared with the base alone."""

    base_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    interval: Interval
    step_overhead: float | None
    peak_gib: float | None = None
    head_alone: Gain | None = None
    """Speed-up of the head's own tree without prompt lookup, where lookup took part."""
    prompt_seconds: float | None = None
    """Mean time in which the base alone reads a prompt, if all other times leave it out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSummary:
    """Mean seconds of the parts of a step of the whole batch: see `decoding.loop.StepLedger`."""

    draft: float
    verify: float
    accept: float
    host: float
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRate(Rate):
    """Acceptance and speed at one context length."""

    context: int
    """Tokens of each prompt."""
    over_first: Gain
    """Ratio of the tokens per forward to those at the first context length, paired by prompt."""
    speed: Speed | None = None
    """Timed decoding, without the time that reads the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lossless:
    """Speculative text compared with that of the base alone: see `measure.online.compare_texts`."""

    compared: int
    identical: int
    first_divergence_logit_gap: float | None
    first_divergence_ulps: float | None = None
    rounding_ulps: float | None = None
    tied: int = 0
    wrong: int = 0
    verdict: str = ""
    dtype: str = ""
    exact: int | None = None
    """How many of the texts that differ are identical if both are decoded with exact sums; None if
    they were not decoded again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degenerate:
    """Prompts after which the base alone loops, and the rate without them."""

    flagged: int
    compared: int
    without: Rate | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """Number of tokens that the head can draft, and their share of its training text."""

    size: int
    coverage: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextQuality:
    """How well a base predicts held-out text, or the change through an adapter."""

    cross_entropy: float
    cross_entropy_interval: Interval


# --- texts.json --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStep:
    """One forward of the base: the drafted tree and the accepted path."""

    tokens: list[str]
    """Text of each node, the root first."""
    parents: list[int]
    """Parent of each node; -1 for the root and for padding."""
    path: list[int]
    """Accepted nodes, the root first."""
    bonus: str
    """The base's own token."""
    num_copied: int = 0
    """How many of the last nodes are prompt-lookup tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedText:
    """The decoded text of one prompt."""

    category: str
    prompt: str
    first: str
    """The first new token, which the base gave while it read the prompt."""
    steps: list[TextStep]
    num_tokens: int
    """New tokens kept; the last step may have given more."""


# --- results.json ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """results.json."""

    schema: int = 1
    head: HeadSummary
    base: BaseSummary
    prompts: PromptSummary
    settings: EvaluationSettings
    draft_vocabulary: DraftVocabulary | None = None
    offline: Offline | None = None
    online: Online | None = None
    speed: Speed | None = None
    ledger: LedgerSummary | None = None
    lossless: Lossless | None = None
    degenerate: Degenerate | None = None
    phases: list[PhaseRate] = field(default_factory=list)
    contexts: list[ContextRate] = field(default_factory=list)
    calibration: list[Reliability] = field(default_factory=list)
    """How often the best guess of each depth was accepted, given those above it, next to its
    calibrated probability. Empty without a calibration, and above temperature zero."""
    base_quality: dict[str, TextQuality] | None = None
    """The base's own quality `before` and `after` joint training, and the `change`."""
    texts: Annotated[list[DecodedText], OWN_FILE] = field(default_factory=list)
    tuned: Annotated[Tuned | None, OWN_FILE] = None
    provenance: Provenance


# --- compare.json ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodResults:
    """One method of a comparison."""

    online: Online
    lossless: Lossless
    degenerate: Degenerate
    tree: str
    num_nodes: int
    speed: Speed
    batches: bool = True
    """Whether it decodes prompts together; otherwise one by one, whatever the batch size."""
    over: dict[str, Gain] = field(default_factory=dict)
    """Ratio of its tokens per second to those of each other method, paired by prompt."""
    accepted_over: dict[str, Gain] = field(default_factory=dict)
    """Ratio of its tokens per forward to those of each other method, paired by prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """All methods at one temperature and batch size."""

    temperature: float
    batch_size: int
    ranking: list[str]
    """Methods by tokens per second, the fastest first."""
    drafters: dict[str, MethodResults]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """compare.json."""

    schema: int = 2
    head: HeadSummary
    heads: dict[str, HeadSummary]
    base: BaseSummary
    prompts: PromptSummary
    settings: dict[str, Any]
    conditions: list[Condition]
    provenance: Provenance

    @property
    def drafters(self) -> dict[str, MethodResults]:
        """Methods of the first condition."""
        return self.conditions[0].drafters
