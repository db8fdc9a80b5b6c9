"""The frozen base: load it, read text with it, verify trees with it, and give it back unchanged."""

from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base import forward, lora
from specheads.base.cache import KVCache, RowCache
from specheads.base.compile import compiled
from specheads.base.fingerprint import exact_fingerprint
from specheads.base.forward import Verification
from specheads.base.freeze import freeze
from specheads.base.loading import eos_ids, load_model
from specheads.base.masks import attention_windows, context_length, refuse_attention
from specheads.base.paged import BlockPool
from specheads.base.projection import VocabularyProjection, logits_of, vocabulary_projection
from specheads.base.weight_layout import column_major
from specheads.core.features import Features
from specheads.core.tree import TokenTree


class FrozenBase:
    """A causal language model of transformers, unmodified, in eval mode and without gradients.

    `release`, or the end of a `with` block, gives the model back as it was.

    Args:
        model: Any causal LM whose attention takes a 4D mask and whose state is keys and values.
        tokenizer: Its tokenizer, where text has to be read or shown.
        name: What to call it in reports: a path or a Hub id.
        revision: The Hub revision it was loaded from.
        compile: Whether trees are verified by a compiled graph: see docs/compile.md.
        owned: Whether the model is frozen and tried first. False leaves one that was tried
            before as it is, for its owner, who has put it in eval mode.

    Raises:
        ValueError: The model keeps a state that cannot be rolled back, or its attention takes
            no mask, or its logits are not a function of the final hidden state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "",
        revision: str = "main",
        compile: bool = False,
        owned: bool = True,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name, self.revision, self.adapter = name, revision, ""
        self.config = model.config.get_text_config()
        self.windows = attention_windows(self.config)
        refuse_attention(self.config._attn_implementation)
        self._run = compiled(forward.answer, self.device) if compile else forward.answer
        self._give_back = freeze(model) if owned else None
        self.width: int = self.config.hidden_size
        """Width of the final hidden state."""
        self.vocab_size = self.projection.weight.shape[0]
        """Rows of the vocabulary projection, padding rows included."""
        self.num_layers: int = self.config.num_hidden_layers
        """Layers that keep keys and values."""
        self.max_length = context_length(self.config)
        """Positions of its context; see `masks.context_length`."""

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str = "main",
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "sdpa",
        adapter: str | Path = "",
        compile: bool = False,
    ) -> "FrozenBase":
        """Load a base from a folder or the Hub. Code that comes with a checkpoint is never run.

        Arguments are those of `loading.load_model` and of the class; `adapter` is the folder or
        Hub id of a LoRA adapter that is merged into the base, empty for none.

        Raises:
            ValueError: There is no such base or adapter, or they do not fit, or as the class.
        """
        loaded, tokenizer = load_model(
            str(model), revision=revision, dtype=dtype, device=device, attention=attention
        )
        base = cls(loaded, tokenizer, name=str(model), revision=revision, compile=compile)
        if adapter:
            base.merge(adapter)
        return base

    def merge(self, adapter: str | Path) -> None:
        """Add a LoRA adapter to the weights, for good: from here on this is another base.

        Heads that borrow the base's tensors have to be bound after this.

        Args:
            adapter: Folder or Hub id, in peft's layout.

        Raises:
            ValueError: There is no such adapter, or it does not fit.
        """
        lora.merge(self.model, adapter)
        column_major(self.model)
        self.adapter = str(adapter)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.model.dtype

    @property
    def num_parameters(self) -> int:
        """Its parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text; empty where the base names none."""
        return eos_ids(self.model)

    @property
    def embedding(self) -> Tensor:
        """The input embedding (vocab, width), for heads that borrow it."""
        return cast(torch.nn.Embedding, self.model.get_input_embeddings()).weight

    @property
    def projection(self) -> VocabularyProjection:
        """The way from final hidden states to logits, as the weights are now."""
        return vocabulary_projection(self.model)

    @property
    def static(self) -> bool:
        """Whether forwards should look alike to a compiler: CUDA graphs know one shape each."""
        return self._run is not forward.answer and self.device.type == "cuda"

    @property
    def fingerprint(self) -> str:
        """Hash of weights and vocabulary: see fingerprint.py."""
        return exact_fingerprint(self.model, self.tokenizer)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of `batch` rows with `capacity` slots each."""
        return KVCache(self.num_layers, batch, capacity, self.device, static=self.static)

    def pool(self, num_blocks: int, block_size: int = 16) -> BlockPool:
        """Return blocks for paged caches, `PagedKVCache(pool, batch)`, of this base."""
        return BlockPool(self.num_layers, num_blocks, block_size, self.device)

    def read(
        self,
        tokens: Int[Tensor, "batch time"],
        aux_layers: tuple[int, ...] = (),
        *,
        gradients: bool = False,
    ) -> Features:
        """Read whole sequences from their first token, without logits and without a cache.

        The residual streams of `aux_layers` are read too; with `gradients` the features carry
        them to an adapter that is trained.
        """
        with torch.set_grad_enabled(gradients):
            return forward.read(self.model, tokens.to(self.device), aux_layers)

    def logits_of(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Return the base's own logits; gradients flow, also to an adapter that learns."""
        return logits_of(self.model, hidden)

    def verify(
        self, tree: TokenTree, cache: RowCache, aux_layers: tuple[int, ...] = ()
    ) -> Verification:
        """Run every node of a tree in one forward, each seeing the committed text and its path.

        The keys and values stay in the cache's scratch until `cache.commit`.

        Raises:
            ValueError: The rows of a contiguous cache have no room for the tree.
            PoolFullError: The pool of a paged one has too few free blocks; nothing has changed.
        """
        # what is recorded for one shape would be recorded again for each length of such rows
        run = forward.answer if self.static and not cache.static else self._run
        return forward.verify(self.model, tree, cache, aux_layers, run)

    def prefill(
        self,
        tokens: Int[Tensor, "batch time"],
        cache: RowCache,
        counts: list[int],
        aux_layers: tuple[int, ...] = (),
        chunk: int = 512,
    ) -> tuple[Float[Tensor, "batch vocab"], Features]:
        """Read prompts of different lengths, padded on the right, and commit them.

        Row b counts its first `counts[b]` tokens. Returns the logits after each row's last one,
        and the features of every position. Arguments and errors as `forward.prefill`.
        """
        return forward.prefill(self.model, tokens, cache, counts, aux_layers, chunk)

    def release(self) -> None:
        """Give the model back: modes, gradient flags and strides are as they were."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> "FrozenBase":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
