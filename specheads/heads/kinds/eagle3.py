"""EAGLE-3: one attention layer over features of the base, fed back on its own output.

Source: Li et al. 2025, arXiv:2503.01840; SafeAILab/EAGLE, vllm-project/speculators.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specheads.config import check
from specheads.config.ranges import Count, Depth, Layer, Scale, Width
from specheads.core.drafter import Bias, Committed, Features, State, Weight
from specheads.core.errors import InputError
from specheads.heads.fill import fill, take_maps
from specheads.heads.layers.attention import AttentionShape, Slots
from specheads.heads.layers.embedding import EmbeddingHead
from specheads.heads.layers.feedback import Branch, FeedbackLayer
from specheads.heads.layers.norm import RMSNorm

NUM_AUX_LAYERS = 3
"""Low, middle and high: layers it reads where the settings name none."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of an EAGLE-3 head; the defaults are the published ones."""

    depth: Depth = 7
    """Number of levels it drafts, and steps of its training-time test."""

    aux_layers: list[Layer] = field(default_factory=list)
    """Base layers it reads, in growing order: k is the residual stream after k layers. Empty
    takes 2, n // 2 and n - 3 of n, as serving engines do, and others in a base too shallow."""

    attention_heads: Width = 0
    """Number of attention heads. Zero takes one for each 64 channels of the base."""

    key_value_heads: Width = 0
    """Number of heads of keys and values. Zero takes as many as there are attention heads."""

    head_dim: Width = 0
    """Number of channels of an attention head. Zero divides the base's among them."""

    inner_dim: Width = 0
    """Width of its MLP. Zero takes 8/3 of the base's, rounded up to a multiple of 16."""

    norm_before_residual: bool = False
    """Whether the residual starts from the normed features, as in some checkpoints."""

    rope_theta: Scale = 10_000.0
    """Base of the rotary position embedding."""

    epsilon: Scale = 1e-5
    """Epsilon of its norms."""

    draft_tokens: Count = 0
    """Number of tokens it can draft, the most frequent ones of the training text. Zero is all."""

    def __post_init__(self) -> None:
        if isinstance(self.aux_layers, tuple):
            self.aux_layers = list(self.aux_layers)
        check(self, "head")
        # serving engines read the list as a sorted set
        if self.aux_layers != sorted(set(self.aux_layers)):
            raise InputError(
                f"eagle3 needs aux_layers in growing order, got {self.aux_layers}; "
                "set head.aux_layers"
            )


class Head(EmbeddingHead):
    """Features of three layers, fused, then `depth` rounds of one layer over its own output.

    Each round reads the token drafted last, and attends to the committed positions and to the
    earlier rounds on its path. Training runs the same rounds from every position at once
    (training-time test), so that each learns from what it will see.
    """

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.depth, self.aux_layers = config.depth, tuple(config.aux_layers)
        self.fc = nn.Linear((len(self.aux_layers) or NUM_AUX_LAYERS) * width, width, bias=False)
        heads = config.attention_heads, config.key_value_heads, config.head_dim
        self.midlayer = FeedbackLayer(
            width,
            inner=config.inner_dim,
            epsilon=config.epsilon,
            norm_before_residual=config.norm_before_residual,
            shape=AttentionShape.of(width, *heads, theta=config.rope_theta),
        )
        self.norm = RMSNorm(width, config.epsilon)
        self.lm_head = nn.Linear(width, self.drafted_size, bias=False)

    def choose_aux_layers(self, num_layers: int) -> None:
        """Take the published layers, or three spread out where those would not be different."""
        if not self.aux_layers:
            first, end = (2, 3) if num_layers >= 7 else (int(num_layers > 3), 1)
            aux_layers = (first, num_layers // 2, num_layers - end)
            self.config = replace(self.config, aux_layers=list(aux_layers))
            self.aux_layers = aux_layers

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Start the vocabulary projection from the base's own."""
        del embedding
        self.lm_head.weight.data.copy_(projection)

    def states(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        anchors: Bool[Tensor, "batch time"] | None = None,
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield each round's state, of every position at once."""
        del anchors
        read = (
            self.embed(tokens.roll(-1 - level, 1), self.fc.weight) for level in range(self.depth)
        )
        for hidden in self.midlayer.rounds(self._fuse(features), read, features):
            yield self.norm(hidden)

    def projection(self, level: int) -> tuple[Weight, Bias | None]:
        """Return the projection to the tokens it can draft, the same at every level."""
        del level
        return self.lm_head.weight, None

    def memory(self, batch: int, capacity: int) -> Slots:
        """Return room for the keys and values of committed positions."""
        return Slots.empty(self.midlayer.self_attn, batch, capacity)

    @torch.no_grad()
    def begin(
        self, committed: Committed, memory: Slots
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Commit every position's keys and values; answer from the last."""
        fused = self._fuse(committed.features)
        embedded = self.embed(committed.next_tokens, self.fc.weight)
        return self._answer(self.midlayer.commit(fused, embedded, committed, memory))

    @torch.no_grad()
    def extend(
        self, state: State, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], State]:
        """Read each node on top of its parent's features, seeing the path that led to it."""
        embedded = self.embed(tokens, self.fc.weight)
        return self._answer(self.midlayer.branch(state, embedded, parents))

    def _answer(self, branch: Branch) -> tuple[Tensor, State]:
        return self.logits(self.norm(branch.hidden), branch.path.shape[4]), branch

    def _fuse(self, features: Features) -> Tensor:
        if features.aux is None:
            raise InputError(
                "eagle3 reads aux_layers, got none; read the base with aux_layers=head.aux_layers"
            )
        return self.fc(features.aux)


IDS = "eagle_aux_hidden_state_layer_ids"

PLAIN = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rope_type": "default",
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "embed_requires_grad": False,
}
"""Settings of public checkpoints that may differ, and whose other values nothing here reads."""


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read a folder of SafeAILab's EAGLE or of vllm-project's speculators.

    They name the layer `midlayer` or `layers.0`. An embedding in it is a copy of the base's.
    """
    named = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3" or "midlayer.hidden_norm.weight" not in named:
        return None
    nested = dict(config.get("eagle_config", {}))
    if IDS in nested:
        # SpecForge, SGLang and ModelOpt, who write them there, count outputs of layers from zero
        nested[IDS] = [layer + 1 for layer in nested[IDS]]
    settings = config.get("transformer_layer_config", {}) | nested | config
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    settings["rope_type"] = rope.get("rope_type", rope.get("type"))
    settings["rope_theta"] = settings.get("rope_theta") or rope.get("rope_theta")
    for name, value in (PLAIN | {"target_hidden_size": settings["hidden_size"]}).items():
        if settings.get(name) not in (None, value):
            raise InputError(
                f"eagle3 reads checkpoints with {name}={value!r}, this one has "
                f"{settings[name]!r}; choose another checkpoint"
            )
    head = Head(_own_config(settings), settings["hidden_size"], settings["vocab_size"])
    embedding = named.pop("embed_tokens.weight", None)
    take_maps(head, named)
    fill(head, named)
    if embedding is not None:
        head.bind(embedding)
    return head


def _own_config(settings: dict[str, Any]) -> Config:
    proposal = settings.get("speculators_config", {}).get("proposal_methods", [{}])[0]
    drafted = settings.get("draft_vocab_size") or 0
    return Config(
        depth=proposal.get("speculative_tokens") or Config().depth,
        aux_layers=sorted(set(settings.get(IDS) or ())),
        attention_heads=settings["num_attention_heads"],
        key_value_heads=settings.get("num_key_value_heads") or 0,
        head_dim=settings.get("head_dim") or 0,
        inner_dim=settings["intermediate_size"],
        norm_before_residual=settings.get("norm_before_residual", False),
        rope_theta=settings["rope_theta"] or Config().rope_theta,
        epsilon=settings["rms_norm_eps"],
        draft_tokens=drafted if drafted != settings["vocab_size"] else 0,
    )
