"""EAGLE-3 as vLLM, SGLang, TensorRT-LLM and llama.cpp read it.

Sources: vLLM 0.33 models/llama_eagle3.py and transformers_utils/configs/speculators; SGLang
0.5.23 models/llama_eagle3.py; TensorRT-LLM _torch/models/modeling_speculative.py and
llmapi/llm_args.py; llama.cpp 0c1e5709 conversion/llama.py and src/models/eagle3.cpp.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.export.write import LevelDraft
from tests.oracles.llama import Layer
from tests.oracles.shared import BaseView, Stored, read_config, rms
from tests.oracles.shared import require as need

ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"


def vllm(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Id k is the stream after k layers; ids at the top level have priority over eagle_config."""
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], target_hidden_size=base.hidden.shape[1])
    num_layers = len(base.streams) - 1
    ids = config.get(IDS) or config.get("eagle_config", {}).get(IDS)
    ids = ids or (2, num_layers // 2, num_layers - 3)
    yield from _draft(folder, config, base, depth, sorted(set(ids)))


def speculators(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """The layer's settings are one level down; the default of norm_before_residual is True."""
    outer = read_config(folder)
    parallel = "mask_token_id" in outer
    need(outer, speculators_model_type="peagle" if parallel else "eagle3")
    method = outer["speculators_config"]["proposal_methods"][0]
    need(method, speculative_tokens=depth)
    if not outer["speculators_config"]["verifier"]["name_or_path"]:
        raise InputError("vLLM needs the verifier's name_or_path in config.json")
    config = {"norm_before_residual": not parallel} | outer | outer["transformer_layer_config"]
    if parallel:
        config = config | {"fc_norm": False, "norm_output": False}
    yield from _draft(folder, config, base, depth, sorted(set(outer[IDS])))


def sglang(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Id v of eagle_config is the stream after v + 1 layers; other ids are not read.

    norm_before_residual is not read, and attention has no biases.
    """
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], attention_bias=False)
    num_layers = len(base.streams) - 1
    stored_ids = config.get("eagle_config", {}).get(IDS)
    ids = (
        [number + 1 for number in stored_ids]
        if stored_ids
        else [2, num_layers // 2, num_layers - 3]
    )
    yield from _draft(folder, config | {"norm_before_residual": False}, base, depth, ids)


def tensorrt_llm(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Id v of its own options is the output of layer v; norm_before_residual is not read.

    The options are YAML, and JSON is valid YAML.
    """
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE])
    options = json.loads((folder / "trtllm.yaml").read_text(encoding="utf-8"))
    options = options["speculative_config"]
    need(options, decoding_type="Eagle3", max_draft_len=depth)
    num_layers = len(base.streams) - 1
    stored_ids = options.get("eagle3_layers_to_capture")
    ids = [v + 1 for v in sorted(set(stored_ids or (1, num_layers // 2 - 1, num_layers - 4)))]
    yield from _draft(folder, config | {"norm_before_residual": False}, base, depth, ids)


def llama_cpp(folder: Path, base: BaseView, depth: int) -> Iterator[LevelDraft]:
    """Id k is the input of layer k, counted from zero; only ids at the top level are read.

    It needs three ids, in the order of config.json, and one layer. fc_norm and norm_output are not
    read.
    """
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], num_hidden_layers=1)
    num_layers = len(base.streams) - 1
    ids = config.get(IDS) or [2, num_layers // 2, num_layers - 3]
    if len(ids) != 3:
        raise InputError(f"llama.cpp reads three layers, config.json names {ids}")
    yield from _draft(folder, config | {"fc_norm": False, "norm_output": False}, base, depth, ids)


def _draft(
    folder: Path, config: dict[str, Any], base: BaseView, depth: int, ids: Sequence[int]
) -> Iterator[LevelDraft]:
    """Draft `depth` tokens from all positions of the text at once, along the text."""
    stored = Stored(folder / "model.safetensors")
    width, vocab = base.hidden.shape[1], len(base.embedding)
    need(config, model_type="llama", hidden_size=width, hidden_act="silu", vocab_size=vocab)
    if min(ids) < 0 or max(ids) >= len(base.streams) - 1:
        raise InputError(f"layers {list(ids)} are not among those an engine hands on")
    aux = torch.cat([base.streams[number] for number in ids], dim=-1)
    fuse = _fuse(stored, config, width, len(ids))
    stream, masked, embedding = fuse(aux), None, base.embedding
    if "mask_hidden" in stored:
        masked = fuse(stored.take("mask_hidden", 1, 1, aux.shape[1])[0]).expand_as(stream)
    if "speculators_model_type" in config or "embed_tokens.weight" in stored:
        embedding = stored.take("embed_tokens.weight", vocab, width)
    # d2t has offsets from column to token; t2d must mark the same tokens
    tokens = torch.arange(config["draft_vocab_size"])
    if len(tokens) != vocab:
        tokens = tokens + stored.take("d2t", len(tokens))
        if not torch.equal(stored.take("t2d", vocab).nonzero()[:, 0], tokens):
            raise InputError("d2t and t2d must name the same tokens, in order")
    name = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    layers = [Layer(stored, name, config, 2 * width)]
    further = [f"layers.{number}" for number in range(1, config["num_hidden_layers"])]
    layers += [Layer(stored, layer_name, config, width) for layer_name in further]
    input_norm, hidden_norm, norm, *norms = (
        partial(
            rms, weight=stored.take(f"{norm_name}.weight", width), epsilon=config["rms_norm_eps"]
        )
        for norm_name in (
            f"{name}.input_layernorm",
            f"{name}.hidden_norm",
            "norm",
            *(f"{layer_name}.input_layernorm" for layer_name in further),
        )
    )
    head = stored.take("lm_head.weight", len(tokens), width)
    stored.close()
    for level in range(depth):
        embedded = embedding[base.tokens.roll(-1 - level)]
        if masked is not None and level:
            stream, embedded = masked, embedding[[config["mask_token_id"]]].expand_as(masked)
        inner = hidden_norm(stream)
        residual = inner if config.get("norm_before_residual", False) else stream
        stream = layers[0].round(torch.cat([input_norm(embedded), inner], dim=-1), residual)
        for layer, layer_norm in zip(layers[1:], norms, strict=True):
            stream = layer.round(layer_norm(stream), stream)
        answer = norm(stream)
        if config.get("norm_output", False):
            stream = answer
        yield LevelDraft(answer @ head.T, tokens)


def _fuse(
    stored: Stored, config: dict[str, Any], width: int, num_aux: int
) -> Callable[[Tensor], Tensor]:
    """Return a function that fuses several streams: norms, then a matrix product."""
    epsilon = config["rms_norm_eps"]
    joint_norm = [("input_norm", num_aux * width)] if config.get("norm_before_fc", False) else []
    stream_norms = [(f"fc_norm.{number}", width) for number in range(num_aux)]
    norms = [
        [stored.take(f"{name}.weight", size) for name, size in group]
        for group in (joint_norm, stream_norms if config.get("fc_norm", False) else [])
    ]
    matrix = stored.take("fc.weight", width, num_aux * width)

    def fuse(aux: Tensor) -> Tensor:
        for weights in filter(None, norms):
            pairs = zip(aux.chunk(len(weights), dim=-1), weights, strict=True)
            aux = torch.cat([rms(chunk, weight, epsilon) for chunk, weight in pairs], dim=-1)
        return aux @ matrix.T

    return fuse
