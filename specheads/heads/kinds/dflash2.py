"""DFlash 2: DFlash with convolutions inside a block, and a selector among each level's best tokens.

Source: z-lab/dflash, dflash/model.py; vllm-project/speculators 0.9, models/dflash2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from specheads.core.cpu.weight_layout import product
from specheads.core.drafter import Hidden, Nodes
from specheads.core.errors import InputError
from specheads.core.ranges import PositiveInt, Width
from specheads.heads.layers.attention import AttentionContext, LayerInputs, LlamaLayer
from specheads.heads.layers.block import BlockConfig, BlockHead, join_hidden, read_block

INPUT, OUTPUT = 0, 1
"""Indices of the kernels of a layer's inputs, and of its outputs."""
MARGIN = 30.0
"""Least difference between the logits of candidates and of other tokens. Those have almost no
probability, and trees with more branches than candidates still draft the likeliest ones first."""


@dataclass(kw_only=True, slots=True)
class Config(BlockConfig):
    """Settings of a DFlash 2 head; the defaults are the published ones."""

    conv_kernel_size: PositiveInt = 2
    """Number of slots that a convolution reads: a slot and those before it in its block."""
    conv_group_size: PositiveInt = 16
    """Number of channels that share a dynamic kernel. It divides the base's width."""
    selector_rank: Width = 256
    """Rank of the selector."""
    selector_top_k: PositiveInt = 16
    """Number of tokens with the largest logits of each level, among which the selector chooses."""


class BlockConvolution(nn.Module):
    """Causal convolutions within a block, of the inputs and of the outputs of attention or an MLP.

    Slot j becomes the sum over i of (base_i + delta_i(j)) x_{j - i}. delta depends on the inputs at
    slot j and has one number for each group of channels.
    """

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        size, group_size = config.conv_kernel_size, config.conv_group_size
        if width % group_size:
            raise InputError(
                f"head.conv_group_size must divide the width {width}, got {group_size}; set it"
            )
        self.num_slots, self.num_groups = config.num_slots, width // group_size
        # starts as the identity
        kernel = torch.zeros(2, size, width)
        kernel[:, 0] = 1.0
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(width, 2 * size * self.num_groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, values: Tensor, inputs: Tensor, side: int) -> Tensor:
        """Convolve values (batch, slot, width) by the kernels of a side that the inputs give."""
        base, groups, slots = self.base_kernel[side], self.num_groups, self.num_slots
        deltas = F.linear(inputs, self.kernel_projection.weight.chunk(2)[side])
        deltas = deltas.unflatten(-1, (len(base), groups, 1)).unflatten(1, (-1, slots))
        kernels = base.unflatten(-1, (groups, -1)) + deltas
        blocks = values.unflatten(-1, (groups, -1)).unflatten(1, (-1, slots))
        # the first slots of a block have fewer ones before them
        taps = [F.pad(blocks, (0, 0, 0, 0, tap, 0))[:, :, :slots] for tap in range(len(base))]
        return (kernels * torch.stack(taps, dim=3)).sum(3).flatten(-2).flatten(1, 2)


class ConvolvedLayer(LlamaLayer):
    """A Llama layer whose attention and MLP have a `BlockConvolution` each."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__(config, width)
        self.attention_conv = BlockConvolution(config, width)
        self.mlp_conv = BlockConvolution(config, width)

    def prepare(
        self, stream: Tensor, positions: Int[Tensor, "batch time"], embedded: Tensor | None = None
    ) -> LayerInputs:
        """Return the inputs of this layer, with the keys and values of their positions."""
        normed = self.input_layernorm(stream)
        inputs = self.attention_conv(normed, normed, INPUT)
        keys_values = self.self_attn.project_keys_values(inputs, positions)
        return LayerInputs(stream, inputs, positions, keys_values)

    def forward(self, inputs: LayerInputs, context: AttentionContext) -> Tensor:
        """Return the residual stream after this layer."""
        mixed = self.self_attn(inputs.attention, inputs.positions, context)
        normed = self.input_layernorm(inputs.stream)
        stream = inputs.stream + self.attention_conv(mixed, normed, OUTPUT)
        normed = self.post_attention_layernorm(stream)
        update = self.mlp(self.mlp_conv(normed, normed, INPUT))
        return stream + self.mlp_conv(update, normed, OUTPUT)


class CandidateSelector(nn.Module):
    """Scores <A_previous * H h, B_candidate>, with rows A and B of tokens and a matrix H."""

    def __init__(self, rank: int, width: int, vocab_size: int, drafted_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(drafted_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)


class Head(BlockHead):
    """A state is [h, a]: the hidden state of its level, and the previous token's row of A.

    Each level drafts from its `num_candidates` tokens with the largest logits of h; the selector
    adds its scores to them.
    """

    adds_to_base_logits = True
    layer_class = ConvolvedLayer

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.num_candidates = min(config.selector_top_k, self.drafted_size)
        self.candidate_selector = CandidateSelector(
            config.selector_rank, width, vocab_size, self.drafted_size
        )

    def node_states(
        self, hidden: Tensor, tokens: Nodes, summary: Tensor, level: int
    ) -> Float[Tensor, "batch node state"]:
        """Return the hidden states of a level, concatenated with the rows of previous tokens."""
        codebook = self.candidate_selector.predecessor_codebook
        return join_hidden(hidden, F.embedding(tokens, codebook))

    def logits(self, state: Hidden, level: int) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of a state of this level."""
        unary = product(state[..., : self.width], *self.projection(level))
        best, candidates = unary.topk(self.num_candidates)
        scores = (best + self._selector_scores(state, candidates)).to(unary.dtype)
        # no other token has a larger logit than the last candidate
        lowest = scores.amin(-1, keepdim=True) - MARGIN
        return (unary - best[..., -1:] + lowest).scatter(-1, candidates, scores)

    def candidate_logits(self, state: Hidden, level: int, best: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the candidates of rows, and the index of the best column."""
        hidden, (weight, bias) = state[:, : self.width], self.projection(level)
        with torch.no_grad():
            candidates = F.linear(hidden, weight.to(hidden.dtype), bias)
            candidates = candidates.topk(self.num_candidates).indices
            is_missing = (candidates != best[:, None]).all(-1)
            candidates[:, -1] = torch.where(is_missing, best, candidates[:, -1])
        # the rows of the weight for all candidates are large: the backward pass reads them again
        unary: Any = checkpoint(_multiply_rows, weight, candidates, hidden, use_reentrant=False)
        logits = unary + self._selector_scores(state, candidates)
        logits = logits if bias is None else logits + bias[candidates]
        return logits, (candidates == best[:, None]).int().argmax(-1)

    def _selector_scores(self, state: Tensor, candidates: Tensor) -> Tensor:
        selector = self.candidate_selector
        context = state[..., self.width :] * selector.hidden_projection(state[..., : self.width])
        return _multiply_rows(selector.successor_codebook, candidates, context)


def _multiply_rows(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    return (F.embedding(rows, table).to(values.dtype) @ values[..., None])[..., 0]


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead | None:
    """Read a folder of z-lab, SpecForge or speculators with a selector."""
    return read_block(Head, Config, config, tensors)
