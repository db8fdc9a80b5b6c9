"""DFlash, DFlash 2, Domino, DSpark: speculators' format in vLLM and llama.cpp, or the authors'.

Sources: vLLM 0.32 models/qwen3_dflash.py, models/qwen3_dflash2.py, models/qwen3_dspark.py and
transformers_utils/configs/speculators; llama.cpp 0c1e5709 conversion/qwen.py,
src/models/dflash.cpp and common/speculative.cpp; SGLang 0.5.23 models/dflash.py, models/dspark.py,
speculative/dflash_utils.py, speculative/dflash_worker_v2.py and speculative/dspark_components; for
Domino SGLang's main 00731f0b.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.export.write import LevelDraft
from tests.oracles.llama import Layer
from tests.oracles.shared import BaseView, Stored, read_config, rms, silu
from tests.oracles.shared import require as need

MARKOV = "markov_head.markov_w1.weight"
CONVOLVED = ("conv_kernel_size", "conv_group_size")
SELECTED = ("selector_rank", "selector_top_k")
CORRECTED = ("gru_hidden_dim", "emb_dim")
SINK = "add_swa_attention_sink_bias"


@dataclass(frozen=True, slots=True)
class _BlockSettings:
    """Settings of the network, from any of the formats."""

    layer: dict[str, Any]
    """Settings of its Qwen3 layers."""
    streams: list[int]
    """Residual streams that are fused; k is the stream after k layers."""
    slots: int
    """Slots of a block, including the anchor's."""
    mask: int
    """Mask token."""
    drafted: int
    """Size of the draft vocabulary."""
    rank: int = 0
    """Rank of the Markov head; 0 for a head without it."""


def dflash(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Each mask drafts the token at its own position; attention is bidirectional."""
    config = read_config(folder)
    # in vLLM False makes the layers causal
    need(config, speculators_model_type="dflash", sliding_window_non_causal=True)
    need(config, sample_from_anchor=False, block_size=depth + 1)
    _need_method(config, depth)
    yield from _draft(_stored(folder), _speculators(config), base, depth)


def dflash2(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """DFlash in another class: vLLM copies four settings into those of the authors' format."""
    config = read_config(folder)
    need(config, speculators_model_type="dflash2", sliding_window_non_causal=True)
    need(config, sample_from_anchor=False, block_size=depth + 1)
    _need_method(config, depth)
    settings = _speculators(config)
    layer = settings.layer | _own(config)
    yield from _draft(_stored(folder), replace(settings, layer=layer), base, depth)


def _own(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of DFlash 2; all are needed."""
    return {name: config[name] for name in (*CONVOLVED, *SELECTED)}


def dspark(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """With sample_from_anchor the anchor drafts; each token biases the next level."""
    config = read_config(folder)
    need(config, speculators_model_type="dspark", markov_head_type="vanilla")
    need(config, enable_confidence_head=True, confidence_head_with_markov=True)
    # the default is False in vLLM and True in speculators
    need(config, block_size=depth + (not config["sample_from_anchor"]))
    _need_method(config, depth)
    yield from _draft(_stored(folder), _speculators(config, config["markov_rank"]), base, depth)


def _speculators(config: dict[str, Any], rank: int = 0) -> _BlockSettings:
    """Return the settings of the speculators format; id k is the stream after k layers."""
    return _BlockSettings(
        config["transformer_layer_config"],
        config["aux_hidden_state_layer_ids"],
        config["block_size"],
        config["mask_token_id"],
        config["draft_vocab_size"],
        rank,
    )


def sglang_dflash(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """The anchor's slot never drafts, and block_size counts it."""
    config = read_config(folder)
    need(config, architectures=["DFlashDraftModel"])
    yield from _draft(_stored(folder), _authors(config, depth + 1, base), base, depth)


def sglang_dflash2(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """It reads the settings in dflash_config only."""
    config = read_config(folder)
    need(config, architectures=["DFlash2DraftModel"])
    settings = _authors(config, depth + 1, base)
    layer = settings.layer | _own(config["dflash_config"])
    yield from _draft(_stored(folder), replace(settings, layer=layer), base, depth)


def sglang_domino(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """DFlash whose anchor's slot drafts, with a GRU over the anchor and the drafted tokens.

    SGLang computes the last slot too, and drafts nothing from it.
    """
    config = read_config(folder)
    need(config, architectures=["DFlashDraftModel"])
    nested = config["dflash_config"]
    need(nested, projector_type="domino", shift_label=True, pure_draft_prefix_len=1)
    # at both places, with one value
    need(config, emb_dim=nested["emb_dim"])
    settings = _authors(config, depth, base)
    layer = settings.layer | {name: nested[name] for name in CORRECTED}
    yield from _draft(_stored(folder), replace(settings, layer=layer), base, depth)


def vllm_dflash(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """DFlash of the authors in vLLM: a window counts slots; `use_swa` is that of all layers."""
    config = read_config(folder)
    types = config["layer_types"]
    config["layer_types"] = ["full_attention"] * len(types)
    dflash_config = config["dflash_config"]
    selects = config["architectures"] == ["DFlash2DraftModel"]
    if not selects:
        need(config, architectures=["DFlashDraftModel"])
    settings = _authors(config, depth + 1, base)
    layer = config | {
        SINK: dflash_config.get("attention_sink_bias"),
        # by layer, or of all layers
        "causal": dflash_config.get("causal", [kind == "sliding_attention" for kind in types]),
        **(_own(dflash_config) if selects else {}),
    }
    layer["reaches"] = [
        config["sliding_window"] if kind == "sliding_attention" else None for kind in types
    ]
    if dflash_config.get("use_swa"):
        need(config, layer_types=types)
        layer["reaches"] = [dflash_config["swa_window_size"]] * len(types)
    yield from _draft(_stored(folder), replace(settings, layer=layer), base, depth)


def sglang_dspark(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """sample_from_anchor is read at the top level only, and its default is True.

    block_size is the number of drafted tokens; without anchor sampling there is one more slot.
    """
    config = read_config(folder)
    need(config, architectures=["Qwen3DSparkModel"], markov_head_type="vanilla")
    need(config, confidence_head_with_markov=True)
    settings = _authors(config, depth, base)
    slots = depth + (not config.get("sample_from_anchor", True))
    settings = replace(settings, slots=slots, rank=config["markov_rank"])
    yield from _draft(_stored(folder), settings, base, depth)


def _authors(config: dict[str, Any], size: int, base: BaseView) -> _BlockSettings:
    """Return the settings of the authors' formats; id v is the output of layer v.

    Values in dflash_config have priority over the top level.
    """
    settings = config | config.get("dflash_config", {})
    # is_causal applies to all layers; the default block_size is 16
    need(config, is_causal=None, layer_types=["full_attention"] * config["num_hidden_layers"])
    need(settings, block_size=size)
    ids = settings["target_layer_ids"]
    if min(ids) < 0:
        raise InputError(f"target_layer_ids count from the first layer, 0, got {ids}")
    streams = [number + 1 for number in ids]
    return _BlockSettings(config, streams, size, settings["mask_token_id"], len(base.embedding))


def transformers(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """MuseGlimmerAssistantModel, by its source in transformers 5.23; the default is a window."""
    config, stored = read_config(folder), _stored(folder)
    need(config, model_type="muse_glimmer_assistant")
    for name, encoder_name in (("fc", "fc"), ("hidden_norm", "output_norm_enc")):
        stored.left[f"{name}.weight"] = stored.left.pop(f"encoder.{encoder_name}.weight")
    # its layers are Qwen3's
    config["model_type"] = "qwen3"
    yield from _draft(stored, _authors(config, depth + 1, base), base, depth)


def _need_method(config: dict[str, Any], depth: int) -> None:
    need(config["speculators_config"]["proposal_methods"][0], speculative_tokens=depth)


def llama_cpp(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """The Markov head is optional, and its tensors decide; attention is bidirectional by default.

    The default of sample_from_anchor is False.
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


class _Layer(Layer):
    """One Qwen3 layer, with keys and values of the base's features."""

    def __init__(self, stored: Stored, name: str, layer: dict[str, Any], fused: Tensor) -> None:
        width = layer["hidden_size"]
        super().__init__(stored, name, layer, width)
        self.input_norm = stored.take(f"{name}.input_layernorm.weight", width)
        self.past = self.keys_values(fused, torch.arange(len(fused)))
        taps, group = (layer.get(key, 0) for key in CONVOLVED)
        index, causal = int(name.split(".")[-1]), layer.get("causal")
        self.causal = causal[index] if isinstance(causal, list) else causal
        self.reach = layer["reaches"][index] if "reaches" in layer else None
        sinks = f"{name}.self_attn.attention_sink_bias"
        self.sink = stored.take(sinks, self.heads) if layer.get(SINK) else None
        self.convolutions = [
            _Convolution(stored, f"{name}.{part}_conv", taps, group, width)
            for part in ("attention", "mlp")
            if taps
        ]

    def forward(self, stream: Tensor, start: int) -> Tensor:
        """Compute the layer for a block whose anchor is at position `start`."""
        inputs, at = rms(stream, self.input_norm, self.epsilon), start + torch.arange(len(stream))
        before = inputs
        if self.convolutions:
            inputs = self.convolutions[0](before, before, 0)
        keys, values = (
            torch.cat([past[:start], block])
            for past, block in zip(self.past, self.keys_values(inputs, at), strict=True)
        )
        scores = torch.einsum("thd,shd->hts", self.queries(inputs, at), keys) / math.sqrt(self.size)
        back = at[:, None] - torch.arange(len(keys))
        hidden = (back < 0) & bool(self.causal)
        if self.reach:
            hidden |= back >= self.reach
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sink is not None:
            scores = torch.cat([scores, self.sink[:, None, None].expand(-1, len(at), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        mixed = torch.einsum("hts,shd->thd", weights, values)
        if not self.convolutions:
            return self.ended(stream, mixed)
        attention, mlp = self.convolutions
        stream = stream + attention(mixed.reshape(len(stream), -1) @ self.out.T, before, 1)
        before = rms(stream, self.norm, self.epsilon)
        inputs = mlp(before, before, 0)
        update = (silu(inputs @ self.gate.T) * (inputs @ self.up.T)) @ self.down.T
        return stream + mlp(update, before, 1)


class _Convolution:
    """Kernels of one slot and those before it, before and after attention or an MLP."""

    def __init__(self, stored: Stored, name: str, taps: int, group: int, width: int) -> None:
        self.group, count = group, width // group
        self.base = stored.take(f"{name}.base_kernel", 2, taps, width)
        matrix = stored.take(f"{name}.kernel_projection.weight", 2 * taps * count, width)
        self.matrix = matrix.view(2, taps, count, width)

    def __call__(self, values: Tensor, inputs: Tensor, side: int) -> Tensor:
        """Convolve the slots of one block."""
        out = torch.zeros_like(values)
        for slot in range(len(values)):
            for tap in range(min(slot + 1, self.base.shape[1])):
                change = (self.matrix[side, tap] @ inputs[slot]).repeat_interleave(self.group)
                out[slot] += (self.base[side, tap] + change) * values[slot - tap]
        return out


class _Markov:
    """Markov and confidence heads: a bias from the previous token, and a confidence."""

    def __init__(self, stored: Stored, drafted: int, vocab: int, width: int, rank: int) -> None:
        self.embedding = stored.take(MARKOV, vocab, rank)
        self.out = stored.take("markov_head.markov_w2.weight", drafted, rank)
        self.sure = stored.take("confidence_head.proj.weight", 1, width + rank)
        self.bias = stored.take("confidence_head.proj.bias", 1)

    def corrected(self, guess: LevelDraft, states: Tensor, tokens: Tensor) -> LevelDraft:
        """Add the bias of these previous tokens, and the confidence."""
        before = self.embedding[tokens]
        sure = torch.cat([states, before], dim=-1) @ self.sure[0] + self.bias
        return LevelDraft(guess.logits + before @ self.out.T, guess.ids, sure)


class _Selector:
    """Scores of the best tokens of a level after a previous token."""

    def __init__(self, stored: Stored, rank: int, top: int, vocab: int, width: int) -> None:
        self.top = top
        name = "candidate_selector"
        self.before = stored.take(f"{name}.predecessor_codebook", vocab, rank)
        self.after = stored.take(f"{name}.successor_codebook", vocab, rank)
        self.matrix = stored.take(f"{name}.hidden_projection.weight", rank, width)

    def chosen(self, guess: LevelDraft, states: Tensor, tokens: Tensor) -> LevelDraft:
        """Score the best tokens; all others follow at a distance."""
        order = guess.logits.argsort(-1, descending=True)[:, : self.top]
        logits = []
        for row, best, state, token in zip(guess.logits, order, states, tokens, strict=True):
            scores = row[best] + self.after[best] @ (self.before[token] * (self.matrix @ state))
            others = row - row[best[-1]] + scores.min() - 30
            logits.append(others.index_put((best,), scores))
        return LevelDraft(torch.stack(logits), guess.ids)


class _Recurrent:
    """A GRU over the tokens of a path, and a correction by its state and the hidden state."""

    def __init__(self, stored: Stored, size: int, rank: int, vocab: int, width: int) -> None:
        self.inputs = stored.take("prefix_gru.weight_ih_l0", 3 * size, width).chunk(3)
        self.recurrent = stored.take("prefix_gru.weight_hh_l0", 3 * size, size).chunk(3)
        self.first = stored.take("embed_proj.0.weight", rank, width + size)
        self.last = stored.take("embed_proj.2.weight", vocab, rank)
        self.size = size

    def corrected(self, guess: LevelDraft, states: Tensor, path: Tensor) -> LevelDraft:
        """Correct the logits after the embeddings (level, row, width) of a path."""
        state = states.new_zeros(len(states), self.size)
        for embedded in path:
            reset, update, new = (embedded @ matrix.T for matrix in self.inputs)
            old = [state @ matrix.T for matrix in self.recurrent]
            reset, update = (reset + old[0]).sigmoid(), (update + old[1]).sigmoid()
            state = (1 - update) * (new + reset * old[2]).tanh() + update * state
        inputs = silu(torch.cat([states, state], dim=-1) @ self.first.T)
        return LevelDraft(guess.logits + inputs @ self.last.T, guess.ids)


def _draft(
    stored: Stored, settings: _BlockSettings, base: BaseView, depth: int
) -> Iterator[LevelDraft]:
    """Draft a block from every position of the text, one position at a time."""
    layer = settings.layer
    (vocab, width), epsilon = base.embedding.shape, layer["rms_norm_eps"]
    need(layer, model_type="qwen3", hidden_size=width, vocab_size=vocab, hidden_act="silu")
    need(layer, attention_bias=False)
    if min(settings.streams) < 0 or max(settings.streams) >= len(base.streams) - 1:
        raise InputError(f"streams {settings.streams} are not among those an engine hands on")
    aux = torch.cat([base.streams[number] for number in settings.streams], dim=-1)
    fused = aux @ stored.take("fc.weight", width, aux.shape[1]).T
    fused = rms(fused, stored.take("hidden_norm.weight", width), epsilon)
    layers = [
        _Layer(stored, f"layers.{number}", layer, fused)
        for number in range(layer["num_hidden_layers"])
    ]
    norm = stored.take("norm.weight", width)
    tokens, head = _vocabulary(stored, settings.drafted, base)
    markov = _Markov(stored, len(tokens), vocab, width, settings.rank) if settings.rank else None
    selector = recurrent = None
    if SELECTED[0] in layer:
        rank, top = (layer[key] for key in SELECTED)
        selector = _Selector(stored, rank, top, vocab, width)
    if CORRECTED[0] in layer:
        size, rank = (layer[key] for key in CORRECTED)
        recurrent = _Recurrent(stored, size, rank, vocab, width)
    stored.close()
    before, block_states = [base.tokens.roll(-1 - level) for level in range(depth)], []
    for position, anchor in enumerate(before[0]):
        block = torch.full((settings.slots,), settings.mask)
        block[0] = anchor
        stream = base.embedding[block]
        for decoder_layer in layers:
            stream = decoder_layer.forward(stream, position + 1)
        block_states.append(rms(stream[-depth:], norm, epsilon))
    for level, states in enumerate(torch.stack(block_states, dim=1)):
        guess = LevelDraft(states @ head.T, tokens)
        if selector is not None:
            yield selector.chosen(guess, states, before[level])
        elif recurrent is not None and level:
            path = base.embedding[torch.stack(before[: level + 1])]
            yield recurrent.corrected(guess, states, path)
        else:
            yield guess if markov is None else markov.corrected(guess, states, before[level])


def _vocabulary(stored: Stored, size: int, base: BaseView) -> tuple[Tensor, Tensor]:
    """Return the draft vocabulary and its projection; a full vocabulary uses the base's."""
    tokens = torch.arange(size)
    if size == len(base.embedding):
        return tokens, base.projection
    tokens = tokens + stored.take("d2t", size)
    if not torch.equal(stored.take("t2d", len(base.embedding)).nonzero()[:, 0], tokens):
        raise InputError("d2t and t2d must name the same tokens, in order")
    return tokens, stored.take("lm_head.weight", size, base.projection.shape[1])
