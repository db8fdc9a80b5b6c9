"""Forwards of a base's own model: whole texts, trees, and prompts that are committed.

See docs/tree_verification.md.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from specheads.base import lora
from specheads.base.cache import KVCache, RowCache, upload
from specheads.base.compile import CompiledLayers, CudaGraphs
from specheads.base.document_attention import attending_documents
from specheads.base.masks import (
    attention_windows,
    context_length,
    document_mask,
    refuse_attention,
    tree_mask,
)
from specheads.base.projection import VocabularyProjection, vocabulary_projection
from specheads.base.tree_attention import DeferredCache, attending, reads_in_place, tree_block_mask
from specheads.core.errors import InputError
from specheads.core.features import Features, document_places
from specheads.core.tree import TokenTree

Forward = TypeVar("Forward", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Verification:
    """What one forward of the base says of every node of a tree."""

    logits: Float[Tensor, "batch node vocab"]
    features: Features
    ancestors: Bool[Tensor, "batch node node"]


def answer(
    model: PreTrainedModel, projection: VocabularyProjection, **inputs: Any
) -> tuple[Tensor, Any]:
    """Return the logits of every position and what the layers gave: the part that is compiled."""
    out = model.base_model(**inputs)
    return projection(out.last_hidden_state), out


def _alone(forward: Forward) -> Forward:
    """Have one thread at a time take this forward, of a model that is what it was."""

    @wraps(forward)
    def guarded(self: "Forwards", *args: Any, **settings: Any) -> Any:
        with self._lock:
            self._refuse_changed()
            return forward(self, *args, **settings)

    return cast(Forward, guarded)


class Forwards:
    """What a causal LM is asked: features of texts, verdicts on trees, and prompts committed.

    The model is not changed, and must be in eval mode. See `FrozenBase` for arguments and errors.
    Threads may share it, each with caches and engines of its own: forwards wait for one another.
    Torch's compiler belongs to one thread, so a compiled base refuses any but its first.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.windows = attention_windows(self.config)
        refuse_attention(self.config._attn_implementation)
        self.exact = False
        """Whether `verify` gives each node bit for bit what a step of its own would."""
        self._run: Callable[..., tuple[Tensor, Any]] = answer
        self._graphs: CudaGraphs | None = None
        self._layers: CompiledLayers | None = None
        self._weights = 0
        """How often weights moved: graphs know their addresses."""
        self._reader: Callable[..., Any] = model.base_model
        self._lock, self._owner = threading.RLock(), ""
        self._embedding: Any = model.get_input_embeddings()
        self._frozen = self._place()

    @cached_property
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

    def _place(self) -> tuple[torch.dtype, torch.device]:
        # one parameter of many, for this is asked at every step
        weight = self._embedding.weight
        return weight.dtype, weight.device

    def _refuse_changed(self) -> None:
        """Refuse a model whose owner changed it since, and a compiled one in another thread."""
        if self.model.training:
            raise InputError(
                "a base must be in eval mode, and its model is in training mode; call "
                "model.eval(), or keep a copy to train"
            )
        if (now := self._place()) != self._frozen:
            raise InputError(
                f"a base must stay as it was frozen, {self._frozen[0]} on {self._frozen[1]}, and "
                f"its model is {now[0]} on {now[1]}; move it back, or make a FrozenBase anew"
            )
        if self._run is not answer or self.static:
            here = threading.current_thread().name
            self._owner = self._owner or here
            if here != self._owner:
                raise InputError(
                    f"a compiled base serves one thread, {self._owner!r}, and {here!r} "
                    "asks it too; load one for each thread, or leave compile=true out"
                )

    @property
    def static(self) -> bool:
        """Whether forwards should look alike to a compiler: CUDA graphs know one shape each."""
        return self._graphs is not None

    @property
    def projection(self) -> VocabularyProjection:
        """The way from final hidden states to logits, as the weights are now."""
        return vocabulary_projection(self.model)

    def logits_of(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of final hidden states, with gradients for an adapter that learns.

        What an adapter adds to the projection it computes itself here, so that its matrices get
        gradients and its dropout is on while it learns; `projection` holds the sum fixed.
        """
        layer: Any = self.model.get_output_embeddings()
        if lora.adapts(layer):
            return self.projection.finish(layer(hidden))
        return self.projection(hidden)

    def compile_reads(self, **how: Any) -> None:
        """Have `read` run as a compiled graph, made by `torch.compile` with these arguments."""
        self._reader = torch.compile(self.model.base_model, **how)

    @_alone
    def read(
        self,
        tokens: Int[Tensor, "batch time"],
        aux_layers: tuple[int, ...] = (),
        document_ids: Int[Tensor, "batch time"] | None = None,
        *,
        gradients: bool = False,
    ) -> Features:
        """Read whole sequences from their first token, without logits and without a cache.

        The residual streams of `aux_layers` are read too; with `gradients` the features carry
        them to an adapter that is trained. Packed documents, numbered by `document_ids`, are read
        as if each stood alone; None reads each row as one text.
        """
        inputs: dict[str, Any] = {"input_ids": tokens.to(self.device), "use_cache": False}
        attending: AbstractContextManager[None] = nullcontext()
        if document_ids is not None:
            document_ids = document_ids.to(self.device)
            masks = {
                window: document_mask(document_ids, window, self.dtype)
                for window in set(self.windows.values())
            }
            inputs["attention_mask"] = self._by_kind(masks)
            inputs["position_ids"] = places = document_places(document_ids)
            attending = attending_documents(self.config, places, list(masks))
        with torch.set_grad_enabled(gradients), attending:
            return replace(
                self._features(inputs, aux_layers, self._reader), document_ids=document_ids
            )

    @torch.no_grad()
    @_alone
    def verify(
        self, tree: TokenTree, cache: RowCache, aux_layers: tuple[int, ...] = ()
    ) -> Verification:
        """Run every node of a tree in one forward, each seeing the committed text and its path.

        The keys and values stay in the cache's scratch until `cache.commit`. Without room for the
        tree it raises as `cache.reserve`, and nothing has changed.
        """
        if self.exact and tree.tokens.numel() == 1:
            return self._verify_lone(tree, cache, aux_layers)
        cache.reserve(tree.tokens.shape[1])
        return self._verify_reserved(tree, cache, aux_layers)

    def _verify_lone(
        self, tree: TokenTree, cache: RowCache, aux_layers: tuple[int, ...]
    ) -> Verification:
        """Verify one node beside an absent one: long sums of a lone row have their own order."""
        tokens, absent = tree.tokens.expand(-1, 2), tree.parents.new_full((1, 2), -1)
        cache.reserve(2, [1])
        both = self._verify_reserved(TokenTree(tokens, absent), cache, aux_layers)
        features = both.features.at(absent[:, :1] + 1)
        return Verification(both.logits[:, :1], features, both.ancestors[:, :1, :1])

    def _verify_reserved(
        self, tree: TokenTree, cache: RowCache, aux_layers: tuple[int, ...]
    ) -> Verification:
        ancestors = tree.ancestors()
        if self._graphs is not None and isinstance(cache, KVCache) and cache.static:
            key = (tree.tokens.shape, cache.end, aux_layers, self._weights)
            logits, hidden, aux = self._graphs(
                cache.slab.graphs,
                key,
                partial(self._forward, cache, aux_layers),
                (tree.tokens, ancestors),
            )
        else:
            logits, hidden, aux = self._forward(cache, aux_layers, tree.tokens, ancestors)
        assert logits is not None
        assert hidden is not None
        return Verification(logits, Features(hidden, aux, tree.tokens), ancestors)

    def _forward(
        self, cache: RowCache, aux_layers: tuple[int, ...], tokens: Tensor, ancestors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits, final hidden states and residual streams of a tree's nodes."""
        inputs = self._inputs(tokens, ancestors, ancestors.sum(-1) - 1, cache)
        if self._layers is not None and self._layers.layers and cache.static:
            return self._forward_compiled(inputs, cache, aux_layers)
        with attending(self.config, cache, exact=self.exact):
            logits, out = self._run(
                self.model, self.projection, **inputs, output_hidden_states=bool(aux_layers)
            )
        features = _features(out, tokens, aux_layers)
        return logits, features.hidden, features.aux

    def _forward_compiled(
        self, inputs: dict[str, Any], cache: RowCache, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self._layers is not None
        inputs["past_key_values"] = DeferredCache()
        with attending(self.config, cache, deferred=True), self._layers.active() as streams:
            logits, out = answer(self.model, self.projection, **inputs)
        # as transformers counts them: what each layer is given, and the final hidden states
        streams = [*streams, out.last_hidden_state]
        aux = torch.cat([streams[layer] for layer in aux_layers], -1) if aux_layers else None
        return logits, out.last_hidden_state, aux

    @torch.no_grad()
    @_alone
    def prefill(
        self,
        tokens: Int[Tensor, "batch time"],
        cache: RowCache,
        counts: list[int],
        aux_layers: tuple[int, ...] = (),
        chunk: int = 512,
    ) -> tuple[Float[Tensor, "batch vocab"], Features]:
        """Read and commit prompts of different lengths: by chunks, each a tree without branches.

        Row b counts its first `counts[b]` tokens, at least one; the padding on the right is never
        attended to. A forward reads at most `chunk` positions: masks and activations grow with it
        and not with the prompt. Returns the logits after each row's last token, and the features
        of every position. Errors are those of `verify`; the chunks before stay committed.
        """
        pieces = []
        for first in range(0, tokens.shape[1], chunk):
            piece = tokens[:, first : first + chunk]
            batch, length = piece.shape
            left = [min(max(count - first, 0), length) for count in counts]
            depths = torch.arange(length, device=tokens.device)
            ancestors = (depths[:, None] >= depths).expand(batch, -1, -1)
            cache.reserve(length, left)
            inputs = self._inputs(piece, ancestors, depths.expand(batch, -1), cache)
            with attending(self.config, cache):
                pieces.append(self._features(inputs, aux_layers))
            cache.commit([list(range(count)) for count in left])
        features = Features.consecutive(pieces)
        last = upload([count - 1 for count in counts], self.device)
        return self.projection(features.at(last[:, None]).hidden[:, 0]), features

    def _inputs(
        self, tokens: Tensor, ancestors: Tensor, depths: Tensor, cache: RowCache
    ) -> dict[str, Any]:
        """Return what the model is given: tokens, their masks and positions, and the cache."""
        masks = {
            window: tree_block_mask(ancestors, depths, cache, window)
            if reads_in_place(cache)
            else tree_mask(ancestors, depths, cache, window, self.dtype)
            for window in set(self.windows.values())
        }
        return {
            "input_ids": tokens,
            "attention_mask": self._by_kind(masks),
            # a tree may reach past the context at its end, with nodes never asked for
            "position_ids": (cache.positions[:, None] + depths).clamp(max=self.max_length - 1),
            "past_key_values": cache,
            "use_cache": True,
        }

    def _by_kind(self, masks: dict[int | None, Any]) -> Any:
        """Return the mask of each kind of layer: models of one kind take no more than that."""
        kinds = {kind: masks[window] for kind, window in self.windows.items()}
        return kinds if len(kinds) > 1 else next(iter(masks.values()))

    def _features(
        self,
        inputs: dict[str, Any],
        aux_layers: tuple[int, ...],
        run: Callable[..., Any] | None = None,
    ) -> Features:
        run = self.model.base_model if run is None else run
        out = run(**inputs, output_hidden_states=bool(aux_layers))
        return _features(out, inputs["input_ids"], aux_layers)


def _features(out: Any, tokens: Tensor, aux_layers: tuple[int, ...]) -> Features:
    streams = [out.hidden_states[layer] for layer in aux_layers]
    return Features(out.last_hidden_state, torch.cat(streams, -1) if streams else None, tokens)
