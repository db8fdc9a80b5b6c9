"""Settings that several commands share, each with its unit and what its zero means."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Base:
    """Which model is frozen."""

    model: str
    """Folder or Hub id; safetensors only, and no code of its own is run."""

    revision: str = "main"
    """Hub revision; ignored for a folder."""

    dtype: str = "auto"
    """Precision of its weights; auto is bfloat16 on CUDA and float32 elsewhere."""

    device: str = "auto"
    """Torch device; auto is CUDA where there is one."""

    attention: str = "sdpa"
    """sdpa or eager: what takes an arbitrary mask."""

    adapter: str = ""
    """Folder or Hub id of a LoRA adapter that is merged into it. Empty is none."""

    compile: bool = False
    """Verify trees with compiled graphs: faster steps, after minutes of compiling at first."""


@dataclass(kw_only=True, slots=True)
class Data:
    """Which text is the corpus."""

    source: str
    """python_stdlib, files, jsonl, parquet or hub."""

    path: str = ""
    """Folder, file, glob or Hub id; empty for python_stdlib."""

    config: str = ""
    """Configuration of a Hub data set; empty for its default."""

    column: str = "text"
    """Column that holds the text."""

    revision: str = "main"
    """Revision of a Hub data set."""

    patterns: list[str] = field(default_factory=list)
    """Globs that choose among a folder's or a Hub data set's files. Empty takes all."""

    max_documents: int = 0
    """Documents taken, before they are split. Zero takes all."""


@dataclass(kw_only=True, slots=True)
class Distill:
    """Text the frozen base writes itself, continuing prompts from the training corpus."""

    num_samples: int
    """Texts written."""

    prompt_tokens: int = 64
    """Tokens of corpus text that each continues; they are read and not counted."""

    new_tokens: int = 256
    """Tokens the base writes for each; the loss covers these only."""

    temperature: float = 1.0
    """Sampling temperature of the base. Zero is greedy: the text a greedy server would see."""

    top_k: int = 0
    """Tokens sampled from, the likeliest ones. Zero samples from all."""

    batch_size: int = 64
    """Texts written at once, and kept in one shard."""

    folder: str = ""
    """Where the text is kept, so that several runs can share it. Empty is the run's own text/."""


@dataclass(kw_only=True, slots=True)
class Joint:
    """The base learns along with the head, by LoRA. The defaults are Medusa-2's for Vicuna.

    Source: Cai et al. 2024, arXiv:2401.10774.
    """

    rank: int = 32
    """Rank of what is added to each matrix."""

    alpha: float = 16.0
    """What is added is scaled by alpha / rank."""

    dropout: float = 0.05
    """Share of each adapted layer's inputs that what is added does not see, in training."""

    target_modules: list[str] = field(default_factory=list)
    """Ends of linear layers' names, such as q_proj. Empty is all, the vocabulary projection
    included unless it is tied to the embedding."""

    learning_rate: float = 5e-4
    """The base's, at its peak; the head's is the phase's."""

    head_weight: float = 0.2
    """Weight of the head's loss beside the base's own: lambda0 of the paper."""

    ramp: str = "constant"
    """constant, or sine: from zero in the phase's first step to head_weight in its last."""

    target: str = "text"
    """What the base learns: text (the surprise of the counted tokens), or base (KL divergence to
    itself without the adapter, so that it keeps its distribution)."""


@dataclass(kw_only=True, slots=True)
class Phase:
    """One stretch of training: where its text comes from, how long, how fast."""

    text: str = ""
    """corpus, or distilled: text the base wrote itself."""

    steps: int = 0
    """Optimizer steps, at least one."""

    batch_size: int = 0
    """Sequences of one step on each process."""

    sequence_length: int = 0
    """Tokens of a sequence. Zero takes the distilled text's own length."""

    learning_rate: float = 1e-3
    """At its peak."""

    final_share: float = 0.1
    """Learning rate at the end, as a share of the peak."""

    warmup_share: float = 0.05
    """Share of the steps that warm up, at most 2000 of them."""

    loss: str = "soft_cross_entropy"
    """Which loss: see docs/losses.md."""

    decay: float = 1.0
    """Weight of each depth's loss relative to the depth before."""

    depth_weights: list[float] = field(default_factory=list)
    """Weight of each depth's loss, one a depth, in place of decay. Empty leaves it to decay."""

    weighting: str = "geometric"
    """geometric (by decay or depth_weights, the same for every position), or dpace (each chain by
    how far its own drafts are likely to reach)."""

    scored_share: float = 1.0
    """Share of the counted positions that the loss covers, drawn anew in each step. The base's
    forward is cheap beside the vocabulary products, so scoring fewer positions of more text
    learns faster in the same time."""

    distill: Distill | None = None
    """How distilled text is written; only for text=distilled."""

    joint: Joint | None = None
    """How the base learns along with the head. None trains the head alone."""


@dataclass(kw_only=True, slots=True)
class Schedule:
    """The phases, by name, in order."""

    phases: dict[str, Phase]

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's two moments."""

    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW and Muon."""

    muon_learning_rate: float = 0.0
    """Peak for the hidden matrices, by Muon; it follows the phases' shape. Zero trains them with
    AdamW like all else."""

    clip_norm: float = 1.0
    """Largest norm of all gradients together."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """What is measured after training, and by `specheads evaluate`."""

    prompts: str = "python_stdlib"
    """A name, or a .jsonl file."""

    num_prompts: int = 40
    """Prompts used."""

    prompt_tokens: int = 64
    """Tokens of each prompt cut from code; other prompts keep their own length."""

    max_new_tokens: int = 128
    """Tokens decoded for each."""

    temperature: float = 0.0
    """Zero is greedy; above it tokens are sampled, and there is nothing to replay offline."""

    top_k: int = 0
    """Tokens sampled from, the likeliest ones. Zero samples from all."""

    top_p: float = 1.0
    """Probability that the tokens sampled from reach together, likeliest first. One is all."""

    min_p: float = 0.0
    """Probability that a token needs, as a share of the likeliest one's. Zero is none."""

    repetition_penalty: float = 1.0
    """Penalty on tokens already in the text. One is none."""

    acceptance: str = "match"
    """What is kept of a tree: match (the base's own tokens, at every temperature), rejection (its
    distribution; for sampled trees), or typical (neither, above temperature zero)."""

    batch_size: int = 1
    """Prompts decoded at once."""

    mode: str = "all"
    """offline (replay only), online (decoding only), or all (with speed)."""

    repeats: int = 2
    """How often speed is measured on each prompt, alternating with the base alone."""

    speed_prompts: int = 16
    """Prompts that speed is measured on."""

    tune_prompts: int = 24
    """Validation prompts on which a tuned tree is picked."""

    quality_windows: int = 64
    """Windows of validation text on which the base's own quality is measured without and with the
    adapter that joint training gave it."""


@dataclass(kw_only=True, slots=True)
class Tree:
    """How drafts grow."""

    kind: str = "tuned"
    """tuned (picked by a short measurement), chain, static, best_first, beam, product or
    sampled."""

    depth: int = 0
    """Levels. Zero takes the head's own."""

    num_nodes: int = 8
    """Nodes of a best-first or product tree, root included."""

    beam: int = 4
    """Nodes that a best-first tree or a beam continues per level."""

    branch: int = 4
    """Children of each in a best-first tree."""

    branches: list[int] = field(default_factory=list)
    """Children of every node of a product or sampled tree, level by level. Empty is one each."""

    confidence: float = 0.0
    """Where the head gives a token less than this probability, a chain, static or sampled tree goes
    no further below it; the token itself is verified. Zero never stops."""

    paths: list[list[int]] = field(default_factory=list)
    """Rank paths of a static tree."""


@dataclass(kw_only=True, slots=True)
class Tracker:
    """Where numbers go besides metrics.jsonl."""

    kind: str = "jsonl"
    """jsonl (nothing else) or wandb."""

    project: str = "specheads"
    """Project of wandb; offline where no key is set."""
