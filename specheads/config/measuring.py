"""Settings of the commands that measure."""

from dataclasses import dataclass, field
from typing import Annotated

from specheads.config.parts import Base, Data, Evaluation, Hardware, Tree
from specheads.config.ranges import (
    AtLeastTwo,
    Depth,
    DepthOrZero,
    NonEmpty,
    NonNegativeInt,
    NumNodes,
    PathOrId,
    PositiveFloat,
    PositiveInt,
    Probability,
    Rule,
    Seed,
    Temperature,
    TreeSize,
    Weight,
    one_of,
)

OF_TRANSFORMERS = ("transformers", "transformers_lookup", "transformers_assisted")
DRAFTERS = ("head", "prompt_lookup", "hybrid", "streaming", "draft_model", *OF_TRANSFORMERS)
OF_DRAFT_MODEL = ("draft_model", "transformers_assisted")
"""Drafters that need one."""


@dataclass(kw_only=True, slots=True)
class Evaluate:
    """`specheads evaluate`."""

    run: PathOrId = ""
    """A run directory; or name head and base."""

    head_path: PathOrId = ""
    """Folder or Hub id of a head; `head=` on the command line."""

    base: Base
    data: Data
    """Whose validation text a tuned tree is picked on, for a head without a run."""
    tree: Tree
    evaluation: Evaluation
    out: PathOrId = ""
    """Where the report goes. Empty is the run's own report/."""

    force: bool = False
    """Take a head that was trained on other weights than the base's, a fine-tuned sibling's."""

    record: PathOrId = ""
    """A recipe folder, or one in it (of a further prompt set), whose results.json is replaced."""

    seed: Seed = 0
    """Seed of sampling, and of which validation text is read; unasked, a run has its own."""


@dataclass(kw_only=True, slots=True)
class Compare:
    """`specheads compare`."""

    run: PathOrId = ""
    """A finished run's directory."""

    heads: list[PathOrId] = field(default_factory=list)
    """More heads of the same base, of any kinds and widths: finished runs, or folders or Hub ids
    of heads. What is measured is as the first run among them has it."""

    base: Base
    """Base of heads without a run."""

    drafters: list[Annotated[str, one_of(*DRAFTERS)]] = field(default_factory=list)
    """Which of head, prompt_lookup, hybrid, streaming, draft_model, transformers (the base alone
    in its own generate), transformers_lookup and transformers_assisted. Empty is all, draft_model
    and transformers_assisted only where a draft model is named."""

    temperatures: list[Temperature] = field(default_factory=list)
    """Temperatures at which all of them are measured. Empty is evaluation.temperature."""

    other_ways: bool = True
    """Whether heads draft in all three ways above temperature zero: with the base's noise, without
    it, and by rejection. Else only as evaluation.coupled has it."""

    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Batches in which all of them are measured. Empty is evaluation.batch_size."""

    draft_model: PathOrId = ""
    """Folder or Hub id of a smaller model that shares the base's vocabulary. Empty is none."""

    draft_depth: Depth = 4
    """Tokens that streaming and draft_model draft: a chain."""

    copied_tokens: NumNodes = 10
    """Tokens that prompt lookup copies at most, alone and in the hybrid's tree."""

    max_ngram: PositiveInt = 3
    """Longest suffix that prompt lookup looks for."""

    sinks: NonNegativeInt = 4
    """First tokens of a text that streaming sees."""

    window: PositiveInt = 60
    """Recent tokens that streaming sees; as many as the context make its draft the base's own."""

    data: Data
    """Whose validation text a tuned tree is picked on, for a head without a run."""
    tree: Tree
    """The head's, alone and in the hybrid."""
    evaluation: Evaluation
    out: PathOrId = ""
    """Where compare.json goes. Empty is the run's own report/."""

    seed: Seed = 0
    """Seed of sampling, and of which validation text is read; unasked, a run has its own."""


@dataclass(kw_only=True, slots=True)
class Tune:
    """`specheads tune`."""

    run: PathOrId = ""
    """A finished run's directory; or name head and base."""

    head_path: PathOrId = ""
    """Folder of a head, into which tuned.json goes; `head=` on the command line."""

    base: Base
    data: Data
    """Whose validation text acceptance is measured on, for a head without a run."""

    max_nodes: TreeSize = 64
    """Nodes of the largest tree that the head drafts, root included; copied text adds 4 or 10."""

    batch_sizes: Annotated[list[PositiveInt], NonEmpty] = field(default_factory=lambda: [1, 4])
    """Rows decoded together, for each of which a tree is chosen."""

    contexts: list[PositiveInt] = field(default_factory=list)
    """Tokens of the text so far, for each of which a tree is chosen. Empty is 64 and 512, as far as
    the base holds them."""

    num_prompts: AtLeastTwo = 48
    """Validation prompts for each context: those of every other file or conversation grow the
    trees, the rest judge them."""

    new_tokens: AtLeastTwo = 64
    """Tokens that the base writes after each."""

    force: bool = False
    """Take a head that was trained on other weights than the base's, a fine-tuned sibling's."""

    seed: Seed = 0
    """Seed of which prompts are used; unasked, a run has its own."""


@dataclass(kw_only=True, slots=True)
class Simulate:
    """`specheads simulate`."""

    run: PathOrId = ""
    """A run directory whose head was tuned; or name head."""

    head_path: PathOrId = ""
    """Folder of a head; `head=` on the command line."""

    hardware: Hardware

    rates: list[PositiveFloat] = field(default_factory=list)
    """Loads in requests a second, each simulated by itself. Empty is five, from a quarter of what
    the base alone can serve to more than that."""

    parts: Annotated[list[Weight], Rule(any, "one of them above 0")] = field(
        default_factory=lambda: [1.0]
    )
    """Factors of the rate in successive parts of time, all of one length: [0.2,2,0.2] rises and
    falls."""

    arrivals: PathOrId = ""
    """A recorded load in place of rates: a .jsonl file of seconds, prompt_tokens, new_tokens."""

    acceptance: list[Probability] = field(default_factory=list)
    """Conditional acceptance by depth. Empty takes what `specheads tune` measured."""

    accepted: PathOrId = ""
    """A .jsonl file of recorded accepted lengths, one text a line. Empty draws from the rates."""

    num_requests: PositiveInt = 2000
    """Requests of each rate."""

    prompt_tokens: PositiveInt = 64
    """Tokens of each prompt, of loads that were not recorded."""

    new_tokens: PositiveInt = 128
    """Tokens that each request takes, of loads that were not recorded."""

    max_batch: PositiveInt = 16
    """Rows decoded together."""

    depths: list[DepthOrZero] = field(default_factory=list)
    """Fixed depths beside goodput. Empty is zero, the base alone, and all levels."""

    out: PathOrId = ""
    """Where load.json and load.png go. Empty is the run's own report/, or the head's folder."""

    seed: Seed = 0
    """Seed of arrivals and of drawn acceptance."""
