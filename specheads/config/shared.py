"""Settings that several commands share, and facts about settings next to types and ranges."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

from specheads.core.ranges import (
    DepthOrZero,
    NonNegativeFloat,
    NonNegativeInt,
    NumNodes,
    PathOrId,
    PositiveInt,
    PositiveProbability,
    PrintableText,
    ProbabilityBelowOne,
    Seed,
    Temperature,
    TokenRank,
    group_of,
    one_of,
    setting_hints,
)

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class Resumable:
    """The setting may change when a run resumes: training computes the same head.

    With `among` it may only change from one of these values to another.
    """

    among: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FixesDivergence:
    """The setting may also change when a run resumes that diverged: it can be the cause."""


@dataclass(frozen=True, slots=True)
class SameText:
    """The setting does not change a text that the base generates."""


@dataclass(frozen=True, slots=True)
class Remeasured:
    """A measurement of a run may use another value than its training."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The order of the names in the group counts."""


def settings_with(fact: type[Fact], group: type, prefix: str = "") -> Iterator[tuple[str, Fact]]:
    """Yield the full name and the fact of every setting of a group that has such a fact."""
    for name, hint, _ in all_settings(group, prefix):
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, fact):
                yield name, annotation


def all_settings(group: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the full name, the type and the default of every setting; MISSING is no default.

    Names of phases and sources are `*` in the full name, as in `schedule.phases.*.steps`.
    """
    hints = setting_hints(group)
    for item in fields(group):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        yield name, hint, item.default
        if inner := group_of(hint):
            yield from all_settings(inner, f"{name}.{'*.' if 'dict[' in str(hint) else ''}")


# --- settings ------------------------------------------------------------------------------------

TREES = ("tuned", "chain", "static", "best_first", "beam", "product", "sampled")


@dataclass(kw_only=True)
class BaseSettings:
    """The frozen base."""

    model: PathOrId
    """Folder, Hub id, FILE.gguf, or package:NAME for the GGUF file of a Python package. Weights
    must be safetensors or GGUF; code of a checkpoint never runs."""
    revision: PrintableText = "main"
    """Hub revision; ignored for a folder."""
    dtype: Annotated[
        str,
        one_of("auto", "float32", "float64", "bfloat16", "float16"),
        Remeasured(),
        FixesDivergence(),
    ] = "auto"
    """Precision of the weights. auto is bfloat16 if the device computes in it, else float32."""
    device: Annotated[PrintableText, Remeasured(), Resumable()] = "auto"
    """Torch device. auto is CUDA if there is a GPU, else the CPU."""
    adapter: PathOrId = ""
    """Folder or Hub id of a LoRA adapter to merge into the base. Empty merges none."""
    compile: Annotated[bool | None, Remeasured(), Resumable()] = None
    """Record drafts and verifications as CUDA graphs; null is yes on CUDA. true also compiles their
    kernels, on a CPU too: faster steps, but the first ones compile for minutes."""
    exact: Annotated[bool, Remeasured(), Resumable()] = False
    """Compute every tree node bit for bit as a step of its own, so that text in bfloat16 equals
    the base's too. A tenth slower, and CPU only."""


@dataclass(kw_only=True)
class TreeSettings:
    """The draft tree."""

    kind: Annotated[str, one_of(*TREES)] = "tuned"
    """tuned (chosen by `specheads tune`, or by a short measurement), chain, static, best_first,
    beam, product or sampled."""
    depth: DepthOrZero = 0
    """Levels of the tree. Zero is the head's depth."""
    num_nodes: NumNodes = 8
    """Nodes of a best-first or product tree, root included."""
    beam: NumNodes = 4
    """Nodes that a best-first tree or a beam expands at each level, and the children of each in a
    best-first tree."""
    branches: list[NumNodes] = field(default_factory=list)
    """Children of every node of a product or sampled tree, level by level. Empty is one each."""
    confidence: ProbabilityBelowOne = 0.0
    """A chain or a static tree does not grow below a token with a lower probability; the
    token itself is verified. Zero always grows."""
    paths: list[list[TokenRank]] = field(default_factory=list)
    """Nodes of a static tree, each as the path of token ranks from the root."""


@dataclass(kw_only=True)
class SamplingSettings:
    """Settings of sampling."""

    temperature: Temperature = 0.0
    """Sampling temperature. Zero is greedy decoding."""
    top_k: NonNegativeInt = 0
    """Sample from the k most probable tokens. Zero samples from all."""
    top_p: PositiveProbability = 1.0
    """Sample from the most probable tokens that together reach this probability. One samples from
    all."""


@dataclass(kw_only=True)
class EvaluationSettings(SamplingSettings):
    """Measurements after training and by `specheads evaluate`."""

    prompt_tokens: PositiveInt = 64
    """Tokens of a prompt that is cut from plain text. Questions keep their own length."""
    prompts: PathOrId = "python_stdlib"
    """Name of a prompt set, or a .jsonl or .parquet file; docs/data.md lists the sets."""
    num_prompts: PositiveInt = 40
    """Prompts to decode."""
    all_turns: bool = False
    """A row with `turns` gives one prompt, its first turn. With true every turn becomes a prompt
    that follows the earlier turns, without answers in between."""
    thinking: list[bool] = field(default_factory=list)
    """Ask every question once for each value, which the chat template reads as enable_thinking.
    Empty is the template's default."""
    max_new_tokens: PositiveInt = 128
    """Largest number of new tokens for each prompt."""
    acceptance: Annotated[str, one_of("match", "rejection", "typical")] = "match"
    """Acceptance rule: match (the base's own tokens, at every temperature), rejection (the base's
    distribution; for sampled trees) or typical (lossy, above temperature zero)."""
    coupled: bool = True
    """Draft with the noise that the base samples with, above temperature zero: more drafts are
    accepted and the text is the same."""
    batch_size: PositiveInt = 1
    """Prompts decoded at once."""
    mode: Annotated[str, one_of("offline", "online", "all")] = "all"
    """offline (replay only), online (decoding only), or all (with speed)."""
    repeats: PositiveInt = 2
    """Timed runs of each prompt, in turns with the base alone."""
    speed_prompts: PositiveInt = 16
    """Prompts to time."""
    ledger: bool = False
    """Also measure the seconds of draft, verify, accept and host per step, on the prompts to
    time."""
    too_long: Annotated[str, one_of("stop", "skip")] = "stop"
    """What to do with prompts that do not fit into the context: stop and name them, or skip and
    count them."""
    contexts: list[PositiveInt] = field(default_factory=list)
    """Prompt lengths in tokens at which acceptance and speed are measured too: text is put in front
    of every question. Empty is none."""
    context_text: PathOrId = "python_stdlib"
    """Text in front of the questions: python_stdlib, or a file or folder of text."""


@dataclass(kw_only=True)
class HardwareSettings:
    """Source of a simulation's times: measured, or computed for a named machine."""

    name: PrintableText = "measured"
    """Name of the machine. `measured` uses the times that `specheads tune` measured."""
    bandwidth: NonNegativeFloat = 0.0
    """Memory bandwidth in bytes per second. Zero with measured times only."""
    flops: NonNegativeFloat = 0.0
    """Dense floating-point operations per second in the precision of the weights. Zero with
    measured times only."""


@dataclass(kw_only=True)
class TrackerSettings:
    """Experiment tracker, in addition to metrics.jsonl."""

    kind: Annotated[str, one_of("jsonl", "wandb", "trackio", "tensorboard")] = "jsonl"
    """jsonl (no tracker), wandb, trackio or tensorboard. If the tracker fails, training logs it
    and continues."""
    project: PrintableText = "specheads"
    """Project of wandb (offline if no key is set) or trackio. tensorboard writes into the run
    directory."""


@dataclass(kw_only=True)
class HasRun:
    """A run."""

    run: PathOrId = ""
    """Directory of a finished run."""


@dataclass(kw_only=True)
class HasOut:
    """An output folder."""

    out: PathOrId = ""
    """Output folder. Commands that measure a run write into its report/ if this is empty."""


@dataclass(kw_only=True)
class HasSeed:
    """A seed."""

    seed: Seed = 0
    """Seed of all random choices. A run keeps its own unless this is given."""


@dataclass(kw_only=True)
class HeadOnBase(HasRun):
    """The head of a run, or any head and its base."""

    base: BaseSettings
    head_path: PathOrId = ""
    """Folder or Hub id of a head, in place of a run; `head=` on the command line."""
    force: bool = False
    """Accept a head that was trained on other weights than the base's, such as a fine-tuned
    sibling's."""
