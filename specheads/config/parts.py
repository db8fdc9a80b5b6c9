"""Settings that several commands share, each with its unit and what its zero means."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from specheads.config.ranges import (
    DepthOrZero,
    GlobPattern,
    NonNegativeFloat,
    NonNegativeInt,
    NumNodes,
    PathOrId,
    PositiveInt,
    PositiveProbability,
    PrintableText,
    Probability,
    ProbabilityBelowOne,
    Temperature,
    TokenRank,
    Weight,
    one_of,
)

SOURCES = (
    *("python_stdlib", "stdlib_instructions", "files", "text", "jsonl", "parquet", "hub", "chat"),
)
NO_PATH = ("python_stdlib", "stdlib_instructions")
TREES = ("tuned", "chain", "static", "best_first", "beam", "product", "sampled")


@dataclass(kw_only=True, slots=True)
class Base:
    """Which model is frozen."""

    model: PathOrId
    """Folder or Hub id (safetensors only, and no code of its own is run), FILE.gguf, or
    package:NAME for the GGUF file inside a Python package."""

    revision: PrintableText = "main"
    """Hub revision; ignored for a folder."""

    dtype: Annotated[str, one_of("auto", "float32", "float64", "bfloat16", "float16")] = "auto"
    """Precision of its weights; auto is bfloat16 where the device computes it, and else float32."""

    device: PrintableText = "auto"
    """Torch device; auto is CUDA where there is one."""

    attention: Annotated[str, one_of("sdpa", "eager")] = "sdpa"
    """sdpa or eager: what takes an arbitrary mask."""

    quantization: Annotated[str, one_of("none", "8bit", "4bit")] = "none"
    """none, 8bit or 4bit: bitsandbytes or torchao quantise its weights while loading; CUDA only."""

    adapter: PathOrId = ""
    """Folder or Hub id of a LoRA adapter that is merged into it. Empty is none."""

    compile: bool = False
    """Verify trees with compiled graphs: faster steps, after minutes of compiling at first."""

    exact: bool = False
    """Give every node of a tree bit for bit what a step of its own would give it, so that text is
    the base's own in bfloat16 too: slower steps, on a CPU only."""


@dataclass(kw_only=True, slots=True)
class Source:
    """Where documents come from."""

    source: Annotated[str, one_of(*SOURCES)]
    """Kind of source; docs/data.md says what each reads."""

    path: PathOrId = ""
    """Folder, file, glob or Hub id; empty for what the interpreter brings."""

    config: PrintableText = ""
    """Configuration of a Hub data set; empty for its default."""

    column: PrintableText = "text"
    """Column that holds the text; conversations have columns of their own."""

    revision: PrintableText = "main"
    """Revision of a Hub data set."""

    patterns: list[GlobPattern] = field(default_factory=list)
    """Globs that choose among a folder's or a Hub data set's files. Empty takes all."""

    max_documents: NonNegativeInt = 0
    """Documents taken, before they are split. Zero takes all."""

    streaming: bool = False
    """Take the first max_documents as they come, and read no further; else they are drawn from
    all."""


@dataclass(kw_only=True, slots=True)
class WeightedSource(Source):
    """One source of a mixture."""

    weight: Weight = 1.0
    """Share of the mixture's tokens, relative to the others'. Zero leaves the source out."""


@dataclass(kw_only=True, slots=True)
class Data(Source):
    """Which text is the corpus."""

    source: Annotated[str, one_of(*SOURCES, "mixture")]
    """Kind of source, or mixture; docs/data.md says what each reads."""

    sources: dict[str, WeightedSource] = field(default_factory=dict)
    """Sources of a mixture, by names of your own."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """What is measured after training, and by `specheads evaluate`."""

    prompts: PathOrId = "python_stdlib"
    """A name, or a .jsonl file."""

    num_prompts: PositiveInt = 40
    """Prompts used."""

    prompt_tokens: PositiveInt = 64
    """Tokens of each prompt cut from code; other prompts keep their own length."""

    all_turns: bool = False
    """Whether every turn of a row with `turns` is a prompt, behind the earlier ones and without
    answers in between, and not the first alone."""

    max_new_tokens: PositiveInt = 128
    """Tokens decoded for each."""

    temperature: Temperature = 0.0
    """Zero is greedy; above it tokens are sampled, each prompt's with a seed of its own."""

    top_k: NonNegativeInt = 0
    """Tokens sampled from, the likeliest ones. Zero samples from all."""

    top_p: PositiveProbability = 1.0
    """Probability that the tokens sampled from reach together, likeliest first. One is all."""

    min_p: Probability = 0.0
    """Probability that a token needs, as a share of the likeliest one's. Zero is none."""

    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    """Penalty on tokens already in the text. One is none."""

    acceptance: Annotated[str, one_of("match", "rejection", "typical")] = "match"
    """What is kept of a tree: match (the base's own tokens, at every temperature), rejection (its
    distribution; for sampled trees), or typical (neither, above temperature zero)."""

    coupled: bool = True
    """Whether drafts see the noise that the base draws with above temperature zero: more guesses
    are right then, and the text is the same."""

    batch_size: PositiveInt = 1
    """Prompts decoded at once."""

    mode: Annotated[str, one_of("offline", "online", "all")] = "all"
    """offline (replay only), online (decoding only), or all (with speed)."""

    repeats: PositiveInt = 2
    """How often speed is measured on each prompt, alternating with the base alone."""

    speed_prompts: PositiveInt = 16
    """Prompts that speed is measured on."""

    tune_prompts: PositiveInt = 24
    """Validation prompts on which a tuned tree is picked."""

    quality_windows: PositiveInt = 64
    """Windows of validation text on which the base's own quality is measured without and with the
    adapter that joint training gave it."""


@dataclass(kw_only=True, slots=True)
class Tree:
    """How drafts grow."""

    kind: Annotated[str, one_of(*TREES)] = "tuned"
    """tuned (by `specheads tune`, or picked by a short measurement), chain, static, best_first,
    beam, product or sampled."""

    depth: DepthOrZero = 0
    """Levels. Zero takes the head's own."""

    num_nodes: NumNodes = 8
    """Nodes of a best-first or product tree, root included."""

    beam: NumNodes = 4
    """Nodes that a best-first tree or a beam continues per level."""

    branch: NumNodes = 4
    """Children of each in a best-first tree."""

    branches: list[NumNodes] = field(default_factory=list)
    """Children of every node of a product or sampled tree, level by level. Empty is one each."""

    confidence: ProbabilityBelowOne = 0.0
    """Where the head gives a token less than this probability, a chain, static or sampled tree goes
    no further below it; the token itself is verified. Zero never stops."""

    paths: list[list[TokenRank]] = field(default_factory=list)
    """Rank paths of a static tree."""


@dataclass(kw_only=True, slots=True)
class Hardware:
    """Where times of a simulation come from: measured, or computed for a machine that is named."""

    name: PrintableText = "measured"
    """Name of the machine. `measured` takes the times that `specheads tune` measured."""

    bandwidth: NonNegativeFloat = 0.0
    """Bytes a second between memory and processor. Zero with measured times only."""

    flops: NonNegativeFloat = 0.0
    """Floating-point operations a second, dense, in the weights' precision. Zero as above."""

    parameters: NonNegativeFloat = 0.0
    """Parameters of the base. Zero takes those of the run's base."""

    draft_parameters: NonNegativeFloat = 0.0
    """Parameters that drafting one level takes. Zero takes those of the run's head."""

    weight_bytes: PositiveInt = 2
    """Bytes of a parameter, and of a number in the key-value cache."""

    position_bytes: NonNegativeInt = 0
    """Bytes of keys and values of one position of the base, in all layers. Zero takes those of the
    run's base."""

    draft_position_bytes: NonNegativeInt = 0
    """The same of what drafts. Zero attends to nothing; a base that drafts for itself has its
    own."""

    window: NonNegativeInt = 0
    """Positions of a row that what drafts attends to, at most (MagicDec). Zero is all."""


@dataclass(kw_only=True, slots=True)
class Tracker:
    """Where numbers go besides metrics.jsonl."""

    kind: Annotated[str, one_of("jsonl", "wandb", "trackio", "tensorboard")] = "jsonl"
    """jsonl (nothing else), wandb, trackio or tensorboard. One that fails is told and left, and
    training goes on."""

    project: PrintableText = "specheads"
    """Project of wandb (offline where no key is set) or trackio. tensorboard writes into the run
    directory."""
