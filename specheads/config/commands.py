"""Settings of the commands that make something. Hydra fills these; nothing else does."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from specheads.config.parts import Base, Data, Evaluation, Tracker, Tree
from specheads.config.ranges import (
    FolderName,
    NonNegativeInt,
    PathOrId,
    PositiveInt,
    PositiveProbability,
    PrintableText,
    Seed,
    Temperature,
    one_of,
)
from specheads.config.schedule import FeatureCache, Schedule, Validation


@dataclass(kw_only=True, slots=True)
class Train:
    """`specheads train`."""

    name: FolderName
    """Name of the run."""

    run_dir: PathOrId = "runs/${name}"
    """Where it lies."""

    seed: Seed = 0
    """Seed of initialisation, shuffling and sampling."""

    base: Base
    head: dict[str, Any]
    """`kind` and that kind's own settings."""

    init: PathOrId = ""
    """Folder or Hub id of a head of that kind, ours or public, to start from; its own settings
    count then, and not those of `head`. Empty starts anew."""

    data: Data
    schedule: Schedule
    tree: Tree
    tracker: Tracker
    evaluation: Evaluation
    validation: Validation = field(default_factory=Validation)
    feature_cache: FeatureCache = field(default_factory=FeatureCache)

    log_every: PositiveInt = 10
    """Steps between two lines of metrics.jsonl."""

    checkpoint_every: NonNegativeInt = 0
    """Steps between two checkpoints. Zero writes them at the end of each phase only."""

    checkpoints_kept: PositiveInt = 2
    """Newest checkpoints that are kept: should the last be damaged, there is one before it."""

    evaluate_after: bool = True
    """Whether evaluate follows."""

    dry_run: bool = False
    """Print the resolved settings and a plan of what they take: memory, tokens, disk, hours; then
    stop."""

    preview: NonNegativeInt = 0
    """Documents shown with the tokens that the loss counts; then it stops. Zero trains."""


@dataclass(kw_only=True, slots=True)
class Distill(Train):
    """`specheads distill`. A recipe is taken as it is, so that every setting of training is known.

    Base and data count, and how the first distilled phase has text written.
    """

    out: PathOrId = ""
    """Folder of the text: made, or gone on with."""

    head_path: PathOrId = ""
    """Folder or Hub id of a head to draft with, which changes the text in nothing; `head=` on the
    command line. Empty is none."""

    dry_run: bool = False
    """Print the resolved settings and how much would be written where; then stop."""

    preview: NonNegativeInt = 0
    """Texts shown that are such as the base would be asked; then it stops. Zero writes."""


@dataclass(kw_only=True, slots=True)
class Chat:
    """`specheads chat`."""

    run: PathOrId = ""
    """A finished run's directory; or name head and base."""

    head_path: PathOrId = ""
    """Folder or Hub id of a head; `head=` on the command line."""

    base: Base
    tree: Tree
    """tuned is the tree that lies beside the head, or a chain."""

    force: bool = False
    """Take a head that was trained on other weights than the base's, a fine-tuned sibling's."""

    system: PrintableText = ""
    """What the base is told before all else. Empty is nothing."""

    max_new_tokens: PositiveInt = 512
    """Tokens of an answer, at most."""

    temperature: Temperature = 0.0
    """Zero is greedy; above it tokens are sampled."""

    top_k: NonNegativeInt = 0
    """Tokens sampled from, the likeliest ones. Zero samples from all."""

    top_p: PositiveProbability = 1.0
    """Probability that the tokens sampled from reach together, likeliest first. One is all."""

    seed: Seed = 0
    """Seed of sampling; each answer has its own, which follows from it."""

    side_by_side: bool = False
    """Have the base answer alone too, next to it."""


@dataclass(kw_only=True, slots=True)
class Export:
    """`specheads export`."""

    run: PathOrId = ""
    """A run directory; or name head and base."""

    head_path: PathOrId = ""
    """Folder or Hub id of a head; `head=` on the command line."""

    base: Base
    """Base of a head without a run. Its name is what an engine will load: a Hub id travels best."""

    force: bool = False
    """Take a head that was trained on other weights than the base's, a fine-tuned sibling's."""

    engine: PrintableText = ""
    """Whose layout: a module of specheads/export/layouts."""

    out: PathOrId = ""
    """The new folder."""

    prompts: PathOrId = ""
    """On which head and export must draft alike: a name or a .jsonl file. Empty is the run's own,
    or python_stdlib."""

    num_prompts: PositiveInt = 8
    """Prompts used."""

    prompt_tokens: PositiveInt = 64
    """Tokens of each, at most."""

    new_tokens: PositiveInt = 64
    """Tokens that the base says after each."""


@dataclass(kw_only=True, slots=True)
class Push:
    """`specheads push`. Tokens are huggingface_hub's own matter: there is no setting for them."""

    run: PathOrId = ""
    """A finished run's directory."""

    repo: PrintableText = ""
    """USER/NAME on the Hub; made where it is missing."""

    private: bool | None = None
    """Whether only its owner sees it. None leaves a repository as it is, and makes a public one."""

    gated: Annotated[str, one_of("", "false", "False", "auto", "manual")] = ""
    """Whether others have to ask for the files: false, auto or manual. Empty leaves it as it is."""

    base_repo: PrintableText = ""
    """Hub id under which others find the base. Empty is what the run loaded, where that is one."""

    licence: PrintableText = "unknown"
    """Licence of the head, as the Hub writes it, such as apache-2.0."""

    data_licence: PrintableText = ""
    """Licence of the training text. Empty is what is known of the corpus."""

    dry_run: bool = False
    """List what would be uploaded, and stop."""
