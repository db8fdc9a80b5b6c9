"""The frozen base: load it, read text and verify trees with it."""

import re
import weakref
from collections import deque
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base import lora
from specheads.base.cache import KVCache, Slab
from specheads.base.compile import CompiledLayers, CudaGraphs, compiled
from specheads.base.experts import choose_experts
from specheads.base.fingerprint import exact_fingerprint
from specheads.base.forward import Forwards, answer
from specheads.base.loading import load_model
from specheads.base.paged import BlockPool
from specheads.base.selfcheck import check, check_exact
from specheads.base.sharding import Sharding
from specheads.core.errors import InputError
from specheads.core.machine import refuse_bytes
from specheads.core.weight_layout import for_few_rows
from specheads.data.chat import turn_end_ids

MEDIA = re.compile("(image|video|audio)_token_(id|index)")
"""Settings of multimodal models that name the token in place of a picture, video or sound."""


class FrozenBase(Forwards):
    """A causal language model of transformers, unmodified, in eval mode and without gradients.

    Its attention must take a 4D mask, and its state must be keys and values; a ValueError is raised
    otherwise. docs/bases.md describes `compile`, docs/losslessness.md `exact`. `owned` freezes and
    checks the model, which may have been done before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "",
        revision: str = "main",
        compile: bool = False,
        exact: bool = False,
        owned: bool = True,
    ) -> None:
        super().__init__(model)
        self.tokenizer, self.name, self.revision, self.adapter = tokenizer, name, revision, ""
        self.sharding: Sharding | None = None
        """How its layers are sharded over processes; None if they are not."""
        self.place = name
        """Folder or Hub id that other programs can load; differs from the name for GGUF only."""
        if owned:
            model.eval().requires_grad_(False)
            for_few_rows(model)
            choose_experts(model, self.experts)
            check(self)
        if exact:
            check_exact(self, compile=compile)
        if compile and self.device.type == "cuda":
            self._graphs, self._layers = CudaGraphs(), CompiledLayers(model)
        elif compile:
            self._compiled_answer = compiled(answer)
        self._spare: deque[Slab] = deque(maxlen=1)
        self.width: int = self.config.hidden_size
        """Width of the final hidden state."""
        self.vocab_size = self.projection.weight.shape[0]
        """Rows of the vocabulary projection, including padding rows."""
        self.num_layers: int = self.config.num_hidden_layers
        """Number of layers with keys and values."""

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str = "main",
        dtype: str = "auto",
        device: str | Sharding = "auto",
        attention: str = "sdpa",
        adapter: str | Path = "",
        compile: bool = False,
        exact: bool = False,
        ends_only: bool = False,
    ) -> "FrozenBase":
        """Load a base from a folder, the Hub or a GGUF file; code of a checkpoint never runs.

        Arguments are those of `loading.load_model` and of the class. `adapter` is the folder or Hub
        id of a LoRA adapter to merge. All processes of a `Sharding` call this together. With
        `ends_only` no layer is loaded, and training takes hidden states from a server.
        """
        if ends_only and (adapter or compile or exact):
            raise InputError(
                "a base without layers takes no adapter, compile or exact; leave them out, and "
                "merge an adapter with peft"
            )
        loaded, tokenizer = load_model(
            str(model),
            revision=revision,
            dtype=dtype,
            device=device,
            attention=attention,
            ends_only=ends_only,
        )
        if adapter:
            lora.merge(loaded, adapter)
        if isinstance(device, Sharding):
            device.apply(loaded)
        loaded.eval().requires_grad_(False)
        how: Any = {"compile": compile, "exact": exact, "owned": not ends_only}
        base = cls(loaded, tokenizer, name=str(model), **how)
        base.has_layers = not ends_only
        base.place, base.adapter, base.revision = loaded.name_or_path, _placed(adapter), revision
        base.sharding = device if isinstance(device, Sharding) else None
        return base

    def merge(self, adapter: str | Path) -> None:
        """Merge a LoRA adapter into the weights, permanently, unless it was merged last.

        Bind heads that borrow the base's tensors after this.
        """
        if self.holds(adapter):
            return
        lora.merge(self.model, adapter)
        for_few_rows(self.model)
        self._weights += 1
        self.adapter = _placed(adapter)

    def holds(self, adapter: str | Path) -> bool:
        """Return whether this adapter was merged last; different paths to it count as the same."""
        return self.adapter == _placed(adapter)

    def tokenizer_for(self, what: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which `what` needs; refuse a base without one."""
        if self.tokenizer is None:
            raise InputError(
                f"{what} needs a base with a tokenizer, got {self.name!r:.200}; add its files"
            )
        return self.tokenizer

    @property
    def decodes(self) -> bool:
        """Whether one process can generate text with it: it is whole in this process."""
        return self.has_layers and self.sharding is None

    @property
    def where(self) -> str:
        """What messages call a base that does not decode."""
        return "a sharded base" if self.sharding else "a base at a server"

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the generation config and the chat template; may be empty."""
        ids = (self.model.generation_config or self.config).eos_token_id
        known = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
        return tuple(dict.fromkeys([*known, *self._turn_ends]))

    @cached_property
    def _turn_ends(self) -> tuple[int, ...]:
        return turn_end_ids(self.tokenizer)

    @cached_property
    def media_ids(self) -> dict[int, str]:
        """Tokens that stand for pictures, videos and sounds, with the settings that name them."""
        settings = self.model.config.to_dict().items()
        return {id: name for name, id in settings if MEDIA.fullmatch(name) and type(id) is int}

    @property
    def embedding(self) -> Tensor:
        """The input embedding (vocab, width), for heads that borrow it."""
        return cast(torch.nn.Embedding, self.model.get_input_embeddings()).weight

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and the vocabulary: see fingerprint.py."""
        return exact_fingerprint(self.model, self.tokenizer)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of `batch` rows with `capacity` slots each."""
        self.refuse_slots(batch * capacity, "lower max_batch or max_length, or take a pool")
        # exact verification of one node adds an absent one
        slots = capacity + self.exact
        if not self.static:
            return KVCache(self.num_layers, batch, slots, self.device)
        slab = self._spare.pop() if self._spare else None
        if slab is not None and (slab.rows < batch or slab.capacity < slots):
            slab = None
        cache = KVCache(self.num_layers, batch, slots, self.device, static=True, slab=slab)
        # a run makes many caches: the next one reuses the memory and its CUDA graphs
        weakref.finalize(cache, self._spare.append, cache.slab).atexit = False
        return cache

    def pool(self, num_blocks: int, block_size: int = 16) -> BlockPool:
        """Return a block pool for paged caches of this base: `PagedKVCache(pool, batch)`."""
        self.refuse_slots(num_blocks * block_size, "lower num_blocks")
        return BlockPool(self.num_layers, num_blocks, block_size, self.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        # layers of Gemma 4 differ in their heads
        layers: Any = getattr(self.config, "per_layer_config", [self.config] * self.num_layers)
        return 2 * sum(map(self._channels, layers)) * self.dtype.itemsize

    def _channels(self, layer: Any) -> int:
        """Return the channels of a layer's keys, from its config."""
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        heads = 1 if getattr(layer, "multi_query", False) else heads
        return heads * (getattr(layer, "head_dim", None) or self.width // layer.num_attention_heads)

    def refuse_slots(self, slots: int, remedy: str) -> None:
        """Refuse more slots of keys and values than fit into the memory of the device."""
        what = f"a cache of {slots:.4g} tokens"
        refuse_bytes(slots * self.slot_bytes, self.device, what, remedy)


def _placed(adapter: str | Path) -> str:
    """Return the resolved path of a folder, or a Hub id unchanged."""
    return str(Path(adapter).resolve() if adapter and Path(adapter).is_dir() else adapter)
