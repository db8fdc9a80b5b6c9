"""Hydra: heads that read the drafted path, through the base's embedding.

Source: Ankner et al. 2024, arXiv:2402.05109; zankner/Hydra, hydra/model/hydra_heads.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specheads.core.drafter import Projection
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.core.foreign import LAYERS, refuse_unused
from specheads.core.ranges import Depth, LayerIndex, NonNegativeInt, PositiveFloat, WidthOrZero
from specheads.heads.checkpoint import check_weights, fill_head
from specheads.heads.layers.attention import AttentionContext, HeadCache, LlamaLayer
from specheads.heads.layers.common import RecurrentHead, ResidualBlock, RMSNorm

BORROWED = ("input_embed_fn.weight", "embed_tokens.weight", "rotary_emb.inv_freq")
"""Tensors of public checkpoints that are not part of the head."""
OPTIONS = ("hydra_head_arch", "grounded_heads", "hidden_state_offset")
"""Settings of public checkpoints that select the network."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of Hydra heads; the defaults are the published ones of Hydra++."""

    depth: Depth = 4
    """Number of levels it drafts, each with its own head."""
    num_layers: Depth = 4
    """Number of blocks of each head: 1 is Hydra, 4 is Hydra++."""
    aux_layers: list[LayerIndex] | None = None
    """Base layers that it reads next to the final hidden state: k is the residual stream after k
    layers. Null is none; empty selects 2, n // 2 and n - 3 of n, or others for a shallow base."""
    draft_tokens: NonNegativeInt = 0
    """Size of the draft vocabulary: the most frequent tokens of the training text. Zero is all."""
    prefix: bool = True
    """Whether a decoder layer processes the base's hidden states first, as in Hydra++."""
    attention_heads: WidthOrZero = 0
    """Number of that layer's attention heads. Zero is one per 64 channels of the base."""
    key_value_heads: WidthOrZero = 0
    """Number of key and value heads. Zero is the number of attention heads."""
    inner_dim: WidthOrZero = 0
    """Width of its MLP. Zero is 8/3 of the base's width, rounded up to a multiple of 16."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of its rotary position embedding."""
    epsilon: ClassVar[float] = 1e-5


class PrefixLayer(LlamaLayer):
    """A Llama layer, at first the identity, and a norm over the base's final hidden states."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__(config, width)
        self.norm = RMSNorm(width, config.epsilon)
        for output in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(output.weight)

    def encode_text(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the states of whole texts, with causal attention."""
        # with a bfloat16 base, the norms and sums of a float32 layer stay in float32
        hidden = features.hidden.to(self.norm.weight.dtype)
        inputs = self.prepare(hidden, features.positions())
        context = AttentionContext(inputs.keys_values, features.causal_mask())
        return self.norm(self(inputs, context))

    def encode_committed(
        self, committed: Committed, cache: HeadCache
    ) -> Float[Tensor, "batch 1 width"]:
        """Store the committed positions; return the state of the last one of each row."""
        hidden = committed.features.hidden
        positions = cache.advance(hidden.shape[1], committed.counts)
        inputs = self.prepare(hidden, positions)
        cache.write(inputs.keys_values, positions)
        inputs = inputs.select(committed.gather_last, cache.lengths[:, None] - 1)
        return self.norm(self(inputs, AttentionContext(cache.text(), cache.visible())))


class Head(RecurrentHead):
    """`depth` heads; the k-th reads the state and the embeddings of k + 1 tokens after it."""

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.prefix = PrefixLayer(config, width) if config.prefix else None
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(width, (level + 2) * width),
                *(ResidualBlock(width) for _ in range(config.num_layers - 1)),
            )
            for level in range(self.depth)
        )
        self.head = nn.ModuleList(nn.Linear(width, self.drafted_size) for _ in range(self.depth))

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Start every head from the base's next-token distribution."""
        for head in self.head:
            head.get_parameter("weight").data.copy_(projection)
            nn.init.zeros_(head.get_parameter("bias"))

    def memory(self, batch: int, capacity: int) -> HeadCache | None:
        """Return empty slots for the keys and values of the prefix layer."""
        return HeadCache.empty([self.prefix], batch, capacity) if self.prefix else None

    def encode_text(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the states of the prefix layer, if any, or the base's hidden states."""
        features = self.fuse_streams(features)
        return self.prefix.encode_text(features) if self.prefix else features.hidden

    def encode_committed(self, committed: Committed, memory: Any) -> Float[Tensor, "batch 1 width"]:
        """Return the same for the last committed position of each row."""
        if self.prefix is None:
            return super().encode_committed(committed, memory)
        return self.prefix.encode_committed(self.fuse_committed(committed), memory)

    def first_state(self, hidden: Tensor) -> Tensor:
        """Return the path without a token."""
        return hidden

    def read_token(self, state: Tensor, embedded: Tensor, level: int) -> Tensor:
        """Append a token to the path."""
        return torch.cat([state, embedded], dim=-1)

    def output(self, state: Tensor, hidden: Tensor, level: int) -> Tensor:
        """Return the output of a level's blocks."""
        return self.blocks[level](state)

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection of a level."""
        head = self.head[level]
        return Projection(head.get_parameter("weight"), head.get_parameter("bias"))


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read zankner's layout: `hydra_mlp`, `hydra_lm_head` and `prefix_embeding_layer` (sic).

    The blocks after a head's first one share weights there, and are copies here.
    """
    if "hydra_num_heads" not in config:
        return None
    refuse_unused(
        "hydra_heads",
        config,
        # the tensors have the shape of its own layer
        used=("hydra_num_heads", "hydra_num_layers", *OPTIONS, *LAYERS),
    )
    variant = [config.get(name) for name in ("hydra_head_arch", "grounded_heads")]
    if variant not in (["mlp", True], ["prefix-mlp", True]) or config.get("hidden_state_offset"):
        raise InputError(
            "Hydra heads must be 'mlp' or 'prefix-mlp', grounded, and read the last hidden state; "
            f"this is {variant[0]!r}, or not grounded, or reads an earlier state; choose another"
        )
    prefix = variant[0] == "prefix-mlp"
    settings = Config(
        depth=config["hydra_num_heads"],
        num_layers=config["hydra_num_layers"],
        prefix=prefix,
        **(_prefix_shape(tensors) if prefix else {}),
    )
    embedding = tensors["input_embed_fn.weight"]
    head = Head(settings, width=embedding.shape[1], vocab_size=embedding.shape[0])
    indices = 2 if prefix else 1
    names = [name for name in tensors if not name.endswith(BORROWED)]
    fill_head(head, {_rename(name, indices): tensors[name] for name in names})
    check_weights({"input_embed_fn.weight": embedding})
    head.bind(embedding)
    return head


def _prefix_shape(tensors: dict[str, Tensor]) -> dict[str, Any]:
    layer = "prefix_embeding_layer.layers.0."
    names = ("self_attn.rotary_emb.inv_freq", "self_attn.k_proj.weight", "mlp.gate_proj.weight")
    frequencies, keys, gate = (tensors[layer + name] for name in names)
    num = len(frequencies)
    return {
        "attention_heads": keys.shape[1] // (2 * num),
        "key_value_heads": keys.shape[0] // (2 * num),
        "inner_dim": gate.shape[0],
        # the i-th of num frequencies is theta ** (-i / num), in float32
        "rope_theta": round(frequencies[-1].item() ** (-num / (num - 1)), 1),
    }


def _rename(name: str, indices: int) -> str:
    """Return our name of a tensor; a block has `indices` indices there, with its dropout."""
    module, head, *suffix = name.split(".")
    if module == "prefix_embeding_layer":
        return f"prefix.{name.removeprefix(f'{module}.').removeprefix('layers.0.')}"
    if module == "hydra_lm_head":
        return f"head.{head}.{suffix[-1]}"
    return ".".join(["blocks", head, str(int(suffix[0]) // indices), *suffix[1:]])
