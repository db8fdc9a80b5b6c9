"""The frozen base: load it, read text with it, verify trees with it, and never change it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base import lora
from specheads.base.cache import KVCache, RowCache, upload
from specheads.base.compile import compiled
from specheads.base.fingerprint import exact_fingerprint
from specheads.base.flex_attention import attending, reads_in_place, tree_block_mask
from specheads.base.loading import load_model
from specheads.base.masks import attention_windows, context_length, refuse_attention, tree_mask
from specheads.base.paged import BlockPool
from specheads.base.selfcheck import check
from specheads.base.weight_layout import column_major
from specheads.core.drafter import Features
from specheads.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verification:
    """What one forward of the base says of every node of a tree."""

    logits: Float[Tensor, "batch node vocab"]
    features: Features
    ancestors: Bool[Tensor, "batch node node"]


class FrozenBase:
    """A causal language model of transformers, unmodified, in eval mode and without gradients.

    Args:
        model: Any causal LM whose attention takes a 4D mask and whose state is keys and values.
        tokenizer: Its tokenizer, where text has to be read or shown.
        name: What to call it in reports: a path or a Hub id.
        revision: The Hub revision it was loaded from.
        compile: Whether trees are verified by a compiled graph: see docs/compile.md.

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
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name, self.revision = name, revision
        self.adapter = ""
        column_major(self.model)
        self.config = model.config.get_text_config()
        self.windows = attention_windows(self.config)
        refuse_attention(self.config._attn_implementation)
        self._heard: Tensor | None = None
        self._output_embedding().register_forward_pre_hook(self._listen)
        self._run: Callable[..., Any] = self.model
        check(self)
        if compile:
            self._run = compiled(self.model.forward, self.device)

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

        Args:
            model: Folder, or Hub id.
            revision: Hub revision; ignored for a folder.
            dtype: "float32", "float64", "bfloat16", "float16", or "auto": bfloat16 on CUDA and
                float32 elsewhere.
            device: A torch device, or "auto": CUDA where there is one.
            attention: "sdpa" or "eager".
            adapter: Folder or Hub id of a LoRA adapter that is merged into it; empty is none.
            compile: As the class.

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
    def width(self) -> int:
        """Width of the final hidden state."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary projection, padding rows included."""
        return self._output_embedding().weight.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.config.num_hidden_layers

    @property
    def max_length(self) -> int:
        """Positions of its context; see `masks.context_length`."""
        return context_length(self.config)

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
        settings = self.model.generation_config
        ids = settings.eos_token_id if settings is not None else self.config.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)

    @property
    def embedding(self) -> Tensor:
        """The input embedding (vocab, width), for heads that borrow it."""
        return cast(torch.nn.Embedding, self.model.get_input_embeddings()).weight

    @property
    def projection(self) -> Tensor:
        """The vocabulary projection (vocab, width), for heads that borrow it.

        Where an adapter is being trained, this is what both are together now.
        """
        return lora.whole_weight(self._output_embedding())

    @property
    def scaled_projection(self) -> Tensor:
        """The projection whose product with the final hidden state is the base's logits."""
        divisor = getattr(self.config, "logits_scaling", None)
        return self.projection / divisor if divisor else self.projection

    @property
    def static(self) -> bool:
        """Whether forwards should look alike to a compiler: CUDA graphs know one shape each."""
        return self._run is not self.model and self.device.type == "cuda"

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

        Args:
            tokens: The sequences.
            aux_layers: Layers whose residual stream is wanted too.
            gradients: Whether the features carry gradients, to an adapter that is trained.
        """
        with torch.set_grad_enabled(gradients):
            out = self.model.base_model(
                input_ids=tokens.to(self.device),
                use_cache=False,
                output_hidden_states=bool(aux_layers),
            )
        return Features(out.last_hidden_state, _aux_states(out, aux_layers), tokens)

    def logits(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Return the base's own logits with gradients, an adapter that is trained included."""
        return self._scale(self._output_embedding()(hidden))

    def project(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Return the base's own logits for final hidden states, scaled and capped as it does."""
        return self.projector()(hidden)

    def projector(
        self, tokens: Int[Tensor, " drafted"] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return what gives the base's own logits of these tokens for final hidden states.

        Args:
            tokens: Whose logits; None is the whole vocabulary.
        """
        weight, bias = self.projection, getattr(self._output_embedding(), "bias", None)
        if tokens is not None:
            weight, bias = weight[tokens], None if bias is None else bias[tokens]

        @torch.no_grad()
        def project(hidden: Tensor) -> Tensor:
            return self._scale(torch.nn.functional.linear(hidden, weight, bias))

        return project

    def _scale(self, logits: Tensor) -> Tensor:
        """Scale and cap as the base does after its vocabulary projection."""
        divisor = getattr(self.config, "logits_scaling", None)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if divisor:
            logits = logits / divisor
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.no_grad()
    def verify(
        self, tree: TokenTree, cache: RowCache, aux_layers: tuple[int, ...] = ()
    ) -> Verification:
        """Run every node of a tree in one forward, each seeing the committed text and its path.

        The keys and values stay in the cache's scratch until `cache.commit`.

        Raises:
            ValueError: The rows of a contiguous cache have no room for the tree.
            PoolFullError: The pool of a paged one has too few free blocks; nothing has changed.
        """
        ancestors = tree.ancestors()
        cache.reserve(tree.tokens.shape[1])
        # what is recorded for one shape would be recorded again for each length of such rows
        run = self.model if self.static and not cache.static else self._run
        out = self._forward(
            run, tree.tokens, ancestors, ancestors.sum(-1) - 1, cache, bool(aux_layers)
        )
        hidden, self._heard = self._heard, None
        assert hidden is not None
        features = Features(hidden, _aux_states(out, aux_layers), tree.tokens)
        return Verification(out.logits, features, ancestors)

    @torch.no_grad()
    def prefill(
        self,
        tokens: Int[Tensor, "batch time"],
        cache: RowCache,
        counts: list[int],
        aux_layers: tuple[int, ...] = (),
        chunk: int = 512,
    ) -> tuple[Float[Tensor, "batch vocab"], Features]:
        """Read prompts of different lengths, padded on the right, and commit them.

        Args:
            tokens: Prompts; row b counts its first `counts[b]` tokens, at least one.
            cache: Empty, or holding earlier text of the same rows.
            counts: Tokens of each row; the padding after them is never attended to.
            aux_layers: As in `verify`.
            chunk: Positions a forward reads at most: masks and activations grow with it and not
                with the prompt.

        Returns:
            The logits after each row's last token, and the features of every position.

        Raises:
            ValueError: As in `verify`.
            PoolFullError: As in `verify`; the chunks before stay committed.
        """
        pieces: list[Features] = []
        for first in range(0, tokens.shape[1], chunk):
            piece = tokens[:, first : first + chunk]
            batch, length = piece.shape
            left = [min(max(count - first, 0), length) for count in counts]
            depths = torch.arange(length, device=tokens.device)
            ancestors = (depths[:, None] >= depths).expand(batch, -1, -1)
            cache.reserve(length, left)
            out = self._forward(
                self.model.base_model,
                piece,
                ancestors,
                depths.expand(batch, -1),
                cache,
                bool(aux_layers),
            )
            pieces.append(Features(out.last_hidden_state, _aux_states(out, aux_layers), piece))
            cache.commit([list(range(count)) for count in left])
        features = Features.consecutive(pieces)
        last = upload([count - 1 for count in counts], self.device)
        return self.project(features.at(last[:, None]).hidden[:, 0]), features

    def _forward(
        self,
        model: Callable[..., Any],
        tokens: Tensor,
        ancestors: Tensor,
        depths: Tensor,
        cache: RowCache,
        with_aux: bool,
    ) -> Any:
        masks = {
            window: self._mask(ancestors, depths, cache, window)
            for window in set(self.windows.values())
        }
        by_type: Any = {kind: masks[window] for kind, window in self.windows.items()}
        with attending(self.config, cache):
            return model(
                input_ids=tokens,
                # models that mix kinds of layer take one mask a kind; the others take the mask
                attention_mask=by_type if len(by_type) > 1 else next(iter(masks.values())),
                # a tree may reach past the context at its end, with nodes never asked for
                position_ids=(cache.positions[:, None] + depths).clamp(max=self.max_length - 1),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=with_aux,
            )

    def _mask(
        self, ancestors: Tensor, depths: Tensor, cache: RowCache, window: int | None
    ) -> Tensor | BlockMask:
        if reads_in_place(cache):
            return tree_block_mask(ancestors, depths, cache, window)
        return tree_mask(ancestors, depths, cache, window, self.dtype)

    def _listen(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        """Keep what the vocabulary projection receives: the state every head is trained on."""
        del module
        self._heard = args[0].detach()

    def _output_embedding(self) -> Any:
        """Return a linear layer, or what an adapter has put round it."""
        return self.model.get_output_embeddings()


def _aux_states(out: Any, aux_layers: tuple[int, ...]) -> Tensor | None:
    return torch.cat([out.hidden_states[k] for k in aux_layers], dim=-1) if aux_layers else None
