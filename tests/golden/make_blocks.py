"""Make the golden tensors of DFlash and DSpark with the code of their projects.

    git clone https://github.com/deepseek-ai/DeepSpec && git clone https://github.com/z-lab/dflash
    pip download --no-deps nvidia-modelopt==0.47.0          unpack it into modelopt
    python tests/golden/make_blocks.py DeepSpec dflash modelopt

Written with DeepSpec at afdfa7c, z-lab/dflash at 44947fb and transformers 5. Their code is
unchanged, except that its float32 is float64: norms, rotary embeddings and confidences round to
float32 in any model precision, and the comparison needs more.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import making
import torch
from torch.nn.attention.flex_attention import create_mask
from transformers import DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

TIME, FIRST, BATCH = 14, 6, 2
"""Positions of a text, those that the first draft has seen, and texts."""

SHAPE = making.SHAPE | {"rope_theta": 1_000_000.0, "hidden_act": "silu", "attention_bias": False}
LAYERS = {"target_layer_ids": [1, 3, 4], "num_target_layers": 8}


def bare(root: Path, *packages: str) -> None:
    """Import packages without their `__init__`, which imports unneeded libraries."""
    for name in packages:
        module = ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module


def made(config: dict[str, Any]) -> Any:
    """Return a configuration for the projects' models."""
    return Qwen3Config(**config | {"attn_implementation": "eager"})


def random_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Sample every weight as a float32 value; return them by their public names."""
    tensors = model.state_dict().items()
    weights = {name: (0.3 * torch.randn(value.shape)).to(making.SINGLE) for name, value in tensors}
    model.load_state_dict(weights)
    return weights


def draft(model: Any, embed: Any, aux: torch.Tensor, roots: torch.Tensor, slots: int) -> Any:
    """Return the tokens of a block's slots for a cache of FIRST positions, then of all."""
    cache, blocks = DynamicCache(), []
    for start, end, root in ((0, FIRST, roots[:, 0]), (FIRST, TIME, roots[:, 1])):
        tokens = torch.full((BATCH, slots), MASK)
        tokens[:, 0] = root
        positions = torch.arange(start, end + slots)[None].expand(BATCH, -1)
        call = getattr(model, "_forward_backbone", model)
        argument = "target_hidden_states" if call is not model else "target_hidden"
        hidden = call(
            noise_embedding=embed(tokens),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
            **{argument: aux[:, start:end]},
        )
        cache.crop(-slots)
        blocks.append(hidden)
    return blocks


MASK = 60


def deepspec(root: Path, name: str, rank: int) -> None:
    """Write the outputs of DeepSpec's model in training, at sampled anchors, and in drafting."""
    packages = ("deepspec", "deepspec.modeling", "deepspec.utils", "deepspec.modeling.dspark")
    bare(root, *packages, "deepspec.modeling.dspark.qwen3")
    common: Any = importlib.import_module("deepspec.modeling.dspark.common")
    modeling: Any = importlib.import_module("deepspec.modeling.dspark.qwen3.modeling")
    config = SHAPE | LAYERS | {"block_size": 4, "mask_token_id": MASK, "num_anchors": 5}
    config |= {"architectures": ["Qwen3DSparkModel"], "layer_types": ["full_attention"] * 2}
    config |= {"markov_rank": rank, "enable_confidence_head": rank > 0}
    config |= {"markov_head_type": "vanilla", "confidence_head_with_markov": rank > 0}
    torch.manual_seed(rank)
    model = modeling.Qwen3DSparkModel(made(config))
    model = model.double().eval()
    weights = random_weights(model)
    aux = torch.randn(BATCH, TIME, 3 * SHAPE["hidden_size"])
    tokens = torch.randint(MASK, (BATCH, TIME))
    records: dict[str, torch.Tensor] = {}

    def sampled(**settings: Any) -> Any:
        anchors, keep_mask = common.sample_anchor_positions(**settings)
        records["out.anchors"], records["out.kept"] = anchors, keep_mask
        return anchors, keep_mask

    def dense(rule: Any, **settings: Any) -> torch.Tensor:
        records["out.mask"] = create_mask(rule, **settings)
        return torch.zeros(records["out.mask"].shape).masked_fill(~records["out.mask"], -1e300)

    modeling.sample_anchor_positions, common.create_block_mask = sampled, dense
    counted = torch.ones(BATCH, TIME)
    counted[1, :4] = 0
    with torch.no_grad():
        trained = model(tokens, aux, counted, torch.randn(BATCH, TIME, SHAPE["hidden_size"]))
        roots = torch.stack([tokens[:, FIRST], torch.randint(MASK, (BATCH,))], dim=1)
        hidden = draft(model, model.embed_tokens, aux, roots, 4)
    expected = {"in.tokens": tokens, "in.aux": aux, "in.roots": roots, **records}
    expected |= {"out.logits": trained.draft_logits, "out.counted": trained.eval_mask}
    if rank:
        expected["out.confidence"] = trained.confidence_pred
    for step, (block, said_last) in enumerate(zip(hidden, roots.T, strict=True)):
        plain = model.compute_logits(block)
        drafts, logits = model.sample_draft_tokens(
            plain, first_prev_token_ids=said_last, hidden_states=block
        )
        expected |= {f"out.drafted.{step}": drafts, f"out.draft_logits.{step}": logits}
        if rank:
            before = torch.cat([said_last[:, None], drafts[:, :-1]], dim=1)
            sure = model.predict_confidence_step(block, prev_token_ids=before)
            expected[f"out.draft_confidence.{step}"] = sure
    making.save(name, weights, expected, config)


def z_lab(root: Path, name: str) -> None:
    """Write the outputs of z-lab's model in drafting; its training is not published."""
    bare(root, "dflash")
    modeling: Any = importlib.import_module("dflash.model")
    config = SHAPE | {
        "block_size": 5,
        "num_target_layers": 8,
        "architectures": ["DFlashDraftModel"],
    }
    config |= {"layer_types": ["full_attention"] * 2}
    config["dflash_config"] = {
        "target_layer_ids": LAYERS["target_layer_ids"],
        "mask_token_id": MASK,
    }
    torch.manual_seed(9)
    model = modeling.DFlashDraftModel(made(config))
    model = model.double().eval()
    weights = random_weights(model)
    aux = torch.randn(BATCH, TIME, 3 * SHAPE["hidden_size"])
    shape = SHAPE["vocab_size"], SHAPE["hidden_size"]
    embedding, projection = torch.randn(shape), torch.randn(shape)
    roots = torch.randint(MASK, (BATCH, 2))
    expected = {"in.aux": aux, "in.roots": roots}
    expected |= {"in.embedding": embedding, "in.projection": projection}
    with torch.no_grad():
        blocks = draft(model, lambda tokens: embedding[tokens], aux, roots, 5)
    for step, hidden in enumerate(blocks):
        expected[f"out.draft_logits.{step}"] = hidden[:, -4:] @ projection.T
    making.save(name, weights, expected, config)


def modelopt(root: Path, name: str) -> None:
    """Write the outputs of ModelOpt's DFlash with a window and sinks, at anchors of a text."""
    packages = ("modelopt", "modelopt.torch", "modelopt.torch.speculative")
    plugins = "modelopt.torch.speculative.plugins"
    bare(root, *packages, plugins)
    modeling: Any = importlib.import_module(f"{plugins}.modeling_dflash")
    # the mask is a method of a class that needs the whole package
    tree = ast.parse((root / plugins.replace(".", "/") / "hf_dflash.py").read_text())
    method_name = "_build_draft_attention_mask"
    method = next(node for node in ast.walk(tree) if getattr(node, "name", "") == method_name)
    namespace: dict[str, Any] = {"torch": torch}
    exec(ast.unparse(method), namespace)
    # as its exporter writes them
    exporter_settings = {
        "block_size": 4,
        "architectures": ["DFlashDraftModel"],
        "attention_sink_bias": True,
    }
    config = (
        SHAPE | exporter_settings | {"num_target_layers": 8, "layer_types": ["full_attention"] * 2}
    )
    config["sliding_window"] = 6
    config["dflash_config"] = {
        "target_layer_ids": LAYERS["target_layer_ids"],
        "mask_token_id": MASK,
        "use_swa": True,
        "swa_window_size": 6,
        "causal": False,
        "attention_sink_bias": True,
    }
    torch.manual_seed(4)
    model = modeling.DFlashModule(made(config | LAYERS | {"sliding_window": None}))
    modeling._compiled_sink_attention = modeling._sink_attention_impl
    # its class in this version of transformers takes no device
    rotary = modeling._ROTARY_CLS
    modeling._ROTARY_CLS = lambda config, **_: rotary(config)
    model = model.double().eval()
    weights = random_weights(model)
    aux, tokens = torch.randn(1, TIME, 3 * SHAPE["hidden_size"]), torch.randint(MASK, (1, TIME))
    shape = SHAPE["vocab_size"], SHAPE["hidden_size"]
    embedding, projection = torch.randn(shape), torch.randn(shape)
    anchors = torch.tensor([[1, 5, 8, 10]])
    slots = torch.full((1, 4, 4), MASK)
    slots[..., 0] = tokens[0, anchors]
    settings = SimpleNamespace(dflash_block_size=4, dflash_draft_attention="bidirectional")
    positions = [torch.arange(TIME)[None], (anchors[..., None] + torch.arange(4)).flatten(1)]
    keep_mask = torch.ones(1, 4, dtype=torch.bool)
    mask = namespace[method_name](
        settings, TIME, anchors, keep_mask, 4, torch.float64, "cpu", window=6
    )
    with torch.no_grad():
        hidden = model(embedding[slots.flatten(1)], aux, torch.cat(positions, dim=1), mask)
    logits = hidden.unflatten(1, (4, 4))[0, :, 1:] @ projection.T
    expected = {"in.aux": aux, "in.tokens": tokens, "out.anchors": anchors[0]}
    expected |= {"in.embedding": embedding, "in.projection": projection, "out.logits": logits}
    making.save(name, weights, expected, config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deepspec", type=Path)
    parser.add_argument("dflash", type=Path)
    parser.add_argument("modelopt", type=Path)
    folders = parser.parse_args()
    with making.in_float64():
        deepspec(folders.deepspec, "dspark_deepspec", rank=5)
        deepspec(folders.deepspec, "dflash_deepspec", rank=0)
        z_lab(folders.dflash, "dflash_z_lab")
        modelopt(folders.modelopt, "dflash_modelopt")
