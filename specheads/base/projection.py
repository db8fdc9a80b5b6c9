"""The vocabulary projection: the only code that turns final hidden states into logits."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from specheads.base import lora
from specheads.core.cpu.weight_layout import product


@dataclass(frozen=True, slots=True)
class VocabularyProjection:
    """Projection of a base's final hidden states to its logits, with the current weights."""

    weight: Float[Tensor, "drafted width"]
    """One row per token; includes an adapter in training."""
    bias: Float[Tensor, " drafted"] | None = None
    """Added to the products; few bases have one."""
    scale: float = 1.0
    """Divisor of the logits (Granite, Cohere, Falcon-H1). One has no effect."""
    cap: float | None = None
    """Soft cap of the logits (Gemma 2). None is no cap."""
    tokens: Int[Tensor, " drafted"] | None = None
    """Tokens of the rows; None is the whole vocabulary, in order."""

    def __call__(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch drafted"]:
        """Return the logits of final hidden states, with gradients if enabled."""
        return self.finish(product(hidden, self.weight, self.bias))

    def finish(self, products: Float[Tensor, "*batch drafted"]) -> Float[Tensor, "*batch drafted"]:
        """Scale and cap the output of the matrix and the bias, in the base's order."""
        logits = products if self.scale == 1.0 else products / self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def rows(self, tokens: Int[Tensor, " drafted"] | None) -> "VocabularyProjection":
        """Return the projection to these tokens only; None is all of them."""
        if tokens is None:
            return self
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias, tokens=tokens)

    @property
    @torch.no_grad()
    def scaled_weight(self) -> Float[Tensor, "drafted width"]:
        """The matrix that turns a hidden state into uncapped logits; heads borrow it."""
        return self.weight if self.scale == 1.0 else self.weight / self.scale

    @property
    @torch.no_grad()
    def scaled_bias(self) -> Float[Tensor, " drafted"] | None:
        """The bias of uncapped logits; heads borrow it with the matrix."""
        return self.bias if self.bias is None or self.scale == 1.0 else self.bias / self.scale


def projection_of(config: Any, weight: Tensor, bias: Tensor | None = None) -> VocabularyProjection:
    """Return the projection of a base from its matrix, its bias and its text config."""
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    scale = float(getattr(config, "logits_scaling", None) or 1.0) / float(factor or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return VocabularyProjection(weight, bias, scale, float(cap) if cap else None)


def vocabulary_projection(model: PreTrainedModel) -> VocabularyProjection:
    """Return the projection of a model, including an adapter in training."""
    layer: Any = model.get_output_embeddings()
    weight, bias = lora.whole_weight(layer), getattr(layer, "bias", None)
    return projection_of(model.config.get_text_config(), weight, bias)
