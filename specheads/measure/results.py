"""What measurements amount to, as results.json holds it: see docs/evaluate.md.

Fields with a default were added later, or were not measured; files of before lack them. A name
that Python reserves has an underscore behind it here and none in the file (`with_`).
"""

from dataclasses import dataclass, field

from specheads.decoding.trees.tuned import Tuned
from specheads.measure.rates import Drafting, Interval, Rate
from specheads.measure.store import OWN_FILE
from specheads.measure.texts import Texts
from specheads.runs.provenance import Provenance


@dataclass(frozen=True, slots=True)
class Depth:
    """Drafts of one depth."""

    offered: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSummary:
    """Which head was measured."""

    kind: str
    depth: int
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSummary:
    """Which base it drafted for."""

    name: str
    revision: str
    fingerprint: str
    parameters: int
    adapter: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSummary:
    """What was continued."""

    name: str
    version: str
    count: int
    categories: dict[str, int] = field(default_factory=dict)
    sources: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How it was decoded."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthRate:
    """Share of the drafts of one depth that were accepted, of those that were reached."""

    rate: float
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryRate(Rate):
    """That of one category of prompts."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRate(Rate):
    """That of a chain of the head as it was at the end of a phase."""

    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Offline(Rate):
    """Replay over text that the base wrote."""

    per_depth: list[Depth]
    top_k_accuracy: list[list[float]]
    forwards: int
    replayed: str
    conditional_acceptance: list[DepthRate] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Online(Rate):
    """Decoding in the loop."""

    tokens_per_forward_without_bonus: float
    per_depth: list[Depth]
    by_category: dict[str, CategoryRate]
    forwards: int
    new_tokens: int
    conditional_acceptance: list[DepthRate] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Decoding by the clock, beside the base alone."""

    base_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    interval: Interval
    step_overhead: float | None
    step_milliseconds: float | None
    base_step_milliseconds: float | None
    new_tokens: int
    forwards: int
    draft_milliseconds: float | None = None
    repetitions: int | None = None
    peak_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lossless:
    """Speculative text held against that of the base alone: see `measure.exactness`."""

    compared: int
    identical: int
    first_divergence_logit_gap: float | None
    first_divergence_ulps: float | None = None
    rounding_ulps: float | None = None
    tied: int = 0
    wrong: int = 0
    verdict: str = ""
    dtype: str = ""
    float32: "Lossless | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Degenerate:
    """Figures with and without the prompts after which the base alone loops."""

    flagged: int
    compared: int
    with_: Rate
    without: Rate | None
    only: Rate | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What has to be equal, of replay and of decoding."""

    forwards: int
    per_depth: list[Depth]
    tokens_per_forward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The replay of a chain held against the same chain decoded for real."""

    offline: Counted
    online: Counted
    equal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """Tokens that the head can draft, and their share of its training text."""

    size: int
    coverage: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to draft that was timed: see `Tried` in decoding/trees/tuned.py."""

    tree: str
    num_nodes: int
    depth: int
    tokens_per_forward: float
    step_overhead: float
    speedup: float
    chosen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextQuality:
    """How well a base predicts held-out text."""

    cross_entropy: float
    cross_entropy_interval: Interval
    accuracy: float
    accuracy_interval: Interval
    windows: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityChange:
    """What an adapter added to the cross entropy, paired by window."""

    cross_entropy: float
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseQuality:
    """The base's own quality before and after joint training."""

    before: TextQuality
    after: TextQuality
    change: QualityChange


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """results.json."""

    schema: int = 1
    head: HeadSummary
    base: BaseSummary
    prompts: PromptSummary
    settings: Settings
    draft_vocabulary: DraftVocabulary | None = None
    offline: Offline | None = None
    online: Online | None = None
    speed: Speed | None = None
    lossless: Lossless | None = None
    degenerate: Degenerate | None = None
    replay: Replay | None = None
    drafting: dict[str, Drafting] = field(default_factory=dict)
    tree_candidates: list[Candidate] = field(default_factory=list)
    phases: list[PhaseRate] = field(default_factory=list)
    base_quality: BaseQuality | None = None
    texts: Texts | None = field(default=None, metadata=OWN_FILE)
    tuned: Tuned | None = field(default=None, metadata=OWN_FILE)
    provenance: Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """What decoding tells without a clock: three sections of results.json."""

    online: Online
    lossless: Lossless
    degenerate: Degenerate
