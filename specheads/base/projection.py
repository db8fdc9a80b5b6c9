"""From final hidden states to a base's logits: the one way, for everybody who takes it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from specheads.base import lora
from specheads.core.weight_layout import product


@dataclass(frozen=True, slots=True)
class VocabularyProjection:
    """What turns a base's final hidden states into its logits, as its weights are now."""

    weight: Float[Tensor, "drafted width"]
    """One row a token; where an adapter is being trained, what both are together."""
    bias: Float[Tensor, " drafted"] | None = None
    """Added to the products; few bases have one."""
    scale: float = 1.0
    """Divisor of the logits (Granite). One leaves them as they are."""
    cap: float | None = None
    """Bound that the logits are squashed into (Gemma 2). None is no bound."""
    tokens: Int[Tensor, " drafted"] | None = None
    """Tokens that the rows stand for; None is the whole vocabulary, in order."""

    def __call__(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch drafted"]:
        """Return the logits of final hidden states; gradients flow to those where they are on."""
        return self.finish(product(hidden, self.weight, self.bias))

    def finish(self, products: Float[Tensor, "*batch drafted"]) -> Float[Tensor, "*batch drafted"]:
        """Scale and cap what the matrix and the bias gave, in the base's own order."""
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
        """The matrix whose product with a hidden state is the uncapped logits: heads borrow it."""
        return self.weight if self.scale == 1.0 else self.weight / self.scale


def projection_of(config: Any, weight: Tensor, bias: Tensor | None = None) -> VocabularyProjection:
    """Return the projection of a base from its matrix and bias; its text settings say the rest."""
    scale = float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return VocabularyProjection(weight, bias, scale, float(cap) if cap else None)


def vocabulary_projection(model: PreTrainedModel) -> VocabularyProjection:
    """Return the projection of a model, an adapter that is being trained included."""
    layer: Any = model.get_output_embeddings()
    weight, bias = lora.whole_weight(layer), getattr(layer, "bias", None)
    return projection_of(model.config.get_text_config(), weight, bias)
