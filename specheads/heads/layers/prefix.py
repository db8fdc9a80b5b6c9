"""Prefix attention of Hydra: a Llama layer over the base's final hidden states."""

from jaxtyping import Float
from torch import Tensor, nn

from specheads.core.features import Committed, Features
from specheads.heads.layers.attention import Attention, AttentionShape, GatedMlp, Slots
from specheads.heads.layers.common import RMSNorm


class PrefixLayer(nn.Module):
    """One layer and its norm; initialised to the norm alone, so that training starts from the base.

    Args:
        width: Width of the states.
        inner: Width of the MLP, as in `GatedMlp`.
        shape: Heads of its attention.
        epsilon: Epsilon of the norms.
    """

    def __init__(
        self, width: int, inner: int, shape: AttentionShape, epsilon: float = 1e-5
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, epsilon)
        self.self_attn = Attention(width, width, shape)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        self.mlp = GatedMlp(width, inner)
        self.norm = RMSNorm(width, epsilon)
        for closed in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(closed.weight)

    def forward(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the states of whole texts, with causal attention."""
        places = features.places()
        # with a bfloat16 base, the norms and sums of a float32 layer stay in float32
        hidden = features.hidden.to(self.norm.weight.dtype)
        normed = self.input_layernorm(hidden)
        past = self.self_attn.keys_values(normed, places)
        return self._rest(hidden, normed, places, past, features.visible())

    def newest(self, committed: Committed, memory: Slots) -> Float[Tensor, "batch 1 width"]:
        """Store the committed positions; return the state of the last one of each row."""
        hidden = committed.features.hidden
        normed = self.input_layernorm(hidden)
        places = memory.following(hidden.shape[1])
        memory.append(self.self_attn.keys_values(normed, places), committed.counts)
        newest = memory.lengths[:, None] - 1
        return self._rest(committed.last(hidden), committed.last(normed), newest, *memory.past())

    def _rest(self, hidden: Tensor, normed: Tensor, *attended: Tensor) -> Tensor:
        mixed = hidden + self.self_attn(normed, *attended)
        return self.norm(mixed + self.mlp(self.post_attention_layernorm(mixed)))
