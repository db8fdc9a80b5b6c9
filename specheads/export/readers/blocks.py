"""DFlash and DSpark in speculators' format, as vLLM and llama.cpp read it.

Sources: vLLM 0.32 models/qwen3_dflash.py, models/qwen3_dspark.py and
transformers_utils/configs/speculators; llama.cpp 0c1e5709 conversion/qwen.py,
src/models/dflash.cpp and common/speculative.cpp.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
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


def dflash(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Masks draft the tokens in whose place they stand, all layers seeing both ways."""
    config = read_config(folder)
    # vLLM takes False, and a setting that is missing in some versions, for causal layers
    need(config, speculators_model_type="dflash", sliding_window_non_causal=True)
    need(config, sample_from_anchor=False, block_size=depth + 1)
    _need_method(config, depth)
    yield from _draft(folder, config, base, depth, rank=0)


def dspark(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """The anchor drafts too if it is said, and each token's bias lies on the level after it."""
    config = read_config(folder)
    need(config, speculators_model_type="dspark", markov_head_type="vanilla")
    need(config, enable_confidence_head=True, confidence_head_with_markov=True)
    # missing, it is False to vLLM and True to speculators
    need(config, block_size=depth + (not config["sample_from_anchor"]))
    _need_method(config, depth)
    yield from _draft(folder, config, base, depth, rank=config["markov_rank"])


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
    weights = load_file(folder / "model.safetensors")
    markov = weights.get("markov_head.markov_w1.weight")
    yield from _draft(folder, config, base, depth, rank=0 if markov is None else markov.shape[1])


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
        self.embedding = stored.take("markov_head.markov_w1.weight", vocab, rank)
        self.out = stored.take("markov_head.markov_w2.weight", drafted, rank)
        self.sure = stored.take("confidence_head.proj.weight", 1, width + rank)
        self.bias = stored.take("confidence_head.proj.bias", 1)

    def corrected(self, said: Guess, states: Tensor, tokens: Tensor) -> Guess:
        """Return a guess after these tokens, and its confidence."""
        before = self.embedding[tokens]
        sure = torch.cat([states, before], dim=-1) @ self.sure[0] + self.bias
        return Guess(said.logits + before @ self.out.T, said.ids, sure)


def _draft(
    folder: Path, config: dict[str, Any], base: BaseView, depth: int, rank: int
) -> Iterator[Guess]:
    """Draft a block from every position of the text, one after the other."""
    layer, stored = config["transformer_layer_config"], Stored(folder / "model.safetensors")
    (vocab, width), epsilon = base.embedding.shape, layer["rms_norm_eps"]
    need(layer, model_type="qwen3", hidden_size=width, vocab_size=vocab, hidden_act="silu")
    need(layer, attention_bias=False)
    ids = config["aux_hidden_state_layer_ids"]
    if min(ids) < 0 or max(ids) >= len(base.streams) - 1:
        raise InputError(f"layers {ids} are not among those an engine hands on")
    aux = torch.cat([base.streams[one] for one in ids], dim=-1)
    fused = aux @ stored.take("fc.weight", width, aux.shape[1]).T
    fused = rms(fused, stored.take("hidden_norm.weight", width), epsilon)
    layers = [
        _Layer(stored, f"layers.{number}", layer, fused)
        for number in range(layer["num_hidden_layers"])
    ]
    norm = stored.take("norm.weight", width)
    tokens, head = _vocabulary(stored, config["draft_vocab_size"], base)
    markov = _Markov(stored, len(tokens), vocab, width, rank) if rank else None
    stored.close()
    before, found = [base.tokens.roll(-1 - level) for level in range(depth)], []
    for place, anchor in enumerate(before[0]):
        block = torch.full((config["block_size"],), config["mask_token_id"])
        block[0] = anchor
        stream = base.embedding[block]
        for one in layers:
            stream = one.forward(stream, place + 1)
        found.append(rms(stream[-depth:], norm, epsilon))
    for level, states in enumerate(torch.stack(found, dim=1)):
        said = Guess(states @ head.T, tokens)
        yield said if markov is None else markov.corrected(said, states, before[level])


def _vocabulary(stored: Stored, size: int, base: BaseView) -> tuple[Tensor, Tensor]:
    """Return the tokens that can be drafted and their projection: the base's own if it is all."""
    tokens = torch.arange(size)
    if size == len(base.embedding):
        return tokens, base.projection
    tokens = tokens + stored.take("d2t", size)
    if not torch.equal(stored.take("t2d", len(base.embedding)).nonzero()[:, 0], tokens):
        raise InputError("d2t and t2d must name the same tokens, in order")
    return tokens, stored.take("lm_head.weight", size, base.projection.shape[1])
