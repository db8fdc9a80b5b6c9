"""Make the golden numbers of MTP modules with the code of other projects; run by hand.

    pip download --no-deps speculators==0.9.0 hs-connectors==0.9.0     unpack both into FOLDER
    modeling_mimo.py of XiaomiMiMo/MiMo-7B-RL                          into FOLDER/mimo
    python tests/golden/make_mtp.py FOLDER

Written with transformers 5.23, whose MtpLayer is the third. Each layer drafts as in an engine: the
committed tokens go through it once into a cache, then each drafted token with the previous state.
Only MiMoMTPLayers of MiMo's file is run; its import of the configuration can be removed. Everything
is computed in float64, where the originals use float32.
"""

# pyright: reportMissingImports=false

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import making
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

TIME, FIRST, BATCH, DEPTH = 12, 5, 2, 3
"""Positions of a text, those that the first draft has seen, texts, and levels drafted."""

SHAPE = making.SHAPE | {"max_position_embeddings": 64}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
Layer = Callable[..., Tensor]
"""Takes embeddings, states, positions, a mask and a cache."""


def inputs() -> dict[str, Tensor]:
    """Return a base's states, its tokens and one more, and the tensors to borrow."""
    size, width = SHAPE["vocab_size"], SHAPE["hidden_size"]
    return {
        "in.hidden": torch.randn(BATCH, TIME, width),
        "in.tokens": torch.randint(size, (BATCH, TIME + 1)),
        "in.embedding": torch.randn(size, width),
        "in.projection": torch.randn(size, width),
    }


def draft(layer: Layer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the greedy drafts of a layer after the first positions, and after all of them."""
    cache, drafts = DynamicCache(), dict[str, Tensor]()
    tokens, embedding = tensors["in.tokens"], tensors["in.embedding"]
    for step, (start, end) in enumerate(((0, FIRST), (FIRST, TIME))):
        token_ids, hidden = tokens[:, start + 1 : end + 1], tensors["in.hidden"][:, start:end]
        logits, drafted = [], []
        for level in range(DEPTH):
            first = start if level == 0 else end + level - 1
            at = torch.arange(first, first + token_ids.shape[1])
            visible = torch.arange(first + token_ids.shape[1]) <= at[:, None]
            mask = torch.zeros(visible.shape).masked_fill(~visible, -1e300)[None, None]
            state = layer(embedding[token_ids], hidden, at.expand(BATCH, -1), mask, cache)
            hidden = state[:, -1:]
            logits.append(hidden @ tensors["in.projection"].T)
            token_ids = logits[-1].argmax(-1)
            drafted.append(token_ids)
        cache.crop(1 - DEPTH)
        drafts |= {f"out.draft_logits.{step}": torch.cat(logits, 1)}
        drafts |= {f"out.drafted.{step}": torch.cat(drafted, 1)}
    return drafts


def speculators() -> None:
    """Write a folder of speculators: training's first round, drafts, and FastMTP's weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig, compute_step_weights
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    torch.manual_seed(3)
    config = MTPSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**SHAPE, **EAGER),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="base", architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = MTPDraftModel(config).double().eval()
    making.randomise(model)
    tensors = inputs()
    model.embed_tokens.weight.data.copy_(tensors["in.embedding"])
    model.lm_head.weight.data.copy_(tensors["in.projection"])

    def layer(embedded: Tensor, hidden: Tensor, at: Tensor, mask: Tensor, cache: Any) -> Tensor:
        angles = model.rotary_emb(hidden, at)
        return model.mtp_layers[0](
            hidden_states=hidden,
            token_embeddings=embedded,
            attention_mask=mask,
            position_embeddings=angles,
            past_key_values=cache,
        )

    with torch.no_grad():
        trained, _, _ = model(tensors["in.tokens"], tensors["in.hidden"])
        expected = tensors | draft(layer, tensors) | {"out.logits": trained[0]}
    expected["out.step_weights"] = torch.tensor(compute_step_weights(0.6, DEPTH))
    state = model.state_dict().items()
    weights = {key: value for key, value in state if key.startswith("mtp_layers.")}
    config.save_pretrained(making.GOLDEN / "mtp_speculators")
    (making.GOLDEN / "mtp_speculators" / "config.py").unlink(missing_ok=True)
    settings = json.loads(
        (making.GOLDEN / "mtp_speculators" / "config.json").read_text(encoding="utf-8")
    )
    making.save("mtp_speculators", weights, expected, settings)


def mimo() -> None:
    """Write a module in MiMo's layout, next to a layer of the base."""
    from mimo.modeling_mimo import MiMoMTPLayers

    torch.manual_seed(4)
    config = Qwen2Config(**SHAPE, **EAGER)
    module, rotary = MiMoMTPLayers(config).double().eval(), Qwen2RotaryEmbedding(config)
    making.randomise(module)
    tensors = inputs()

    def layer(embedded: Tensor, hidden: Tensor, at: Tensor, mask: Tensor, cache: Any) -> Tensor:
        angles = rotary(hidden, at)
        return module(embedded, hidden, mask, at, cache, position_embeddings=angles)

    with torch.no_grad():
        expected = tensors | draft(layer, tensors)
    weights = {f"model.mtp_layers.0.{name}": value for name, value in module.state_dict().items()}
    weights["model.norm.weight"] = torch.ones(SHAPE["hidden_size"])
    settings = SHAPE | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    settings |= {"num_nextn_predict_layers": 1, "attention_bias": True, "rope_theta": 10000.0}
    making.save("mtp_mimo", weights, expected, {**settings, "hidden_act": "silu"})


def deepseek() -> None:
    """Write a module with DeepSeek-V3's names and a dense layer, by transformers' code."""
    torch.manual_seed(5)
    rope = {"rope_theta": 20000.0, "rope_type": "default"}
    config = LlamaConfig(**SHAPE, **EAGER, rope_parameters=rope)
    module = MtpLayer(config, LlamaDecoderLayer, LlamaRMSNorm, 0).double().eval()
    rotary = LlamaRotaryEmbedding(config)
    making.randomise(module)
    tensors = inputs()

    def layer(embedded: Tensor, hidden: Tensor, at: Tensor, mask: Tensor, cache: Any) -> Tensor:
        return module(embedded, hidden, rotary(hidden, at), mask, at, cache)

    with torch.no_grad():
        expected = tensors | draft(layer, tensors)
    weights = {"model.norm.weight": torch.ones(SHAPE["hidden_size"])}
    for name, value in module.state_dict().items():
        suffix = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        weights[f"model.layers.2.{suffix}"] = value
    weights["model.layers.2.embed_tokens.weight"] = tensors["in.embedding"]
    weights["model.layers.2.shared_head.head.weight"] = tensors["in.projection"]
    settings = SHAPE | {"num_nextn_predict_layers": 1, "rope_theta": 20000.0}
    making.save("mtp_deepseek", weights, expected, {**settings, "hidden_act": "silu"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    sys.path.insert(0, str(parser.parse_args().folder))
    with making.in_float64():
        speculators()
        mimo()
        deepseek()
