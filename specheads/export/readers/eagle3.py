"""EAGLE-3 as vLLM, SGLang, TensorRT-LLM and llama.cpp read it.

Sources: vLLM 0.33 models/llama_eagle3.py and transformers_utils/configs/speculators; SGLang
0.5.23 models/llama_eagle3.py; TensorRT-LLM _torch/models/modeling_speculative.py and
llmapi/llm_args.py; llama.cpp conversion/llama.py.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.export.readers import BaseView, Guess, Stored, read_config, rms, rotate, silu
from specheads.export.readers import require as need

ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"


def vllm(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Id k is the stream after k layers; ids at the top level come before eagle_config's."""
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], target_hidden_size=base.hidden.shape[1])
    num_layers = len(base.streams) - 1
    ids = config.get(IDS) or config.get("eagle_config", {}).get(IDS)
    ids = ids or (2, num_layers // 2, num_layers - 3)
    normed = config.get("norm_before_residual", False)
    yield from _draft(folder, config, base, depth, sorted(set(ids)), normed=normed)


def speculators(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """The layer's settings lie one level down; norm_before_residual is True unless it is said."""
    outer = read_config(folder)
    need(outer, speculators_model_type="eagle3")
    method = outer["speculators_config"]["proposal_methods"][0]
    need(method, speculative_tokens=depth)
    if not outer["speculators_config"]["verifier"]["name_or_path"]:
        raise ValueError("vLLM needs the verifier's name_or_path in config.json")
    config = outer | outer["transformer_layer_config"]
    normed = outer.get("norm_before_residual", True)
    yield from _draft(folder, config, base, depth, sorted(set(outer[IDS])), normed=normed)


def sglang(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Id v of eagle_config, and of nothing else, is the stream after v + 1 layers.

    The residual always starts from the stream as it is, and attention has no biases.
    """
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], attention_bias=False)
    num_layers = len(base.streams) - 1
    given = config.get("eagle_config", {}).get(IDS)
    ids = [one + 1 for one in given] if given else [2, num_layers // 2, num_layers - 3]
    yield from _draft(folder, config, base, depth, ids, normed=False)


def tensorrt_llm(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Id v of its own options is the output of layer v; norm_before_residual is not read.

    The options are YAML, of which JSON is a part.
    """
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE])
    options = json.loads((folder / "trtllm.yaml").read_text(encoding="utf-8"))
    options = options["speculative_config"]
    need(options, decoding_type="Eagle3", max_draft_len=depth)
    num_layers = len(base.streams) - 1
    given = options.get("eagle3_layers_to_capture")
    ids = [v + 1 for v in sorted(set(given or (1, num_layers // 2 - 1, num_layers - 4)))]
    yield from _draft(folder, config, base, depth, ids, normed=False)


def llama_cpp(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Its converter takes the three published layers whatever config.json says."""
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], num_hidden_layers=1)
    num_layers = len(base.streams) - 1
    ids = [2, num_layers // 2, num_layers - 3]
    normed = config.get("norm_before_residual", False)
    yield from _draft(folder, config, base, depth, ids, normed=normed)


def _draft(
    folder: Path,
    config: dict[str, Any],
    base: BaseView,
    depth: int,
    ids: Sequence[int],
    *,
    normed: bool,
) -> Iterator[Guess]:
    """Draft `depth` tokens from every position of the text at once, along the text itself."""
    stored = Stored(folder / "model.safetensors")
    width = base.hidden.shape[1]
    need(config, model_type="llama", hidden_size=width, num_hidden_layers=1, hidden_act="silu")
    need(config, vocab_size=len(base.embedding))
    if min(ids) < 0 or max(ids) >= len(base.streams) - 1:
        raise ValueError(f"layers {list(ids)} are not among those an engine hands on")
    aux = torch.cat([base.streams[one] for one in ids], dim=-1)
    stream = aux @ stored.take("fc.weight", width, aux.shape[1]).T
    embedding = base.embedding
    if "speculators_model_type" in config:
        embedding = stored.take("embed_tokens.weight", *embedding.shape)
    tokens = _draft_ids(stored, config["draft_vocab_size"], len(embedding))
    layer = _Layer(stored, config, normed)
    norm = stored.take("norm.weight", width)
    head = stored.take("lm_head.weight", len(tokens), width)
    stored.close()
    for level in range(depth):
        stream = layer.round(stream, embedding[base.tokens.roll(-1 - level)])
        yield Guess(rms(stream, norm, config["rms_norm_eps"]) @ head.T, tokens)


def _draft_ids(stored: Stored, size: int, vocab: int) -> Tensor:
    """Return which token each column is: offsets in the checkpoint, and a mask that must agree."""
    columns = torch.arange(size)
    if size == vocab:
        return columns
    offsets, marks = stored.take("d2t", size), stored.take("t2d", vocab)
    tokens = columns + offsets
    if not torch.equal(marks.nonzero()[:, 0], tokens):
        raise ValueError("d2t and t2d must name the same tokens, in order")
    return tokens


class _Layer:
    """One Llama layer whose attention reads [embedding, stream], over rounds of its own output."""

    def __init__(self, stored: Stored, config: dict[str, Any], normed: bool) -> None:
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.shared = config["num_key_value_heads"]
        self.size = config.get("head_dim") or width // self.heads
        self.normed, self.epsilon = normed, config["rms_norm_eps"]
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        name = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
        inner, query, key = config["intermediate_size"], self.heads, self.shared

        def take(part: str, *shape: int) -> Tensor:
            return stored.take(f"{name}.{part}.weight", *shape)

        self.norms = [
            take(part, width)
            for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        ]
        self.query, self.key, self.value = (
            take(f"self_attn.{part}_proj", count * self.size, 2 * width)
            for part, count in (("q", query), ("k", key), ("v", key))
        )
        self.out = take("self_attn.o_proj", width, query * self.size)
        self.gate, self.up = (take(f"mlp.{part}_proj", inner, width) for part in ("gate", "up"))
        self.down = take("mlp.down_proj", width, inner)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def round(self, stream: Tensor, embedded: Tensor) -> Tensor:
        """Go once more over every position, each now one token further on its own draft."""
        time = len(stream)
        at = torch.arange(time) + len(self.kept)
        inner = rms(stream, self.norms[1], self.epsilon)
        inputs = torch.cat([rms(embedded, self.norms[0], self.epsilon), inner], dim=-1)
        queries = rotate((inputs @ self.query.T).view(time, self.heads, -1), at, self.theta)
        keys = rotate((inputs @ self.key.T).view(time, self.shared, -1), at, self.theta)
        values = (inputs @ self.value.T).view(time, self.shared, -1)
        each = self.heads // self.shared
        self.kept.append((keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1)))
        mixed = self._attend(queries).reshape(time, -1)
        stream = (inner if self.normed else stream) + mixed @ self.out.T
        read = rms(stream, self.norms[2], self.epsilon)
        return stream + (silu(read @ self.gate.T) * (read @ self.up.T)) @ self.down.T

    def _attend(self, queries: Tensor) -> Tensor:
        """See the first round up to here, which the base has read, and later ones of this draft."""
        (keys, values), own = self.kept[0], self.kept[1:]
        places = torch.arange(len(queries))
        scores = torch.einsum("thd,shd->ths", queries, keys)
        scores = scores.masked_fill((places[:, None] < places)[:, None], -math.inf)
        drafted = [(queries * own_keys).sum(-1, keepdim=True) for own_keys, _ in own]
        weights = (torch.cat([scores, *drafted], -1) / math.sqrt(self.size)).softmax(-1)
        mixed = torch.einsum("ths,shd->thd", weights[..., : len(values)], values)
        for place, (_, own_values) in enumerate(own, start=len(values)):
            mixed = mixed + weights[..., place : place + 1] * own_values
        return mixed
