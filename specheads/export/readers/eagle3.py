"""EAGLE-3 as vLLM, SGLang, TensorRT-LLM and llama.cpp read it.

Sources: vLLM 0.33 models/llama_eagle3.py and transformers_utils/configs/speculators; SGLang
0.5.23 models/llama_eagle3.py; TensorRT-LLM _torch/models/modeling_speculative.py and
llmapi/llm_args.py; llama.cpp conversion/llama.py.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specheads.core.errors import InputError
from specheads.export.readers import BaseView, Guess, Stored, read_config, rms
from specheads.export.readers import require as need
from specheads.export.readers.llama import Layer

ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"


def vllm(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Id k is the stream after k layers; ids at the top level come before eagle_config's."""
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], target_hidden_size=base.hidden.shape[1])
    num_layers = len(base.streams) - 1
    ids = config.get(IDS) or config.get("eagle_config", {}).get(IDS)
    ids = ids or (2, num_layers // 2, num_layers - 3)
    yield from _draft(folder, config, base, depth, sorted(set(ids)))


def speculators(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """The layer's settings lie one level down; norm_before_residual is True unless it is said."""
    outer = read_config(folder)
    need(outer, speculators_model_type="eagle3")
    method = outer["speculators_config"]["proposal_methods"][0]
    need(method, speculative_tokens=depth)
    if not outer["speculators_config"]["verifier"]["name_or_path"]:
        raise InputError("vLLM needs the verifier's name_or_path in config.json")
    config = {"norm_before_residual": True} | outer | outer["transformer_layer_config"]
    yield from _draft(folder, config, base, depth, sorted(set(outer[IDS])))


def sglang(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Id v of eagle_config, and of nothing else, is the stream after v + 1 layers.

    The residual always starts from the stream as it is, and attention has no biases.
    """
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], attention_bias=False)
    num_layers = len(base.streams) - 1
    given = config.get("eagle_config", {}).get(IDS)
    ids = [one + 1 for one in given] if given else [2, num_layers // 2, num_layers - 3]
    yield from _draft(folder, config | {"norm_before_residual": False}, base, depth, ids)


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
    yield from _draft(folder, config | {"norm_before_residual": False}, base, depth, ids)


def llama_cpp(folder: Path, base: BaseView, depth: int) -> Iterator[Guess]:
    """Its converter takes the three published layers whatever config.json says."""
    config = read_config(folder)
    need(config, architectures=[ARCHITECTURE], num_hidden_layers=1)
    num_layers = len(base.streams) - 1
    ids = [2, num_layers // 2, num_layers - 3]
    yield from _draft(folder, config, base, depth, ids)


def _draft(
    folder: Path, config: dict[str, Any], base: BaseView, depth: int, ids: Sequence[int]
) -> Iterator[Guess]:
    """Draft `depth` tokens from every position of the text at once, along the text itself."""
    stored = Stored(folder / "model.safetensors")
    width, vocab = base.hidden.shape[1], len(base.embedding)
    need(config, model_type="llama", hidden_size=width, num_hidden_layers=1, hidden_act="silu")
    need(config, vocab_size=vocab)
    if min(ids) < 0 or max(ids) >= len(base.streams) - 1:
        raise InputError(f"layers {list(ids)} are not among those an engine hands on")
    aux = torch.cat([base.streams[one] for one in ids], dim=-1)
    stream = aux @ stored.take("fc.weight", width, aux.shape[1]).T
    embedding = base.embedding
    if "speculators_model_type" in config:
        embedding = stored.take("embed_tokens.weight", vocab, width)
    # the checkpoint has offsets of the columns' tokens, and a mask that must agree
    tokens = torch.arange(config["draft_vocab_size"])
    if len(tokens) != vocab:
        tokens = tokens + stored.take("d2t", len(tokens))
        if not torch.equal(stored.take("t2d", vocab).nonzero()[:, 0], tokens):
            raise InputError("d2t and t2d must name the same tokens, in order")
    name = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    layer, epsilon = Layer(stored, name, config, 2 * width), config["rms_norm_eps"]
    input_norm, hidden_norm, norm = (
        stored.take(f"{part}.weight", width)
        for part in (f"{name}.input_layernorm", f"{name}.hidden_norm", "norm")
    )
    head = stored.take("lm_head.weight", len(tokens), width)
    stored.close()
    for level in range(depth):
        inner = rms(stream, hidden_norm, epsilon)
        read = rms(embedding[base.tokens.roll(-1 - level)], input_norm, epsilon)
        normed = config.get("norm_before_residual", False)
        stream = layer.round(torch.cat([read, inner], dim=-1), inner if normed else stream)
        yield Guess(rms(stream, norm, epsilon) @ head.T, tokens)
