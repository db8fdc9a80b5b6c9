"""What DFlash and DSpark share, arXiv:2602.06036: a block of masks drafted in one forward."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specheads.core.drafter import Committed, Features, State
from specheads.core.errors import InputError
from specheads.heads.layers.attention import Attention, AttentionShape, GatedMlp, Slots
from specheads.heads.layers.block_config import BlockConfig
from specheads.heads.layers.embedding import BorrowingHead
from specheads.heads.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is drafted, and how much of it was handed out."""

    hidden: Float[Tensor, "batch depth width"]
    """What stands at each level, whatever is drafted on the way."""
    level: int
    """Level that was answered last."""
    states: Float[Tensor, "batch node answer"]
    """What answered for its nodes."""


class BlockLayer(nn.Module):
    """A Qwen3 layer over a block, whose attention sees the base's features as keys and values.

    Args:
        width: Width of the stream and of what is made of the features.
        inner: Width of the MLP, as `GatedMlp` takes it.
        shape: Heads of its attention.
        epsilon: Epsilon of its norms.
    """

    def __init__(self, width: int, inner: int, shape: AttentionShape, epsilon: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, epsilon)
        self.self_attn = Attention(width, width, shape)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        self.mlp = GatedMlp(width, inner)

    def forward(
        self,
        stream: Float[Tensor, "batch slot width"],
        positions: Int[Tensor, "batch slot"],
        past: Tensor,
        visible: Bool[Tensor, "batch query key"],
    ) -> Float[Tensor, "batch slot width"]:
        """Return the stream after this layer.

        Args:
            stream: Every slot of every block of a row.
            positions: Where the slots stand in the text.
            past: Keys and values that the attention made of the features.
            visible: What each slot may see, of those and then of all slots; slots may be one.
        """
        normed = self.input_layernorm(stream)
        seen = torch.cat([past, self.self_attn.keys_values(normed, positions)], dim=3)
        mixed = stream + self.self_attn(normed, positions, seen, visible)
        return mixed + self.mlp(self.post_attention_layernorm(mixed))


class BlockHead(BorrowingHead):
    """Fuses the base's features, and drafts a block from them and the anchor's embedding.

    The anchor is the token after the position that is drafted from: the base has chosen it and not
    read it. Masks stand behind it; all slots of a block see one another and every position before
    the anchor. The base's own projection, never trained, turns slots into logits.
    """

    def __init__(self, config: BlockConfig, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.depth, self.num_anchors = config.depth, config.num_anchors
        self.aux_layers = tuple(config.aux_layers)
        if not -1 <= config.mask_token < vocab_size:
            raise InputError(
                f"mask_token must be a token of the base, -1 to {vocab_size - 1}, got "
                f"{config.mask_token}; set head.mask_token"
            )
        self.mask_token = config.mask_token % vocab_size
        self.fc = nn.Linear((len(self.aux_layers) or config.num_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.epsilon)
        shape = AttentionShape.of(
            width,
            config.attention_heads,
            config.key_value_heads,
            config.head_dim,
            theta=config.rope_theta,
            norm_epsilon=config.epsilon,
        )
        self.layers = nn.ModuleList(
            BlockLayer(width, config.inner_dim, shape, config.epsilon)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(width, config.epsilon)

    def choose_aux_layers(self, num_layers: int) -> None:
        """Take as many layers as there are own ones, evenly from the second to the third last.

        A base too shallow for so many gives all but the last.
        """
        if self.aux_layers:
            return
        wanted = self.config.num_layers
        # engines cannot hand on what leaves the last layer before the final norm
        near, far = (2, num_layers - 2), (1, max(num_layers - 1, 1))
        first, last = near if num_layers - 4 >= wanted - 1 else far
        count = min(wanted, last - first + 1)
        steps = [index * (last - first) / max(count - 1, 1) for index in range(count)]
        middle = min(num_layers // 2 + 1, last)
        layers = [round(first + step) for step in steps] if count > 1 else [middle]
        self.config = replace(self.config, aux_layers=layers)
        self.aux_layers = tuple(layers)
        if count < wanted:
            self.fc = nn.Linear(
                count * self.width, self.width, bias=False, device=self.fc.weight.device
            )

    def answering(
        self, hidden: Float[Tensor, "batch time width"], tokens: Int[Tensor, "batch node"]
    ) -> Float[Tensor, "batch alike answer"]:
        """Return the states that answer after these tokens: here what stands at their level."""
        del tokens
        return hidden

    def states(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        anchors: Bool[Tensor, "batch time"] | None = None,
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Draft one block from each anchor; states elsewhere are zero."""
        marks = torch.ones_like(tokens, dtype=torch.bool) if anchors is None else anchors
        # rows with fewer anchors draft from other positions too, which nobody reads
        # shapes alone do not say how many: those from which a whole block fits
        fitting = min(self.num_anchors, marks.shape[1] - self.depth)
        most = fitting if marks.is_meta else int(marks.sum(1).max())
        at = marks.int().argsort(dim=1, descending=True, stable=True)[:, :most].sort(1).values
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        places = features.places().expand_as(tokens)
        fused = self._fuse(features)
        own = len(self._slots)
        visible = block_mask(features.visible().expand(len(tokens), -1, -1)[rows, at], own)
        stream = self._masked(tokens.roll(-1, 1)[rows, at]).flatten(1, 2)
        positions = (places[rows, at][..., None] + 1 + self._slots).flatten(1)
        for layer, attention in zip(self.layers, self._attentions, strict=True):
            past = attention.keys_values(fused, places)
            stream = layer(stream, positions, past, visible)
        hidden = self.norm(stream).unflatten(1, (most, own))[:, :, own - self.depth :]
        for level in range(self.depth):
            empty = hidden.new_zeros(*tokens.shape, self.width)
            found = empty.index_put((rows, at), hidden[:, :, level])
            yield self.answering(found, tokens.roll(-1 - level, 1))

    def memory(self, batch: int, capacity: int) -> Slots:
        """Return room for every layer's keys and values of committed positions."""
        return Slots.empty(self._attentions[0], batch, capacity, len(self._attentions))

    @torch.no_grad()
    def begin(
        self, committed: Committed, memory: Slots
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Commit every position's keys and values; draft the whole block behind the root."""
        fused = self._fuse(committed.features)
        places = memory.following(fused.shape[1])
        fresh = [attention.keys_values(fused, places) for attention in self._attentions]
        memory.append(torch.cat(fresh, dim=1), committed.counts)
        held, visible = memory.past()
        stream = self._masked(committed.root())[:, 0]
        positions = memory.lengths[:, None] + self._slots
        visible = nn.functional.pad(visible, (0, stream.shape[1]), value=True)
        for layer, past in zip(self.layers, held.chunk(len(self.layers), dim=1), strict=True):
            stream = layer(stream, positions, past, visible)
        return self._answer(self.norm(stream)[:, -self.depth :], 0, committed.root())

    @torch.no_grad()
    def extend(
        self, state: State, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], State]:
        """Hand out the next level, to each node by its own token and by nothing above that."""
        del parents
        return self._answer(state.hidden, state.level + 1, tokens)

    def _answer(self, hidden: Tensor, level: int, tokens: Tensor) -> tuple[Tensor, State]:
        states = self.answering(hidden[:, level : level + 1], tokens)
        logits = self.logits(states, level).expand(-1, tokens.shape[1], -1)
        return logits, Block(hidden, level, states.expand(-1, tokens.shape[1], -1))

    @property
    def _attentions(self) -> list[Attention]:
        layers = [layer for layer in self.layers if isinstance(layer, BlockLayer)]
        return [layer.self_attn for layer in layers]

    @property
    def _slots(self) -> Int[Tensor, " slot"]:
        """Return the slots of a block by their distance from the anchor."""
        slots = self.depth + (not self.config.sample_from_anchor)
        return torch.arange(slots, device=self.fc.weight.device)

    def _masked(self, roots: Int[Tensor, "batch anchor"]) -> Float[Tensor, "batch anchor slot d"]:
        """Return embeddings of blocks: each root, and masks for what is drafted behind it."""
        tokens = roots[..., None].expand(*roots.shape, len(self._slots))
        tokens = torch.where(self._slots == 0, tokens, self.mask_token)
        return self.embed(tokens, self.fc.weight)

    def _fuse(self, features: Features) -> Tensor:
        if features.aux is None:
            raise InputError(
                f"{self.kind} reads aux_layers, got none; read the base with "
                "aux_layers=head.aux_layers"
            )
        return self.hidden_norm(self.fc(features.aux))


def block_mask(
    visible: Bool[Tensor, "batch anchor time"], slots: int
) -> Bool[Tensor, "batch query key"]:
    """Return what slots see: what their anchor's position sees of the text, and their own block."""
    blocks = torch.arange(visible.shape[1] * slots, device=visible.device) // slots
    own = (blocks[:, None] == blocks).expand(len(visible), -1, -1)
    return torch.cat([visible.repeat_interleave(slots, dim=1), own], dim=2)
