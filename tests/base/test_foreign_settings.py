"""Settings of bases, their tokenizers and adapters: honoured, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from specheads.base.loading import load_config
from specheads.core.errors import InputError

FAMILIES = json.loads((Path(__file__).with_name("families.json")).read_text())
"""config.json of published families, with small sizes, from memory."""


def read(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    load_config(str(folder), revision="main")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configs_are_accepted(family: str, tmp_path: Path):
    read(tmp_path, FAMILIES[family])


LLAMA3 = FAMILIES["llama3.1"]["rope_scaling"]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "setting", "named", "neutral"),
    [
        ("llama3", {"logit_scale": 0.5}, "logit_scale=0.5", {"logit_scale": 1.0}),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50", {"x_scale": None}),
        (
            "llama3",
            {"scale_emb": 12, "residual_multiplier": 0.2},
            "scale_emb=12, residual_mult",
            {},
        ),
        ("llama3", {"use_qk_norm": True}, "use_qk_norm=True", {"use_qk_norm": False}),
        ("llama3", {"attention_sink_size": 4}, "attention_sink_size=4", {"planted_setting": 3}),
        ("llama3", {"hidden_activation": "gelu"}, "hidden_activ", {"hidden_activation": "silu"}),
        ("llama3", {"num_experts_per_tok": 3}, "num_experts_per_tok=3", {"attention_dropout": 0.1}),
        ("llama3", WINDOW, "layer_types=", {"sliding_window": 8}),
        ("llama3", {"partial_rotary_factor": 0.5}, "rope.partial", {"partial_rotary_factor": 1.0}),
        (
            "llama3",
            {"rope_scaling": {"factor": 4}},
            "rope.factor=4",
            {"rope_scaling": {"factor": 1}},
        ),
        ("llama3", {"rope_scaling": {"type": "warp"}}, "rope_type='warp'", {"rope_scaling": None}),
        ("llama3.1", {"rope_scaling": LLAMA3 | {"mscale": 0.7}}, "rope.mscale=0.7", {}),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'", {}),
    ],
)
def test_a_setting_that_transformers_ignores_is_refused_and_its_neutral_value_passes(
    family: str, setting: dict, named: str, neutral: dict, tmp_path: Path
):
    with pytest.raises(InputError, match="every setting of a config must be honoured") as caught:
        read(tmp_path, FAMILIES[family] | setting)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    read(tmp_path, FAMILIES[family] | neutral)
