"""Make the golden numbers of EAGLE-3's options, and of windows, with the code of the projects.

Run it by hand:

    pip download --no-deps speculators==0.9.0 hs-connectors==0.9.0     unpack both into FOLDER
    git show cb7e084:eagle/model/cnets.py of SafeAILab/EAGLE           and put these
    (and utils_c.py, choices.py, configs.py next to it)                into FOLDER/eagle/model
    python tests/golden/make_eagle3.py FOLDER

Everything is computed in float64, including norms and softmax, for which the originals use float32.
Their rotary angles stay in float32, like ours.
"""

# pyright: reportMissingImports=false

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import making
import torch
from torch import Tensor

TIME, DEPTH, WIDTH, VOCAB, DRAFTED, AUX = 12, 4, 32, 61, 40, 3
LAYER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8}
WINDOW = {
    **{"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True},
    **{"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
"""What its command line writes, with a shorter window, for a narrow head of two layers."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3_layers": (
        {"num_hidden_layers": 3, "rope": LLAMA3},
        {"fc_norm": True, "norm_output": True},
    ),
    "eagle3_yarn": ({"rope": YARN}, {"norm_before_fc": True, "norm_before_residual": True}),
    "eagle3_linear": ({"rope": {"rope_type": "linear", "factor": 3.0}}, {}),
    "peagle": ({"num_hidden_layers": 2}, {"mask_token_id": 7}),
    "eagle3_window": (WINDOW, {"norm_before_residual": True}),
    "peagle_window": (WINDOW, {"mask_token_id": 7}),
}
"""Settings of the Llama layers, and of the whole."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Replace float32 by float64 in a module of the projects."""
    plain, torch.float32 = torch.float32, torch.float64
    try:
        yield
    finally:
        torch.float32 = plain


def speculators(name: str, layer: dict[str, Any], options: dict[str, Any]) -> None:
    """Write a case of vllm-project/speculators: its folder, and the logits of all depths."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    torch.manual_seed(len(name))
    kind = "peagle" if name.startswith("peagle") else "eagle3"
    rope = {"rope_theta": 10000.0, "rope_type": "default"} | layer.pop("rope", {})
    inner = LlamaConfig(**LAYER | {"num_hidden_layers": 1, "rope_parameters": rope} | layer)
    width = inner.hidden_size
    inner._attn_implementation = "sdpa"
    config = (PEagleSpeculatorConfig if kind == "peagle" else Eagle3SpeculatorConfig)(
        transformer_layer_config=inner,
        draft_vocab_size=DRAFTED,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="base", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = (PEagleDraftModel if kind == "peagle" else Eagle3DraftModel)(config=config)
    making.randomise(model)
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[torch.randperm(VOCAB)[:DRAFTED]] = True
    ids = marks.nonzero()[:, 0]
    model.load_vocab_mappings(marks, ids - torch.arange(DRAFTED))
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *called: logits.append(called[2]))
    aux, following = torch.randn(1, TIME, AUX * width).double(), torch.randint(VOCAB, (1, TIME))
    positions, documents = torch.arange(TIME)[None], torch.zeros(1, TIME, dtype=torch.long)
    weights = {key: value for key, value in model.state_dict().items() if "verifier" not in key}
    config.save_pretrained(making.GOLDEN / name)
    (making.GOLDEN / name / "config.py").unlink()
    model.double()
    expected = {"in.aux": aux, "in.following": following}
    with torch.no_grad(), in_float64():
        if kind == "eagle3":
            model.forward(aux, following, documents, position_ids=positions, ttt_steps=DEPTH)
            expected["out.logits"] = torch.stack([values[0] for values in logits])
        else:
            sampled, sample_indices = [], core.generate_cod_sample_indices
            core.generate_cod_sample_indices = lambda **settings: (
                sampled.append(sample_indices(**settings)) or sampled[0]
            )
            hidden = torch.randn(1, TIME, width).double()
            every = {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0, "num_depths": DEPTH}
            every["loss_config"] = resolve_loss_config("kl_div", "eager")
            model.forward(aux, following, documents, verifier_last_hidden_states=hidden, **every)
            core.generate_cod_sample_indices = sample_indices
            expected["out.anchors"], expected["out.depths"] = sampled[0]
            expected["out.logits"] = logits[0][0]
    making.save(name, weights, expected)


def dflash(name: str) -> None:
    """Write a DFlash head of vllm-project/speculators with a window: logits of all its blocks."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    torch.manual_seed(4)
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    inner = Qwen3Config(**LAYER | WINDOW | {"rope_parameters": rope})
    inner._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=VOCAB,
        block_size=DEPTH,
        aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=7,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="base", architectures=["LlamaForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config=config)
    making.randomise(model)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *called: logits.append(called[2]))
    masks, build_mask = [], model._build_attention_mask
    model._build_attention_mask = lambda *inputs: masks.append(build_mask(*inputs)) or masks[0]
    width = inner.hidden_size
    aux, tokens = torch.randn(1, TIME, AUX * width).double(), torch.randint(VOCAB, (1, TIME))
    hidden, documents = torch.randn(1, TIME, width).double(), torch.zeros(1, TIME).long()
    weights = {key: value for key, value in model.state_dict().items() if "verifier" not in key}
    config.save_pretrained(making.GOLDEN / name)
    (making.GOLDEN / name / "config.py").unlink()
    model.double()
    settings = {"loss_config": resolve_loss_config("kl_div", "eager"), "max_anchors": TIME - DEPTH}
    with torch.no_grad(), in_float64():
        model.forward(aux, tokens, torch.ones(1, TIME), hidden, documents, **settings)
    expected = {"in.aux": aux, "in.tokens": tokens, "out.anchors": masks[0][2]}
    expected["out.logits"] = logits[0][0].unflatten(0, (-1, DEPTH))
    making.save(name, weights, expected)


def chain() -> None:
    """Write a draft of SafeAILab's EAGLE with linear scaling, token by token over its cache.

    A factor of 4: it divides positions where others divide frequencies, which is the same then.
    """
    from eagle.model.cnets import Model
    from eagle.model.configs import EConfig

    torch.manual_seed(3)
    name, rope = "eagle3_chain_linear", {"type": "linear", "factor": 4.0}
    config = EConfig(**LAYER, num_hidden_layers=1, rope_scaling=rope, draft_vocab_size=DRAFTED)
    config.rope_scaling = rope
    config.pad_token_id = 0
    model = Model(config, bias=False)
    making.randomise(model)
    ids = torch.randperm(VOCAB)[:DRAFTED].sort().values
    model.d2t, model.t2d = ids - torch.arange(DRAFTED), torch.zeros(VOCAB, dtype=torch.bool)
    model.t2d[ids] = True
    weights = model.state_dict()
    aux, tokens = (
        torch.randn(1, TIME, AUX * WIDTH).double(),
        torch.randint(VOCAB, (1, TIME + DEPTH)),
    )
    model.double()
    # its mask is made in the default precision
    torch.set_default_dtype(torch.float64)
    logits = []
    with torch.no_grad(), in_float64():
        hidden, past = aux, None
        for start, end in [(0, TIME), *((at, at + 1) for at in range(TIME, TIME + DEPTH - 1))]:
            hidden, past = model(
                hidden, input_ids=tokens[:, start:end], past_key_values=past, use_cache=True
            )
            hidden = hidden[:, -1:]
            logits.append(model.lm_head(model.norm(hidden))[:, 0])
    expected = {"in.aux": aux, "in.following": tokens, "out.logits": torch.stack(logits, 1)}
    text = {**LAYER, "num_hidden_layers": 1, "rope_scaling": rope, "rope_theta": 10000.0}
    text |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
    making.save(name, weights, expected, text)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    for case, (layer, options) in CASES.items():
        speculators(case, dict(layer), options)
    dflash("dflash_window")
    chain()
