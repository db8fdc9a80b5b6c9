"""DFlash and DSpark: as vLLM and llama.cpp read speculators' format, SGLang their authors'.

Sources: vLLM 0.32 models/qwen3_dflash.py, models/qwen3_dspark.py and
transformers_utils/configs/speculators; llama.cpp 0c1e5709 conversion/qwen.py,
src/models/dflash.cpp and common/speculative.cpp; SGLang 0.5.23 models/dflash.py, models/dspark.py,
speculative/dflash_utils.py, speculative/dflash_worker_v2.py and speculative/dspark_components.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.export.readers import (
    BaseView,
    Guess,
    Stored,
    frequencies,
    read_config,
    rms,
    rotate,
    silu,
)
from specheads.export.readers import require as need

MARKOV = "markov_head.markov_w1.weight"


@dataclass(frozen=True, slots=True)
class _Said:
    """What a folder says of its network, wherever its format says it."""

    layer: dict[str, Any]
    """Settings of its Qwen3 layers."""
    streams: list[int]
    """What is fused: k is the residual stream after k layers."""
    slots: int
    """Slots of a block, the anchor's among them."""
    mask: int
    """Token that stands where one is to be drafted."""
    drafted: int
    """Number of tokens that can be drafted."""
    rank: int = 0
    """Width of the Markov head; 0 is none."""


def dflash(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Masks draft the tokens in whose place they stand, all layers seeing both ways."""
    config = read_config(folder)
    # vLLM takes False, and a setting that is missing in some versions, for causal layers
    need(config, speculators_model_type="dflash", sliding_window_non_causal=True)
    need(config, sample_from_anchor=False, block_size=depth + 1)
    _need_method(config, depth)
    yield from _draft(_stored(folder), _speculators(config), base, depth)


def dspark(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """The anchor drafts too if it is said, and each token's bias lies on the level after it."""
    config = read_config(folder)
    need(config, speculators_model_type="dspark", markov_head_type="vanilla")
    need(config, enable_confidence_head=True, confidence_head_with_markov=True)
    # missing, it is False to vLLM and True to speculators
    need(config, block_size=depth + (not config["sample_from_anchor"]))
    _need_method(config, depth)
    yield from _draft(_stored(folder), _speculators(config, config["markov_rank"]), base, depth)


def _speculators(config: dict[str, Any], rank: int = 0) -> _Said:
    """Return what is said in speculators' format, whose id k is the stream after k layers."""
    return _Said(
        config["transformer_layer_config"],
        config["aux_hidden_state_layer_ids"],
        config["block_size"],
        config["mask_token_id"],
        config["draft_vocab_size"],
        rank,
    )


def sglang_dflash(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """The anchor's own slot is always passed over, and counts as one of the block."""
    config = read_config(folder)
    need(config, architectures=["DFlashDraftModel"])
    yield from _draft(_stored(folder), _authors(config, depth + 1, base), base, depth)


def sglang_dspark(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Whether the anchor drafts stands at the top level only, where missing is True.

    block_size is the number of drafted tokens either way: a slot more is made where it does not.
    """
    config = read_config(folder)
    need(config, architectures=["Qwen3DSparkModel"], markov_head_type="vanilla")
    need(config, confidence_head_with_markov=True)
    said = _authors(config, depth, base)
    slots = depth + (not config.get("sample_from_anchor", True))
    said = replace(said, slots=slots, rank=config["markov_rank"])
    yield from _draft(_stored(folder), said, base, depth)


def _authors(config: dict[str, Any], size: int, base: BaseView) -> _Said:
    """Return what is said in the authors' formats, whose id v is the output of layer v.

    What dflash_config holds comes before what the top level does.
    """
    settings = config | config.get("dflash_config", {})
    # is_causal is for all layers; a missing block_size would be 16
    need(config, is_causal=None, layer_types=["full_attention"] * config["num_hidden_layers"])
    need(settings, block_size=size)
    ids = settings["target_layer_ids"]
    if min(ids) < 0:
        raise InputError(f"target_layer_ids count from the first layer, 0, got {ids}")
    streams = [one + 1 for one in ids]
    return _Said(config, streams, size, settings["mask_token_id"], len(base.embedding))


def _need_method(config: dict[str, Any], depth: int) -> None:
    need(config["speculators_config"]["proposal_methods"][0], speculative_tokens=depth)


def llama_cpp(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """A Markov head is one whose tensors are there; no layer sees one way unless it is said.

    Whether the anchor drafts is False where it is missing.
    """
    config = read_config(folder)
    need(config, architectures=["DSparkSpeculator"], is_causal=None, use_sliding_window=None)
    need(config, dflash_config=None, block_size=depth + (not config.get("sample_from_anchor")))
    if config.get("markov_head_type", "vanilla") != "vanilla":
        raise InputError("llama.cpp reads markov_head_type='vanilla' only")
    stored = _stored(folder)
    rank = stored.left[MARKOV].shape[1] if MARKOV in stored else 0
    yield from _draft(stored, _speculators(config, rank), base, depth)


def _stored(folder: Path) -> Stored:
    return Stored(folder / "model.safetensors")


class _Layer:
    """One Qwen3 layer, and what it makes of the base's features."""

    def __init__(self, stored: Stored, name: str, layer: dict[str, Any], fused: Tensor) -> None:
        width, self.size = layer["hidden_size"], layer["head_dim"]
        self.heads, self.shared = layer["num_attention_heads"], layer["num_key_value_heads"]
        self.epsilon = layer["rms_norm_eps"]
        self.turn = partial(rotate, *frequencies(layer, self.size))

        def take(part: str, *shape: int) -> Tensor:
            return stored.take(f"{name}.{part}.weight", *shape)

        self.norms = [take(f"{one}_layernorm", width) for one in ("input", "post_attention")]
        self.query, self.key, self.value = (
            take(f"self_attn.{part}_proj", count * self.size, width)
            for part, count in (("q", self.heads), ("k", self.shared), ("v", self.shared))
        )
        self.out = take("self_attn.o_proj", width, self.heads * self.size)
        self.query_norm, self.key_norm = (
            take(f"self_attn.{part}_norm", self.size) for part in ("q", "k")
        )
        inner = layer["intermediate_size"]
        self.gate, self.up = (take(f"mlp.{part}_proj", inner, width) for part in ("gate", "up"))
        self.down = take("mlp.down_proj", width, inner)
        self.past = self.keys_values(fused, torch.arange(len(fused)))

    def keys_values(self, read: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, one for each attention head."""
        keys = rms((read @ self.key.T).view(len(read), -1, self.size), self.key_norm, self.epsilon)
        values = (read @ self.value.T).view(len(read), -1, self.size)
        each = self.heads // self.shared
        turned = self.turn(keys, at)
        return turned.repeat_interleave(each, 1), values.repeat_interleave(each, 1)

    def forward(self, stream: Tensor, start: int) -> Tensor:
        """Go over a block whose anchor stands at `start`."""
        read, at = rms(stream, self.norms[0], self.epsilon), start + torch.arange(len(stream))
        queries = (read @ self.query.T).view(len(read), -1, self.size)
        queries = self.turn(rms(queries, self.query_norm, self.epsilon), at)
        keys, values = (
            torch.cat([past[:start], own])
            for past, own in zip(self.past, self.keys_values(read, at), strict=True)
        )
        scores = torch.einsum("thd,shd->hts", queries, keys) / math.sqrt(self.size)
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
        stream = stream + mixed.reshape(len(stream), -1) @ self.out.T
        read = rms(stream, self.norms[1], self.epsilon)
        return stream + (silu(read @ self.gate.T) * (read @ self.up.T)) @ self.down.T


class _Markov:
    """What the token before a level adds to it, and how sure it is then."""

    def __init__(self, stored: Stored, drafted: int, vocab: int, width: int, rank: int) -> None:
        self.embedding = stored.take(MARKOV, vocab, rank)
        self.out = stored.take("markov_head.markov_w2.weight", drafted, rank)
        self.sure = stored.take("confidence_head.proj.weight", 1, width + rank)
        self.bias = stored.take("confidence_head.proj.bias", 1)

    def corrected(self, guess: Guess, states: Tensor, tokens: Tensor) -> Guess:
        """Return a guess after these tokens, and its confidence."""
        before = self.embedding[tokens]
        sure = torch.cat([states, before], dim=-1) @ self.sure[0] + self.bias
        return Guess(guess.logits + before @ self.out.T, guess.ids, sure)


def _draft(stored: Stored, said: _Said, base: BaseView, depth: int) -> Iterator[Guess]:
    """Draft a block from every position of the text, one after the other."""
    layer = said.layer
    (vocab, width), epsilon = base.embedding.shape, layer["rms_norm_eps"]
    need(layer, model_type="qwen3", hidden_size=width, vocab_size=vocab, hidden_act="silu")
    need(layer, attention_bias=False)
    if min(said.streams) < 0 or max(said.streams) >= len(base.streams) - 1:
        raise InputError(f"streams {said.streams} are not among those an engine hands on")
    aux = torch.cat([base.streams[one] for one in said.streams], dim=-1)
    fused = aux @ stored.take("fc.weight", width, aux.shape[1]).T
    fused = rms(fused, stored.take("hidden_norm.weight", width), epsilon)
    layers = [
        _Layer(stored, f"layers.{number}", layer, fused)
        for number in range(layer["num_hidden_layers"])
    ]
    norm = stored.take("norm.weight", width)
    tokens, head = _vocabulary(stored, said.drafted, base)
    markov = _Markov(stored, len(tokens), vocab, width, said.rank) if said.rank else None
    stored.close()
    before, found = [base.tokens.roll(-1 - level) for level in range(depth)], []
    for place, anchor in enumerate(before[0]):
        block = torch.full((said.slots,), said.mask)
        block[0] = anchor
        stream = base.embedding[block]
        for one in layers:
            stream = one.forward(stream, place + 1)
        found.append(rms(stream[-depth:], norm, epsilon))
    for level, states in enumerate(torch.stack(found, dim=1)):
        guess = Guess(states @ head.T, tokens)
        yield guess if markov is None else markov.corrected(guess, states, before[level])


def _vocabulary(stored: Stored, size: int, base: BaseView) -> tuple[Tensor, Tensor]:
    """Return the tokens that can be drafted and their projection: the base's own if it is all."""
    tokens = torch.arange(size)
    if size == len(base.embedding):
        return tokens, base.projection
    tokens = tokens + stored.take("d2t", size)
    if not torch.equal(stored.take("t2d", len(base.embedding)).nonzero()[:, 0], tokens):
        raise InputError("d2t and t2d must name the same tokens, in order")
    return tokens, stored.take("lm_head.weight", size, base.projection.shape[1])
