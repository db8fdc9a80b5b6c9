"""The ends of a base: tokenizer, embedding, final norm and vocabulary projection."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base import lora
from specheads.base.fingerprint import exact_fingerprint
from specheads.base.loading import load_model
from specheads.base.masks import context_length
from specheads.base.projection import VocabularyProjection, vocabulary_projection
from specheads.base.recurrent import refuse_unserved
from specheads.base.sharding import Sharding
from specheads.core.errors import InputError
from specheads.data.chat import turn_end_ids

MEDIA = re.compile("(image|video|audio)_token_(id|index)")
"""Settings of multimodal models that name the token in place of a picture, video or sound."""
FINAL_NORMS = (
    *("norm", "ln_f", "final_layernorm", "final_layer_norm", "layer_norm"),
    *("embedding_norm", "norm_f"),
)
"""Names of the norm after the last layer."""


class BaseEnds(ABC):
    """What is before and after the layers of a causal language model, and facts about it.

    Heads borrow its tensors. `FrozenBase` has the layers too; a server has those of `ServedBase`.
    """

    sharding: Sharding | None = None
    """How its layers are sharded over processes; None if they are not."""
    adapter = ""
    """Folder or Hub id of the LoRA adapter that was merged last."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "",
        revision: str = "main",
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name, self.revision = name, revision
        self.location = absolute_folder(name)
        """Absolute folder or Hub id that other programs can load from anywhere."""
        self.config = model.config.get_text_config()
        self.width: int = self.config.hidden_size
        """Width of the final hidden state."""
        self.vocab_size = self.projection.weight.shape[0]
        """Rows of the vocabulary projection, including padding rows."""
        self.num_layers: int = self.config.num_hidden_layers
        """Number of layers of the whole base."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What messages call this kind of base."""

    @property
    def decodes(self) -> bool:
        """Whether this process can generate text with it."""
        return False

    @cached_property
    def max_length(self) -> int:
        """Length of its context; see `masks.context_length`."""
        return context_length(self.config)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return self.model.dtype

    @property
    def embedding(self) -> Float[Tensor, "vocab width"]:
        """The input embedding, for heads that borrow it."""
        return cast(nn.Embedding, self.model.get_input_embeddings()).weight

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return final_norm(self.model)

    @property
    def projection(self) -> VocabularyProjection:
        """The projection from final hidden states to logits, with the current weights."""
        return vocabulary_projection(self.model)

    def logits_of(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of final hidden states, with gradients for an adapter in training."""
        # `projection` has the merged matrix, without gradients
        layer: Any = self.model.get_output_embeddings()
        if lora.adapts(layer):
            return self.projection.finish(layer(hidden))
        return self.projection(hidden)

    def tokenizer_for(self, purpose: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which `purpose` needs; refuse a base without one."""
        if self.tokenizer is None:
            raise InputError(
                f"{purpose} needs a base with a tokenizer, got {self.name!r:.200}; add its files"
            )
        return self.tokenizer

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the generation config and the chat template; may be empty."""
        ids = (self.model.generation_config or self.config).eos_token_id
        text_ends = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
        return tuple(dict.fromkeys([*text_ends, *self._turn_ends]))

    @cached_property
    def _turn_ends(self) -> tuple[int, ...]:
        return turn_end_ids(self.tokenizer)

    @cached_property
    def media_ids(self) -> dict[int, str]:
        """Tokens that stand for pictures, videos and sounds, with the settings that name them."""
        settings = self.model.config.to_dict().items()
        return {id: name for name, id in settings if MEDIA.fullmatch(name) and type(id) is int}

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and the vocabulary: see fingerprint.py."""
        return exact_fingerprint(self.model, self.tokenizer)


class ServedBase(BaseEnds):
    """The ends of a base whose layers are at a server, which gives their hidden states."""

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str = "main",
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "sdpa",
    ) -> "ServedBase":
        """Load no layer of a base; the arguments are those of `loading.load_model`."""
        name = str(model)
        loaded, tokenizer = load_model(
            name, revision=revision, dtype=dtype, device=device, attention=attention, ends_only=True
        )
        refuse_unserved(loaded.config.get_text_config())
        loaded.eval().requires_grad_(False)
        base = cls(loaded, tokenizer, name=name, revision=revision)
        base.location = absolute_folder(loaded.name_or_path or "")
        return base

    @property
    def description(self) -> str:
        """What messages call this kind of base."""
        return "a base at a server"

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time width"]:
        """Return the stream before the first layer."""
        # what reaches the final norm has every scale that the architecture gives an embedding
        with last_stream(self.model) as streams:
            self.model.get_decoder()(input_ids=tokens.to(self.device), use_cache=False)
        return streams[0]


def absolute_folder(source: str | Path) -> str:
    """Return the absolute path of a folder, or a Hub id unchanged."""
    return str(Path(source).resolve() if source and Path(source).is_dir() else source)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm after the last layer."""
    children = dict(model.get_decoder().named_children())
    norm = next((children[name] for name in FINAL_NORMS if name in children), None)
    if norm is None:
        config: Any = model.config.get_text_config()
        raise InputError(
            f"a head that reads the last of {config.num_hidden_layers} layers needs a base whose "
            f"final norm is called {' or '.join(FINAL_NORMS)}, and {config.model_type!r} has none; "
            "choose other aux_layers"
        )
    return norm


@contextmanager
def last_stream(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list that a forward in this context fills with the stream after all layers."""
    # the last hidden states of transformers are those after the final norm
    streams: list[Tensor] = []

    def store(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # NanoChat norms its embedding with the same module
        streams[:] = inputs[:1]

    hook = final_norm(model).register_forward_pre_hook(store)
    try:
        yield streams
    finally:
        hook.remove()
