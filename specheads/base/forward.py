"""Forwards of the base's model: whole texts, trees and prompts.

See docs/tree_verification.md.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from specheads.base.attention import (
    ARGUMENT,
    FIRST_INDEX,
    Attention,
    CountedAttention,
    GroupedAttention,
    LayerAttention,
    UnwrittenCache,
    attending,
    document_attention,
    repeat_mask,
)
from specheads.base.cache import KVCache, RowCache, upload
from specheads.base.compile import (
    CompiledLayers,
    Recorder,
    compile_forward,
    find_layers,
    map_tensors,
    pad_batch,
    padded_rows,
)
from specheads.base.ends import last_stream
from specheads.base.experts import double_tokens, experts_of
from specheads.base.masks import (
    additive,
    attention_windows,
    context_length,
    document_mask,
    refuse_attention,
    tree_mask,
)
from specheads.base.projection import VocabularyProjection, vocabulary_projection
from specheads.base.recurrent import (
    STATEFUL,
    Run,
    by_document,
    find_mixers,
    keeping_states,
    layer_kinds,
    running,
)
from specheads.core.cpu.exact_attention import ExactAttention
from specheads.core.errors import InputError
from specheads.core.features import Features, PackedDocuments, document_positions
from specheads.core.kernels import without_cudnn_attention
from specheads.core.tree import TokenTree

OUTPUTS_ONLY = ("mamba", "mamba2", "falcon_mamba")
"""Bases whose `hidden_states` are the outputs of the layers, without the input of the first."""
AuxLayers = tuple[int, ...]
"""Layers whose residual stream is read: k is the stream after k layers."""
TreeOutput = tuple[Tensor, Tensor, Tensor | None]
"""Logits, final hidden states and residual streams of a tree's nodes."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of one forward of the base over a tree."""

    logits: Float[Tensor, "batch node vocab"]
    features: Features
    ancestors: Bool[Tensor, "batch node node"]
    outputs: TreeOutput
    """Logits, hidden states and streams, with the further rows of a padded batch."""


def logits_and_output(
    model: PreTrainedModel, projection: VocabularyProjection, **inputs: Any
) -> tuple[Tensor, Any]:
    """Return the logits of every position and the output of the layers; this part is compiled."""
    output = model.base_model(**inputs)
    # the stream of Mamba-2 is in float32
    return projection(output.last_hidden_state.to(projection.weight.dtype)), output


class Forwards:
    """Forwards of a causal LM: features of texts, verification of trees, and prefill.

    The model must be in eval mode, and belongs to one thread: a forward replaces its attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.windows = attention_windows(model)
        """Sliding window of each kind of layer; None sees all."""
        refuse_attention(self.config._attn_implementation)
        self.kinds = layer_kinds(self.config)
        """What each layer keeps for a row; empty if all have keys and values only."""
        self.mixers = find_mixers(model, self.kinds)
        """The modules that write the states of recurrent layers."""
        self.experts = experts_of(model)
        """Modules with a mixture of experts, one per layer that has one."""
        self.exact = False
        """Whether `verify` gives each node bit for bit the result of decoding it alone."""
        self.num_merges = 0
        """Number of adapters merged since then: CUDA graphs depend on the addresses of weights."""
        self.compiled_answer: Callable[..., tuple[Tensor, Any]] | None = None
        self.graphs: Recorder | None = None
        self.compiled_layers: CompiledLayers | None = None

    def compile(self, *, kernels: bool = True) -> None:
        """Compile the following forwards of trees; on CUDA record them, with `kernels` compiled."""
        if self.kinds:
            reason = f"layers with keys and values only, and those of {self.config.model_type!r}"
            if kernels:
                raise InputError(f"compile=true needs {reason} keep states; leave compile out")
            warnings.warn(
                f"decoding without CUDA graphs: they need {reason} have states", stacklevel=3
            )
        elif self.model.device.type == "cuda":
            self.record("inductor" if kernels else None)
        else:
            self.compiled_answer = compile_forward(logits_and_output)

    def record(self, backend: str | None = None) -> None:
        """Record drafts and forwards of trees from now on; a CPU does so in tests only.

        The compiler's `backend` compiles the layers; None leaves them as they are.
        """
        self.graphs = Recorder()
        if self.count_attention_calls(plain=True) == self.config.num_hidden_layers:
            self.compiled_layers = find_layers(self.model, backend)

    @property
    def is_compiled(self) -> bool:
        """Whether forwards of trees are compiled."""
        return self.graphs is not None or self.compiled_answer is not None

    @torch.no_grad()
    def count_attention_calls(self, *, plain: bool = False) -> int:
        """Return how often the layers of one forward pass the argument of attention on.

        With `plain`, layers that add to their scores do not count.
        """
        attention, token = CountedAttention(plain), torch.zeros(1, 1, dtype=torch.long)
        token = token.to(self.model.device)
        inputs = {"input_ids": token, "position_ids": token, "use_cache": False}
        inputs["attention_mask"] = self._masks(
            partial(document_mask, token, dtype=self.model.dtype)
        )
        self._features(inputs, (), attention)
        return attention.num_calls

    def _refuse_training(self) -> None:
        if self.model.training:
            raise InputError(
                "a base must be in eval mode, got its model in training mode; call model.eval()"
            )

    def read(
        self,
        tokens: Int[Tensor, "batch time"],
        aux_layers: AuxLayers = (),
        document_ids: Int[Tensor, "batch time"] | None = None,
        *,
        gradients: bool = False,
    ) -> Features:
        """Return the features of whole sequences, with the residual streams of `aux_layers`.

        `gradients` lets them flow to an adapter in training. Packed documents do not see each
        other; without `document_ids` each row is one text.
        """
        self._refuse_training()
        inputs: dict[str, Any] = {"input_ids": tokens.to(self.model.device), "use_cache": False}
        attention = documents = None
        if document_ids is not None:
            document_ids = document_ids.to(self.model.device)
            mask = partial(document_mask, document_ids, dtype=self.model.dtype)
            positions = document_positions(document_ids)
            inputs |= {"attention_mask": self._masks(mask), "position_ids": positions}
            is_replaceable = self.config._attn_implementation == "sdpa"
            if is_replaceable and positions.device.type in ("cpu", "cuda"):
                # on CUDA this synchronises once
                documents = PackedDocuments.of(positions)
                attention = document_attention(documents, list(self.windows.values()))
            if self.kinds and documents is None:
                documents = PackedDocuments.of(positions)
        run = by_document(documents.lengths) if documents else None
        with torch.set_grad_enabled(gradients), self._running(run):
            features = self._features(inputs, aux_layers, attention)
            return replace(features, document_ids=document_ids, documents=documents)

    @torch.no_grad()
    def verify(self, tree: TokenTree, cache: RowCache, aux_layers: AuxLayers = ()) -> Verification:
        """Run all nodes of a tree in one forward; each sees the committed text and its path.

        Keys and values stay in the scratch of the cache until `cache.commit`.
        """
        self._refuse_training()
        if self.exact and tree.tokens.numel() == 1:
            return self._verify_lone(tree, cache, aux_layers)
        cache.reserve(tree.tokens.shape[1])
        return self._verify_reserved(tree, cache, aux_layers)

    def _verify_lone(self, tree: TokenTree, cache: RowCache, aux_layers: AuxLayers) -> Verification:
        """Verify one node next to an absent one: a single row is summed in another order."""
        tokens, absent = tree.tokens.expand(-1, 2), tree.parents.new_full((1, 2), -1)
        cache.reserve(2, [1])
        verification = self._verify_reserved(TokenTree(tokens, absent), cache, aux_layers)
        features = verification.features.gather(absent[:, :1] + 1)
        logits, ancestors = verification.logits[:, :1], verification.ancestors[:, :1, :1]
        return Verification(logits, features, ancestors, (logits, features.hidden, features.aux))

    def _verify_reserved(
        self, tree: TokenTree, cache: RowCache, aux_layers: AuxLayers
    ) -> Verification:
        ancestors, graphs = tree.ancestors(), self.graphs
        num_rows = len(tree.tokens)
        if graphs is None or not cache.static:
            outputs = self.forward_tree(cache, aux_layers, tree.tokens, ancestors)
        else:

            def forward(tokens: Tensor, ancestors: Tensor, *places: Tensor) -> TreeOutput:
                with cache.at(places):
                    return self.forward_tree(cache, aux_layers, tokens, ancestors)

            nodes = tree.tokens, ancestors
            if places := cache.places(padded_rows(num_rows)):
                nodes = pad_batch(nodes, num_rows)
            key = ("verification", cache.end, aux_layers, self.num_merges)
            outputs = graphs(cache.graphs, key, forward, (*nodes, *places), cache.buffers)
        logits, hidden, aux = map_tensors(lambda tensor: tensor[:num_rows], outputs)
        return Verification(logits, Features(hidden, aux, tree.tokens), ancestors, outputs)

    @torch.no_grad()
    def prefill(
        self,
        tokens: Int[Tensor, "batch time"],
        cache: RowCache,
        counts: list[int],
        aux_layers: AuxLayers = (),
        chunk: int = 512,
    ) -> tuple[Float[Tensor, "batch vocab"], Features]:
        """Read and commit prompts of different lengths, at most `chunk` positions per forward.

        The prompt of row b is its first `counts[b]` tokens, at least one; the rest is padding.
        Returns the logits after the last token of each row, and the features of every position.
        """
        self._refuse_training()
        pieces = []
        for first in range(0, tokens.shape[1], chunk):
            piece = tokens[:, first : first + chunk]
            batch, length = piece.shape
            num_left = [min(max(count - first, 0), length) for count in counts]
            depths = torch.arange(length, device=tokens.device)
            ancestors = (depths[:, None] >= depths).expand(batch, -1, -1)
            cache.reserve(length, num_left)
            inputs = self._inputs(piece, ancestors, depths.expand(batch, -1), cache)
            run = keeping_states(drafting=False, undo=min(num_left) < length)
            with without_cudnn_attention(self.model.device), self._running(run):
                pieces.append(self._features(inputs, aux_layers, GroupedAttention()))
            cache.commit([list(range(count)) for count in num_left])
        features = Features.concatenate(pieces)
        last = upload([count - 1 for count in counts], self.model.device)
        last_hidden = features.gather(last[:, None]).hidden[:, 0]
        return vocabulary_projection(self.model)(last_hidden), features

    def _features(
        self, inputs: dict[str, Any], aux_layers: AuxLayers, attention: Attention | None
    ) -> Features:
        """Return the features of every position; without `attention` it is transformers' own."""
        selected = attending(self.config, attention) if attention else nullcontext({})
        with selected as argument, self._last_stream(aux_layers) as last:
            output = self.model.base_model(
                **inputs, **argument, output_hidden_states=bool(aux_layers)
            )
        return self._select_features(output, inputs["input_ids"], aux_layers, last)

    def forward_tree(
        self,
        cache: RowCache,
        aux_layers: AuxLayers,
        tokens: Int[Tensor, "batch node"],
        ancestors: Bool[Tensor, "batch node node"],
    ) -> TreeOutput:
        """Return the outputs of a tree's nodes; a CUDA graph records this method."""
        layers, depths = self.compiled_layers, ancestors.sum(-1) - 1
        projection = vocabulary_projection(self.model)
        with without_cudnn_attention(self.model.device):
            if layers and isinstance(cache, KVCache) and cache.can_compile:
                inputs = self._inputs(tokens, ancestors, depths, cache, in_parts=cache.has_parts)
                return self._forward_compiled(layers, projection, inputs, cache, aux_layers)
            inputs = self._inputs(tokens, ancestors, depths, cache)
            run = self.compiled_answer or logits_and_output
            attention = GroupedAttention()
            if self.exact:
                attention = ExactAttention(ancestors, cache.row_lengths)
            doubled_tokens = double_tokens(self.experts if self.exact else [])
            selected = attending(self.config, attention)
            active = self._running(keeping_states(drafting=True, undo=True))
            last_stream = self._last_stream(aux_layers)
            with selected as argument, doubled_tokens, active, last_stream as last:
                logits, output = run(
                    self.model,
                    projection,
                    **inputs,
                    **argument,
                    output_hidden_states=bool(aux_layers),
                )
        features = self._select_features(output, tokens, aux_layers, last)
        return logits, features.hidden, features.aux

    def _forward_compiled(
        self,
        layers: CompiledLayers,
        projection: VocabularyProjection,
        inputs: dict[str, Any],
        cache: KVCache,
        aux_layers: AuxLayers,
    ) -> TreeOutput:
        # layers of another shape repeat the mask themselves
        group = self.config.num_attention_heads // cache.slab.stacks[0].shape[2]
        masks = inputs["attention_mask"]
        if isinstance(masks, dict):
            inputs["attention_mask"] = {kind: repeat_mask(masks[kind], group) for kind in masks}
        else:
            inputs["attention_mask"] = repeat_mask(masks, group)
        inputs[self.cache_argument] = UnwrittenCache()
        places = (*cache.next_slots(inputs["input_ids"].shape[1]), cache.lengths)
        attention = [
            {
                ARGUMENT: LayerAttention(
                    cache.slab.stacks[keys.stack],
                    cache.slab.stacks[values.stack],
                    keys.position + FIRST_INDEX,
                    values.position + FIRST_INDEX,
                    *places,
                )
            }
            for _, (keys, values) in sorted(cache.slab.locations.items())
        ]
        active, last_stream = layers.active(attention), self._last_stream(aux_layers)
        selected = attending(self.config, GroupedAttention())
        with selected, active as streams, last_stream as last:
            logits, output = logits_and_output(self.model, projection, **inputs)
        streams = [*streams, *last]
        aux = torch.cat([streams[layer] for layer in aux_layers], -1) if aux_layers else None
        return logits, output.last_hidden_state, aux

    def _inputs(
        self,
        tokens: Tensor,
        ancestors: Tensor,
        depths: Tensor,
        cache: RowCache,
        *,
        in_parts: bool = False,
    ) -> dict[str, Any]:
        """Return the model's inputs for nodes after committed text: tokens, masks, positions.

        With `in_parts`, a mask without a window is that of the nodes alone.
        """

        def mask(window: int | None) -> Tensor:
            if in_parts and window is None:
                return additive(ancestors, self.model.dtype)
            return tree_mask(ancestors, depths, cache, window, self.model.dtype)

        # the last levels of a tree may exceed the context; their nodes are never used
        positions = cache.positions[:, None] + depths
        return {
            "input_ids": tokens,
            "attention_mask": self._masks(mask),
            "position_ids": positions.clamp(max=self.max_length - 1),
            self.cache_argument: cache,
            "use_cache": True,
        }

    @cached_property
    def max_length(self) -> int:
        """Length of the model's context; see `masks.context_length`."""
        return context_length(self.config)

    @cached_property
    def cache_argument(self) -> str:
        """Name of the model's argument for its cache, which transformers 5.24 renamed."""
        parameters = signature(self.model.base_model.forward).parameters
        names = (name for name in ("cache", "cache_params") if name in parameters)
        return next(names, "past_key_values")

    def _masks(self, mask: Callable[[int | None], Tensor]) -> Any:
        """Return the mask of each kind of layer by its window, or the one of the only kind."""
        if self.kinds and not self.num_key_layers:
            # Mamba multiplies its input by any mask
            return None
        masks = {window: mask(window) for window in set(self.windows.values())}
        kinds = {kind: masks[window] for kind, window in self.windows.items()}
        if self.kinds:
            kinds |= dict.fromkeys(STATEFUL) if len(masks) > 1 else {}
        return kinds if len(kinds) > 1 else next(iter(masks.values()))

    @property
    def num_key_layers(self) -> int:
        """Number of layers with keys and values."""
        num_layers: int = self.config.num_hidden_layers
        return sum(kind.has_keys for kind in self.kinds) if self.kinds else num_layers

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of contiguous rows."""
        return KVCache(self.num_key_layers, batch, capacity, self.model.device, kinds=self.kinds)

    def _running(self, run: Run | None) -> Any:
        """Let mixers run so in this context."""
        return running(self.mixers, run) if run and self.mixers else nullcontext()

    def _last_stream(self, aux_layers: AuxLayers) -> Any:
        """Collect the stream after all layers if it is read; its hook costs a graph break."""
        is_read = self.config.num_hidden_layers in aux_layers
        return last_stream(self.model) if is_read else nullcontext([])

    def _select_features(
        self, output: Any, tokens: Tensor, aux_layers: AuxLayers, last: list[Tensor]
    ) -> Features:
        # numbered as in transformers: the input of each layer; then the stream after all layers
        streams = [*(output.hidden_states or ())[:-1], *last]
        if self.config.model_type in OUTPUTS_ONLY and aux_layers:
            streams = [self.model.get_input_embeddings()(tokens), *streams]
        streams = [streams[layer] for layer in aux_layers]
        hidden = output.last_hidden_state
        if any(stream.shape != hidden.shape for stream in streams):
            raise InputError(
                f"aux_layers need a base with one residual stream of {hidden.shape[-1]} channels, "
                f"got layers of shape {[*streams[0].shape]}; take a head without aux_layers"
            )
        aux = torch.cat(streams, -1) if streams else None
        if self.kinds:
            # the stream of Mamba-2 is in float32
            hidden, aux = (None if x is None else x.to(self.model.dtype) for x in (hidden, aux))
        return Features(hidden, aux, tokens)
