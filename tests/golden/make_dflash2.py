"""Make the golden tensors of DFlash 2 with the code of speculators 0.9.0.

    pip install --no-deps --target oracle speculators==0.9.0
    PYTHONPATH=oracle python tests/golden/make_dflash2.py

Its code is unchanged, except that its float32 is float64, and that the anchors are given.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import making
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

TIME, BLOCK, MASK, TOP = 14, 4, 60, 5
ANCHORS = torch.tensor([1, 3, 6, 9])
SHAPE = making.SHAPE | {"rope_theta": 10_000.0, "hidden_act": "silu", "attention_bias": False}
SHAPE |= {"max_position_embeddings": 64, "use_sliding_window": True, "sliding_window": 5}
SHAPE |= {"layer_types": ["sliding_attention", "full_attention"]}


def make() -> None:
    """Write the blocks, drafts and losses at some anchors of a text."""
    torch.manual_seed(11)
    method = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    layers = Qwen3Config(**SHAPE, attn_implementation="eager")
    config = DFlash2SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=SHAPE["vocab_size"],
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=MASK,
        conv_kernel_size=3,
        conv_group_size=8,
        selector_rank=6,
        selector_top_k=TOP,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash2",
            proposal_methods=[method],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="base", architectures=["LlamaForCausalLM"]),
        ),
    )
    model: Any = DFlash2DraftModel(config).double().eval()
    making.randomise(model)
    # the selector decides among close logits
    model.lm_head.weight.data *= 0.3
    model.verifier_lm_head.weight.data = model.lm_head.weight.data.clone()
    core.select_anchors = lambda *_: (ANCHORS, torch.ones(len(ANCHORS), dtype=torch.bool))
    tokens = torch.randint(MASK, (1, TIME))
    aux, hidden = torch.randn(1, TIME, 3 * 32), torch.randn(1, TIME, 32)
    every = torch.ones(1, TIME)
    inputs = (aux, tokens, every, hidden, torch.zeros(1, TIME, dtype=torch.long))
    states, logits, _, mask, _ = model._backbone_forward(*inputs, max_anchors=len(ANCHORS))
    assert mask.sum() == len(ANCHORS) * (BLOCK - 1)
    expected = {"in.aux": aux, "in.tokens": tokens, "in.hidden": model.verifier_norm(hidden)}
    expected |= {"in.embedding": model.embed_tokens.weight, "in.projection": model.lm_head.weight}
    expected |= {"out.anchors": ANCHORS, "out.states": states.unflatten(1, (-1, BLOCK))[0]}
    expected["out.logits"] = logits.unflatten(1, (-1, BLOCK))[0]
    for loss, name in (("kl_div", "kl"), ("tv", "tv")):
        run = partial(model, *inputs, loss_config=resolve_loss_config(loss, "eager"))
        tv = resolve_loss_config("tv", "eager")["tv"][0]
        _, total, metrics = run(max_anchors=len(ANCHORS), tv_loss_fn=tv)
        expected |= {f"out.{name}": total, "out.selector": metrics["selector_loss_sum"]}
        if name == "kl":
            model.zero_grad()
            total.backward()
            names = "candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"
            expected |= {f"out.gradient.{x}": model.get_parameter(x).grad for x in names}
    before, drafts, candidates, scores = tokens[0, ANCHORS], [], [], []
    for slot in range(1, BLOCK):
        args = (expected["out.logits"][:, slot], expected["out.states"][:, slot], before)
        ids, values = model.candidate_selector.select(*args)
        before = ids.gather(-1, values.argmax(-1, keepdim=True))[:, 0]
        drafts.append(before)
        candidates.append(ids)
        scores.append(values)
    stacks = SimpleNamespace(drafted=drafts, candidates=candidates, scores=scores)
    expected |= {f"out.{key}": torch.stack(value, dim=1) for key, value in vars(stacks).items()}
    ignored = model._keys_to_ignore_on_save
    weights = {key: value for key, value in model.state_dict().items() if key not in ignored}
    making.save("dflash2_speculators", weights, expected, config.to_dict())


if __name__ == "__main__":
    with making.in_float64():
        make()
