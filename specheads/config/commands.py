"""Settings of each command. Hydra composes them, and nothing else does."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from specheads.config.data import DataSettings
from specheads.config.shared import (
    BaseSettings,
    EvaluationSettings,
    HardwareSettings,
    HasOut,
    HasRun,
    HasSeed,
    HeadOnBase,
    Resumable,
    SamplingSettings,
    TrackerSettings,
    TreeSettings,
)
from specheads.config.training import FeatureSettings, Schedule, ValidationSettings
from specheads.core.ranges import (
    AtLeastTwo,
    DepthOrZero,
    FolderName,
    NonEmpty,
    NonNegativeInt,
    PathOrId,
    PositiveFloat,
    PositiveInt,
    PrintableText,
    Probability,
    Temperature,
    TreeSize,
    one_of,
)

DRAFTERS = (
    *("head", "prompt_lookup", "hybrid", "suffix", "suffix_hybrid", "streaming", "draft_model"),
    *("transformers", "transformers_lookup", "transformers_assisted"),
)
HYBRIDS = ("hybrid", "suffix_hybrid")
"""Drafters that add copied text to the tree of each head."""
WITH_DRAFT_MODEL = ("draft_model", "transformers_assisted")
"""Drafters that need a draft model."""


@dataclass(kw_only=True)
class Train(HasSeed):
    """`specheads train`."""

    base: BaseSettings
    data: DataSettings
    tree: Annotated[TreeSettings, Resumable()]
    evaluation: Annotated[EvaluationSettings, Resumable()]
    name: Annotated[FolderName, Resumable()]
    """Name of the run."""
    run_dir: Annotated[PathOrId, Resumable()] = "runs/${name}"
    """Output directory of the run."""
    head: dict[str, Any]
    """`kind` of the head and the settings of that kind."""
    init: PathOrId = ""
    """Folder or Hub id of a head of the same kind to start from, ours or public. Its settings
    replace those of `head`. Empty starts from random weights."""
    schedule: Schedule
    tracker: Annotated[TrackerSettings, Resumable()]
    validation: Annotated[ValidationSettings, Resumable()] = field(
        default_factory=ValidationSettings
    )
    features: FeatureSettings = field(default_factory=FeatureSettings)
    log_every: Annotated[PositiveInt, Resumable()] = 10
    """Steps between two lines of metrics.jsonl."""
    checkpoint_every: Annotated[NonNegativeInt, Resumable()] = 0
    """Steps between two checkpoints. Zero writes one at the end of each phase only."""
    evaluate_after: Annotated[bool, Resumable()] = True
    """Evaluate the head after training."""
    dry_run: Annotated[bool, Resumable()] = False
    """Print the settings and the plan, and stop."""
    preview: NonNegativeInt = 0
    """Print this many examples of the training text with its loss mask, or of the prompts if the
    base generates the text, and stop. Zero trains."""


@dataclass(kw_only=True)
class Distill(HasOut, Train):
    """`specheads distill`.

    Takes a recipe as `train` does. Only the base, the data and the settings of the first distilled
    phase matter. `out` is the folder of the text.
    """

    head_path: PathOrId = ""
    """Folder or Hub id of a head that drafts, which does not change the text; `head=` on the
    command line."""


@dataclass(kw_only=True)
class ServeFeatures(Train):
    """`specheads serve-features`.

    Takes the overrides of `train`. Only the base, the head, the lengths of the texts and
    `features` matter.
    """

    url: PrintableText = ""
    """Address of the server. Empty is each of features.url, or http://127.0.0.1:8000/v1."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share the weights of the base."""
    python: PathOrId = ""
    """Python interpreter of an environment with vLLM. Empty is this one's."""
    options: PrintableText = ""
    """Further options of vLLM, such as `--gpu-memory-utilization 0.8`."""
    start: bool = False
    """Start the server in place of this process; `run=` on the command line. False prints the
    command."""


@dataclass(kw_only=True)
class Chat(HasSeed, SamplingSettings, HeadOnBase):
    """`specheads chat`. tree=tuned uses the tree that was tuned for the head, or a chain."""

    tree: TreeSettings
    system: PrintableText = ""
    """System prompt. Empty is none."""
    max_new_tokens: PositiveInt = 512
    """Largest number of tokens of an answer."""
    side_by_side: bool = False
    """Show the answer of the base alone next to it."""


@dataclass(kw_only=True)
class Export(HasOut, HeadOnBase):
    """`specheads export`. The name of the base is what the engine will load: prefer a Hub id."""

    engine: PrintableText = ""
    """Engine that will serve the head: base, llama_cpp, sglang, speculators, tensorrt_llm, tgi,
    transformers or vllm. docs/export_matrix.md shows which engine serves which head."""
    rope_scaling: Annotated[str, one_of("head", "base")] = "head"
    """Whose scaling of positions (yarn, llama3, linear) is written: that which the head was trained
    with, or the base's, for a head that was trained on shorter texts without scaling."""


@dataclass(kw_only=True)
class Push(HasRun):
    """`specheads push`. huggingface_hub reads the access token: there is no setting for it."""

    dry_run: bool = False
    """Print the files, and stop."""
    repo: PrintableText = ""
    """USER/NAME on the Hub; created if it does not exist."""
    private: bool | None = None
    """Make the repository private. None keeps an existing one and makes a new one public."""
    base_repo: PrintableText = ""
    """Hub id of the base. Empty is the base of the run, if it is a Hub id."""
    overwrite: bool = False
    """Replace files of the repository that somebody else wrote, or edited after an earlier push."""
    licence: PrintableText = "unknown"
    """Licence of the head as the Hub writes it, such as apache-2.0."""
    data_licence: PrintableText = ""
    """Licence of the training text. Empty is the known licence of the corpus."""


@dataclass(kw_only=True)
class Evaluate(HasSeed, HasOut, HeadOnBase):
    """`specheads evaluate`. A head without a run takes held-out prompts from `data`."""

    data: DataSettings
    tree: TreeSettings
    evaluation: EvaluationSettings


@dataclass(kw_only=True)
class Compare(HasSeed, HasOut, HasRun):
    """`specheads compare`. The tree is that of the head, alone and in the hybrid."""

    base: BaseSettings
    data: DataSettings
    tree: TreeSettings
    evaluation: EvaluationSettings
    heads: list[PathOrId] = field(default_factory=list)
    """More heads of the same base, of any kind and width: finished runs, or folders or Hub ids of
    heads. The first run among them gives the settings of the measurement."""
    drafters: list[Annotated[str, one_of(*DRAFTERS)]] = field(default_factory=list)
    """Methods to compare; docs/compare.md describes each. Empty is all, without those that need
    draft_model if it is empty."""
    temperatures: list[Temperature] = field(default_factory=list)
    """Temperatures to measure. Empty is evaluation.temperature."""
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Batch sizes to measure. Empty is evaluation.batch_size."""
    draft_model: PathOrId = ""
    """Folder or Hub id of a smaller model with the base's vocabulary. Empty is none."""


@dataclass(kw_only=True)
class Tune(HasSeed, HeadOnBase):
    """`specheads tune`. tuned.json, or vllm.json with engine=vllm, goes into the head's folder."""

    data: DataSettings
    max_nodes: TreeSize = 64
    """Largest number of nodes that the head drafts, root included. Prompt lookup adds 4 or 10."""
    batch_sizes: Annotated[list[PositiveInt], NonEmpty] = field(default_factory=lambda: [1, 4])
    """Batch sizes; a tree is chosen for each."""
    contexts: list[PositiveInt] = field(default_factory=list)
    """Context lengths in tokens; a tree is chosen for each. Empty is 64 and 512, if they fit the
    base's context."""
    num_prompts: AtLeastTwo = 48
    """Validation prompts for each context length. Half of them grow the trees, the other half
    measures them."""
    new_tokens: AtLeastTwo = 64
    """Tokens that the base generates after each prompt."""
    engine: Annotated[str, one_of("", "vllm")] = ""
    """vllm times steps of vLLM with an exported head, so the plug-in drafts by the load. Only
    base, batch_sizes and contexts matter then. Empty tunes the trees of our own loop."""
    python: PathOrId = ""
    """Python interpreter of an environment with vLLM. Empty is this one's."""


@dataclass(kw_only=True)
class Simulate(HasSeed, HasOut, HasRun):
    """`specheads simulate`. Needs a run with a tuned head, or computed times and acceptance."""

    hardware: HardwareSettings
    prompt_tokens: PositiveInt = 64
    """Prompt tokens of each request, unless the load was recorded."""
    rates: list[PositiveFloat] = field(default_factory=list)
    """Loads in requests per second, simulated one by one. Empty is five loads around the capacity
    of the base alone."""
    arrivals: PathOrId = ""
    """Recorded load, in place of rates: a .jsonl file of seconds, prompt_tokens, new_tokens."""
    acceptance: list[Probability] = field(default_factory=list)
    """Conditional acceptance rate by depth. Empty uses the rates that `specheads tune` measured."""
    num_requests: PositiveInt = 2000
    """Requests for each load."""
    new_tokens: PositiveInt = 128
    """New tokens of each request, unless the load was recorded."""
    max_batch: PositiveInt = 16
    """Largest batch size."""
    depths: list[DepthOrZero] = field(default_factory=list)
    """Fixed draft depths to simulate next to goodput. Empty is zero, the base alone, and the
    head's depth."""
