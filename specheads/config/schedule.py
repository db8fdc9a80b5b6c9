"""Settings of training: phases, and how the base writes text for one."""

from dataclasses import dataclass, field
from typing import Annotated

from specheads.config.ranges import (
    AtLeastTwo,
    BatchSize,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    Pair,
    PathOrId,
    PositiveFloat,
    PositiveInt,
    PositiveProbability,
    PrintableText,
    Probability,
    ProbabilityBelowOne,
    SequenceLength,
    Temperature,
    Weight,
    Width,
    one_of,
)
from specheads.core.errors import InputError

LOSSES = (
    *("cross_entropy", "soft_cross_entropy", "argmax_cross_entropy", "kl", "reverse_kl"),
    *("total_variation", "cross_entropy_l1", "lk", "lk_hybrid"),
)

ENGINES = ("local", "transformers", "vllm", "openai")
FAULTS = ("loop", "empty", "truncated")
"""What may be wrong with an answer that the base wrote."""


@dataclass(kw_only=True, slots=True)
class Distill:
    """Text the frozen base writes itself: its answers in conversations, or continuations of text.

    Which of the two follows from the training data.
    """

    num_samples: PositiveInt
    """Texts asked for: conversations, or continuations."""

    prompt_tokens: PositiveInt = 64
    """Tokens of plain text that each continues; they are read and not counted."""

    new_tokens: PositiveInt = 256
    """Tokens the base writes at most in an answer or a continuation; the loss covers these only."""

    max_turns: NonNegativeInt = 0
    """Answers in a conversation, at most. Zero asks every turn that it has."""

    temperature: Temperature = 1.0
    """Sampling temperature of the base. Zero is greedy: the text a greedy server would see."""

    top_k: NonNegativeInt = 0
    """Tokens sampled from, the likeliest ones. Zero samples from all."""

    top_p: PositiveProbability = 1.0
    """Probability that the tokens sampled from reach together, likeliest first. One is all."""

    drop: list[Annotated[str, one_of(*FAULTS)]] | None = None
    """Answers that are not kept: loop (ends up repeating itself), empty, truncated (stopped by a
    limit before the base had ended it, for conversations only). None is all of these in
    conversations, and nothing of continued text."""

    min_tokens: PositiveInt = 1
    """Tokens that an answer needs in order not to be empty, its end not counted."""

    engine: Annotated[str, one_of(*ENGINES)] = "local"
    """Who has the base write: local (this package's own decoding), transformers, vllm, or openai (a
    server that speaks that protocol)."""

    batch_size: PositiveInt = 64
    """Texts in flight at once; of a server, requests."""

    use_head: Annotated[str, one_of("auto", "true", "True", "false", "False")] = "auto"
    """Whether engine=local drafts with the head trained so far, which changes the text in nothing:
    true, false, or auto (whichever writes faster in a short trial)."""

    url: PrintableText = ""
    """Address of the server of engine=openai, such as http://127.0.0.1:8000/v1."""

    served_as: PrintableText = ""
    """The base's name at that server. Empty is base.model."""

    api_key_env: PrintableText = "OPENAI_API_KEY"
    """Environment variable that holds the server's key; where it is not set, none is sent."""

    timeout_seconds: PositiveFloat = 120.0
    """Longest wait for one answer of a server."""

    retries: NonNegativeInt = 5
    """Times that a server is asked again, ever later. Zero gives up at once."""

    shard_size: PositiveInt = 64
    """Texts in one file, which appears once all are there; processes share the work by files."""

    folder: PathOrId = ""
    """Where the text is kept, so that several runs can share it; phases whose text is written in
    other ways need one each. Empty is the run's own text/."""


@dataclass(kw_only=True, slots=True)
class Joint:
    """The base learns along with the head, by LoRA. The defaults are Medusa-2's for Vicuna.

    Source: Cai et al. 2024, arXiv:2401.10774.
    """

    rank: Width = 32
    """Rank of what is added to each matrix."""

    alpha: PositiveFloat = 16.0
    """What is added is scaled by alpha / rank."""

    dropout: ProbabilityBelowOne = 0.05
    """Share of each adapted layer's inputs that what is added does not see, in training."""

    target_modules: list[PrintableText] = field(default_factory=list)
    """Ends of linear layers' names, such as q_proj. Empty is all, the vocabulary projection
    included unless it is tied to the embedding."""

    learning_rate: Probability = 5e-4
    """The base's, at its peak; the head's is the phase's."""

    head_weight: Weight = 0.2
    """Weight of the head's loss beside the base's own: lambda0 of the paper."""

    ramp: Annotated[str, one_of("constant", "sine")] = "constant"
    """constant, or sine: from zero in the phase's first step to head_weight in its last."""

    target: Annotated[str, one_of("text", "base")] = "text"
    """What the base learns: text (the surprise of the counted tokens), or base (KL divergence to
    itself without the adapter, so that it keeps its distribution)."""


@dataclass(kw_only=True, slots=True)
class Phase:
    """One stretch of training: where its text comes from, how long, how fast."""

    text: Annotated[str, one_of("corpus", "distilled")] = ""
    """corpus, or distilled: text the base wrote itself."""

    steps: PositiveInt = 0
    """Optimizer steps, at least one."""

    batch_size: BatchSize = 0
    """Sequences of one step, over all processes: their number does not change what is trained. The
    largest, where it grows. auto takes as many as fit the memory there is, and writes the number
    into config.yaml."""

    first_batch_share: PositiveProbability = 1.0
    """Batch of the first step, as a share of batch_size. Below one it grows linearly from there."""

    batch_ramp_share: Probability = 0.5
    """Share of the steps over which the batch grows to batch_size, where it begins smaller."""

    accumulation_steps: PositiveInt = 1
    """Parts in which each process reads its share of a step's sequences, one after the other: less
    memory, the same gradients."""

    activation_checkpointing: bool = False
    """Whether the head's layers compute once more for their gradients instead of keeping what those
    need: less memory, the same gradients. A mlp_speculator has no such layers."""

    sequence_length: SequenceLength = 0
    """Tokens of a sequence. Zero takes the distilled text's own length; a conversation's is bounded
    by nothing but the base's context."""

    packing: Annotated[str, one_of("best_fit", "stream", "none")] = "best_fit"
    """How documents become sequences: best_fit (several in one, each by itself), stream (end to
    end, cut, each seeing those before it), or none (one in each, padded or cut)."""

    learning_rate: Probability = 1e-3
    """At its peak."""

    final_share: Probability = 0.1
    """Learning rate at the end, as a share of the peak."""

    warmup_share: Probability = 0.05
    """Share of the steps that warm up, at most 2000 of them."""

    loss: Annotated[str, one_of(*LOSSES)] = "soft_cross_entropy"
    """Which loss: see docs/losses.md."""

    decay: Weight = 1.0
    """Weight of each depth's loss relative to the depth before."""

    depth_weights: list[Weight] = field(default_factory=list)
    """Weight of each depth's loss, one a depth, in place of decay. Empty leaves it to decay."""

    weighting: Annotated[str, one_of("geometric", "dpace")] = "geometric"
    """geometric (by decay or depth_weights, the same for every position), or dpace (each chain by
    how far its own drafts are likely to reach)."""

    scored_share: PositiveProbability = 1.0
    """Share of the counted positions that the loss covers, drawn anew in each step. The base's
    forward is cheap beside the vocabulary products, so scoring fewer positions of more text
    learns faster in the same time."""

    answers_only: bool = True
    """Whether the loss covers only what the base wrote, or in conversations the answers. False
    covers what was read before them too: a loss that follows the base's own probabilities learns
    there as well, more from each token that the base reads."""

    distill: Distill | None = None
    """How distilled text is written; only for text=distilled."""

    joint: Joint | None = None
    """How the base learns along with the head. None trains the head alone."""


@dataclass(kw_only=True, slots=True)
class Validation:
    """Text held out of the corpus, on which a head is measured while it is trained.

    See docs/train.md.
    """

    every: NonNegativeInt = 0
    """Steps between two measurements. Zero measures at the end of each phase only."""

    rows: NonNegativeInt = 16
    """Sequences whose loss is measured, the same each time. Zero measures none."""

    prompts: NonNegativeInt = 8
    """Held-out texts that the base continues with the head as it is then, for tokens per forward;
    the head with the most is kept in best/. Zero decodes none."""

    prompt_tokens: PositiveInt = 64
    """Tokens of each that is cut from text; what users say keeps its own length."""

    new_tokens: AtLeastTwo = 64
    """Tokens decoded after each."""

    patience: NonNegativeInt = 0
    """Measurements in a row without more tokens per forward than before in the phase, after which
    it ends and the next begins; needs every. Zero never ends one early."""

    keep: Annotated[str, one_of("last", "best")] = "last"
    """Which head becomes head/: the last one, or the best one."""


@dataclass(kw_only=True, slots=True)
class FeatureCache:
    """Hidden states of the frozen base, kept on disk for later trainings on the same text."""

    gib: NonNegativeFloat = 0.0
    """GiB that those of one run may take; a run that needs more is refused and told how many. Zero
    keeps none, and has the base read every batch."""

    folder: PathOrId = "runs/features"
    """Where they lie; several runs may share it."""


@dataclass(kw_only=True, slots=True)
class Schedule:
    """The phases, by name, in order."""

    phases: Annotated[dict[str, Phase], NonEmpty]

    betas: Annotated[list[ProbabilityBelowOne], Pair] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's two moments."""

    weight_decay: Probability = 0.0
    """Decoupled weight decay of AdamW and Muon."""

    muon_learning_rate: Probability = 0.0
    """Peak for the hidden matrices, by Muon; it follows the phases' shape. Zero trains them with
    AdamW like all else."""

    clip_norm: PositiveFloat = 1.0
    """Largest norm of all gradients together."""


def distilled(schedule: Schedule) -> Distill:
    """Return how the base writes the text of the first distilled phase.

    Raises:
        InputError: There is no such phase.
    """
    found = (phase.distill for phase in schedule.phases.values() if phase.distill)
    if first := next(found, None):
        return first
    raise InputError(
        "distill writes the text of a recipe's distilled phase, and this one has none; add "
        "schedule=two_phase"
    )
