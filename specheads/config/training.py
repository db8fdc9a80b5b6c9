"""Settings of training: the phases, generated text, joint training and validation.

config/ composes them, and `--help` shows them without loading torch: this module imports no torch.
"""

from dataclasses import dataclass, field
from typing import Annotated

from specheads.config.shared import FixesDivergence, Ordered, Resumable, SameText, SamplingSettings
from specheads.core.errors import InputError
from specheads.core.ranges import (
    AtLeastTwo,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PathOrId,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
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

LOSSES = (
    *("cross_entropy", "soft_cross_entropy", "total_variation"),
    *("cross_entropy_l1", "lk", "lk_hybrid"),
)
"""All losses: each is the function of this name in training/losses.py."""
EXTERNAL_ENGINES = ("vllm", "openai")
"""Engines of generated text that load the weights of the base again."""
ENGINES = ("local", *EXTERNAL_ENGINES)
FAULTS = ("loop", "empty", "truncated")
"""Reasons to drop a generated answer."""


@dataclass(kw_only=True)
class DistillSettings(SamplingSettings):
    """Text that the frozen base generates: answers in conversations, or continuations of text.

    The training data decides which of the two.
    """

    temperature: Temperature = 1.0
    """Sampling temperature. Zero is greedy: the text that a greedy server would produce."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a prompt that is cut from plain text. Questions keep their own length."""
    num_samples: Annotated[PositiveInt, SameText()]
    """Texts to generate: conversations or continuations."""
    new_tokens: PositiveInt = 256
    """Largest number of tokens of an answer or a continuation. The loss covers these tokens."""
    drop: list[Annotated[str, one_of(*FAULTS)]] | None = None
    """Answers to drop: loop (ends in a repetition), empty, truncated (stopped by a limit, in
    conversations only). None drops all three in conversations, and nothing of continued text."""
    engine: Annotated[str, one_of(*ENGINES), SameText(), Resumable()] = "local"
    """Engine that generates: local (this package), vllm, or openai (a server with that
    protocol)."""
    batch_size: Annotated[PositiveInt, SameText(), Resumable()] = 64
    """Texts generated at once, or open requests of a server."""
    use_head: Annotated[bool, SameText(), Resumable()] = False
    """Draft with the head trained so far, with engine=local. It does not change the text, and is
    faster with a small batch_size."""
    url: Annotated[PrintableText, SameText(), Resumable()] = ""
    """Address of the server for engine=openai, such as http://127.0.0.1:8000/v1. The key is read
    from the environment variable OPENAI_API_KEY; if it is not set, no key is sent."""
    served_as: Annotated[PrintableText, SameText(), Resumable()] = ""
    """Name of the base at that server. Empty is base.model."""
    timeout_seconds: Annotated[PositiveFloat, SameText(), Resumable()] = 120.0
    """Longest wait for one answer of a server."""
    tensor_parallel: Annotated[PositiveInt, SameText(), Resumable()] = 1
    """GPUs that share the weights, with engine=vllm. Each process needs as many of its own."""
    gpu_memory_utilization: Annotated[Probability, SameText(), Resumable()] = 0.0
    """Share of each GPU's memory that engine=vllm may use. Zero is what is free, at most 0.9."""
    shard_size: PositiveInt = 64
    """Texts in one file. A file appears when it is complete; processes share the work by files."""
    folder: Annotated[PathOrId, SameText(), Resumable()] = ""
    """Folder of the text, which several runs can share. Phases with other settings of the text
    need folders of their own. Empty is text/ in the run directory."""


@dataclass(kw_only=True)
class JointSettings:
    """Train the base together with the head, by LoRA. The defaults are Medusa-2's for Vicuna.

    Source: Cai et al. 2024, arXiv:2401.10774.
    """

    rank: Width = 32
    """LoRA rank."""
    alpha: PositiveFloat = 16.0
    """LoRA alpha; the update is scaled by alpha / rank."""
    dropout: ProbabilityBelowOne = 0.05
    """LoRA dropout probability."""
    target_modules: list[PrintableText] = field(default_factory=list)
    """Suffixes of the names of adapted linear layers, such as q_proj. Empty is all of them, and
    the vocabulary projection unless it is tied to the embedding."""
    learning_rate: Annotated[Probability, FixesDivergence()] = 5e-4
    """Peak learning rate of the base. The phase has that of the head."""
    head_weight: Weight = 0.2
    """Weight of the head's loss relative to the base's loss: lambda0 of the paper."""
    ramp: Annotated[str, one_of("constant", "sine")] = "constant"
    """constant, or sine: the weight grows from zero to head_weight during the phase."""
    target: Annotated[str, one_of("text", "base")] = "text"
    """Loss of the base: text (cross-entropy of the tokens in the loss mask), or base (KL
    divergence to the base without the adapter, which keeps its distribution)."""


@dataclass(kw_only=True)
class Phase:
    """One phase of training."""

    text: Annotated[str, one_of("corpus", "distilled")] = ""
    """corpus, or distilled: text that the base generated."""
    steps: PositiveInt = 0
    """Optimizer steps."""
    batch_size: PositiveIntOrAuto = 0
    """Sequences of one step over all processes, so the number of processes does not change the
    result. auto doubles it as long as it fits in memory, and writes it into config.yaml."""
    accumulation_steps: Annotated[PositiveIntOrAuto, Resumable()] = 1
    """Micro-batches in which each process computes its share of a step: less memory, the same
    gradients. auto takes as few as fit in memory."""
    sequence_length: SequenceLength = 0
    """Tokens of a sequence. Zero uses the length of the generated text; conversations are then
    limited by the base's context only."""
    packing: Annotated[str, one_of("best_fit", "stream", "none")] = "best_fit"
    """How documents become sequences: best_fit (several in one, with document masks), stream
    (concatenated and cut, each attends to those before it), or none (one document, padded or
    truncated)."""
    learning_rate: Annotated[Probability, FixesDivergence()] = 1e-3
    """Peak learning rate."""
    final_share: Probability = 0.1
    """Last learning rate as a share of the peak."""
    warmup_share: Probability = 0.05
    """Share of the steps that warm up, at most 2000 steps."""
    loss: Annotated[str, one_of(*LOSSES)] = "soft_cross_entropy"
    """Loss; docs/losses.md describes each."""
    lk_eta: PositiveFloat = 3.0
    """Rate at which lk_hybrid moves from KL to total variation as the acceptance grows."""
    decay: Weight = 1.0
    """Weight of each depth's loss relative to the depth before."""
    scored_share: PositiveProbability = 1.0
    """Share of the positions in the loss mask that each step draws for the loss. The base's
    forward costs little compared with the vocabulary projections, so fewer positions of more text
    train faster."""
    answers_only: bool = True
    """Limit the loss mask to generated text, or to the answers in conversations. False includes
    the prompts."""
    distill: DistillSettings | None = None
    """How the base generates the text; only with text=distilled."""
    joint: JointSettings | None = None
    """How the base is trained together with the head. None trains the head only."""


@dataclass(kw_only=True)
class ValidationSettings:
    """Measurements on held-out text during training. See docs/train.md."""

    prompt_tokens: PositiveInt = 64
    """Tokens of a prompt that is cut from plain text. Questions keep their own length."""
    every: NonNegativeInt = 0
    """Steps between two measurements. Zero measures at the end of each phase only."""
    rows: NonNegativeInt = 16
    """Sequences for the validation loss, the same each time. Zero skips it."""
    prompts: NonNegativeInt = 8
    """Held-out prompts to decode, for tokens per forward; the head with the most is kept in best/.
    Zero skips it."""
    new_tokens: AtLeastTwo = 64
    """New tokens for each prompt."""
    keep: Annotated[str, one_of("last", "best")] = "last"
    """Which head becomes head/: the last or the best."""


@dataclass(kw_only=True)
class FeatureSettings:
    """Where training takes the base's hidden states from."""

    source: Annotated[
        str, one_of("local", "cache", "vllm"), Resumable(among=("local", "cache"))
    ] = "local"
    """local (the base in this process), cache (the same, and files of its states for later runs on
    the same text), or vllm (servers that `specheads serve-features` starts; this process then holds
    only embedding, final norm and vocabulary projection)."""
    url: Annotated[list[PrintableText], Resumable()] = field(default_factory=list)
    """Addresses of the servers, such as http://127.0.0.1:8000/v1. Requests are spread over them.
    A key is read from the environment variable OPENAI_API_KEY."""
    folder: Annotated[PathOrId, Resumable()] = ""
    """Folder of the files. cache: several runs may share it; empty is runs/features. vllm: the
    folder that the servers write into, under its name on this machine; each file is deleted after
    use."""
    transport: Annotated[str, one_of("folder", "mooncake"), Resumable()] = "folder"
    """Way from the servers: folder (files that servers and trainer see), or mooncake (a Mooncake
    store over the network; needs the extra specheads[mooncake])."""
    master: Annotated[PrintableText, Resumable()] = "127.0.0.1:50051"
    """mooncake: host and port of the mooncake_master."""
    protocol: Annotated[str, one_of("tcp", "rdma"), Resumable()] = "tcp"
    """mooncake: protocol between the machines."""
    concurrency: Annotated[PositiveInt, Resumable()] = 16
    """Open requests of one process at each server."""
    timeout_seconds: Annotated[PositiveFloat, Resumable()] = 120.0
    """Longest wait for one answer."""
    patience_seconds: Annotated[NonNegativeFloat, Resumable()] = 900.0
    """Longest wait for a server that fails or is started again; then the run writes a checkpoint
    and stops."""
    max_gib: Annotated[PositiveFloat, Resumable()] = 4.0
    """Largest size of the files in the folder, in GiB. cache: of one run's; a run that needs more
    is refused. vllm: of one process's at a time. mooncake: also the memory of each server."""


@dataclass(kw_only=True)
class Schedule:
    """Phases and optimizer."""

    phases: Annotated[dict[str, Phase], NonEmpty, Ordered()]
    weight_decay: Probability = 0.0
    """Decoupled weight decay of AdamW and Muon."""
    muon_learning_rate: Annotated[Probability, FixesDivergence()] = 0.0
    """Peak learning rate of Muon for the hidden matrices; it follows the schedule of the phase.
    Zero trains them with AdamW."""


def distill_settings(schedule: Schedule) -> DistillSettings:
    """Return the settings of the first distilled phase."""
    for phase in schedule.phases.values():
        if phase.distill:
            return phase.distill
    raise InputError("distill needs a recipe with a distilled phase; add schedule=two_phase")
