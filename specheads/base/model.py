"""The frozen base: load it, read text and verify trees with it."""

import weakref
from collections import deque
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base import lora
from specheads.base.cache import KVCache, RowCache, Slab
from specheads.base.ends import BaseEnds, absolute_folder
from specheads.base.experts import choose_experts
from specheads.base.forward import AuxLayers, Forwards, Verification
from specheads.base.loading import load_model
from specheads.base.paged import BlockPool
from specheads.base.recurrent import MEMORY_COPIES
from specheads.base.selfcheck import check, check_exact
from specheads.base.sharding import Sharding
from specheads.core.cpu.weight_layout import optimise_for_few_rows
from specheads.core.features import Features
from specheads.core.machine import refuse_bytes
from specheads.core.tree import TokenTree


class FrozenBase(BaseEnds):
    """A causal language model of transformers, unmodified, in eval mode and without gradients.

    Its attention must take a 4D mask, and its state must be keys and values; a ValueError is raised
    otherwise. docs/bases.md describes `compile`, docs/losslessness.md `exact`. `prepare=False` is
    for a model that another base has frozen and checked.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "",
        revision: str = "main",
        compile: bool | None = None,
        exact: bool = False,
        prepare: bool = True,
    ) -> None:
        super().__init__(model, tokenizer, name=name, revision=revision)
        self.forwards = Forwards(model)
        self.windows = self.forwards.windows
        self._spare: deque[Slab] = deque(maxlen=1)
        self.spare_recordings = weakref.WeakKeyDictionary[Any, deque[Any]]()
        """Unused recordings of the drafts of each drafter: see decoding/recorded.py."""
        if prepare:
            model.eval().requires_grad_(False)
            optimise_for_few_rows(model)
            choose_experts(model, self.forwards.experts)
            check(self.forwards)
        if exact:
            check_exact(self.forwards, compile=bool(compile))
        if compile or (compile is None and model.device.type == "cuda"):
            self.forwards.compile(kernels=bool(compile))

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
        compile: bool | None = None,
        exact: bool = False,
    ) -> "FrozenBase":
        """Load a base from a folder, the Hub or a GGUF file; code of a checkpoint never runs.

        Arguments are those of `loading.load_model` and of the class. `adapter` is the folder or Hub
        id of a LoRA adapter to merge. All processes of a `Sharding` call this together.
        """
        loaded, tokenizer = load_model(
            str(model), revision=revision, dtype=dtype, device=device, attention=attention
        )
        if adapter:
            lora.merge(loaded, adapter)
        sharding = device if isinstance(device, Sharding) else None
        if sharding:
            sharding.apply(loaded)
            # a part of a base verifies nothing
            compile = False
        name = str(model)
        base = cls(loaded, tokenizer, name=name, revision=revision, compile=compile, exact=exact)
        base.location = absolute_folder(loaded.name_or_path or "")
        base.adapter = absolute_folder(adapter)
        base.sharding = sharding
        return base

    def merge(self, adapter: str | Path) -> None:
        """Merge a LoRA adapter into the weights, permanently, unless it was merged last.

        Bind heads that borrow the base's tensors after this.
        """
        if self.has_merged(adapter):
            return
        lora.merge(self.model, adapter)
        optimise_for_few_rows(self.model)
        self.forwards.num_merges += 1
        self.adapter = absolute_folder(adapter)

    def has_merged(self, adapter: str | Path) -> bool:
        """Return whether this adapter was merged last; different paths to it count as the same."""
        return self.adapter == absolute_folder(adapter)

    @property
    def description(self) -> str:
        """What messages call this kind of base."""
        return "a sharded base" if self.sharding else "a base in this process"

    @property
    def decodes(self) -> bool:
        """Whether this process can generate text with it: it is whole in this process."""
        return self.sharding is None

    @property
    def exact(self) -> bool:
        """Whether `verify` gives each node bit for bit the result of decoding it alone."""
        return self.forwards.exact

    @property
    def static(self) -> bool:
        """Whether forwards need fixed shapes; each CUDA graph has one shape."""
        return self.forwards.graphs is not None

    def read(
        self,
        tokens: Int[Tensor, "batch time"],
        aux_layers: AuxLayers = (),
        document_ids: Int[Tensor, "batch time"] | None = None,
        *,
        gradients: bool = False,
    ) -> Features:
        """Return the features of whole texts: see `Forwards.read`."""
        return self.forwards.read(tokens, aux_layers, document_ids, gradients=gradients)

    def verify(self, tree: TokenTree, cache: RowCache, aux_layers: AuxLayers = ()) -> Verification:
        """Run all nodes of a tree in one forward: see `Forwards.verify`."""
        return self.forwards.verify(tree, cache, aux_layers)

    def prefill(
        self,
        tokens: Int[Tensor, "batch time"],
        cache: RowCache,
        counts: list[int],
        aux_layers: AuxLayers = (),
        chunk: int = 512,
    ) -> tuple[Float[Tensor, "batch vocab"], Features]:
        """Read and commit prompts of different lengths: see `Forwards.prefill`."""
        return self.forwards.prefill(tokens, cache, counts, aux_layers, chunk)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of `batch` rows with `capacity` slots each."""
        self.refuse_slots(batch * capacity, "lower max_batch or max_length, or take a pool")
        # exact verification of one node adds an absent one
        slots = capacity + self.exact
        if not self.static:
            return self.forwards.cache(batch, slots)
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
        num_layers, kinds = self.forwards.num_key_layers, self.forwards.kinds
        pool = num_layers, num_blocks, block_size, self.device, kinds
        return BlockPool(*pool, static=self.static)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        # layers of Gemma 4 differ in their heads
        layers: Any = getattr(self.config, "per_layer_config", [self.config] * self.num_layers)
        if self.forwards.kinds:
            pairs = zip(layers, self.forwards.kinds, strict=True)
            layers = [layer for layer, kind in pairs if kind.has_keys]
        return 2 * sum(map(self._channels, layers)) * self.dtype.itemsize

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, which belong to one path: it verifies chains only."""
        return bool(self.forwards.mixers)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one row's states, with the copies that a step makes."""
        if not self.has_states:
            return 0
        cache = self.forwards.cache(1, 1)
        self.forwards.prefill(torch.zeros(1, 1, dtype=torch.long, device=self.device), cache, [1])
        states = [layer.states().values() for layer in cache.recurrent]
        return MEMORY_COPIES * sum(state.nbytes for state in chain.from_iterable(states))

    def _channels(self, layer: Any) -> int:
        """Return the channels of a layer's keys, from its config."""
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        heads = 1 if getattr(layer, "multi_query", False) else heads
        return heads * (getattr(layer, "head_dim", None) or self.width // layer.num_attention_heads)

    def refuse_slots(self, slots: int, remedy: str) -> None:
        """Refuse more slots of keys and values than fit into the memory of the device."""
        cache = f"a cache of {slots:.4g} tokens"
        refuse_bytes(slots * self.slot_bytes, self.device, cache, remedy)
