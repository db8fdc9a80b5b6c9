"""Settings of public heads: every one is used, without effect, or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from specheads.core.errors import InputError
from specheads.heads.load import load_head
from tests.heads.golden import changed

CASES = (
    *("medusa_heads", "hydra_prefix_mlp", "mlp_speculator_tied_scaled", "redrafter_rnn"),
    *("eagle3_chain", "eagle3_speculators_ttt", "peagle", "mtp_mimo", "mtp_speculators"),
    *("mtp_deepseek", "dflash_z_lab", "dflash_deepspec", "dflash_window", "dflash_modelopt"),
    *("dspark_deepspec", "dflash2_speculators", "domino_modelopt"),
)
INNER, EAGLE, DFLASH = "transformer_layer_config", "eagle_config", "dflash_config"


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_head(folder)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_unknown_settings_are_refused_together_by_name(case: str, tmp_path: Path):
    off: dict[str, Any] = {"a": None, "b": False, "c": "", "d": [], "e": {}}
    load_head(changed(case, tmp_path / "1", **off))
    planted = off | {"planted_setting": 3, "attention_planted": "x"}
    message = refusal(changed(case, tmp_path / "2", **planted))
    assert "not support planted_setting=3, attention_planted='x';" in message


WINDOW = {"sliding_window": 2048, "layer_types": ["sliding_attention"]}
CHUNKS = WINDOW | {"layer_types": ["chunked_attention"]}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("case", "section", "setting", "neutral"),
    [
        ("medusa_heads", "", {"logit_scale": 0.5}, {"logit_scale": 1.0}),
        ("medusa_heads", "", {"medusa_fc_bias": False}, {"medusa_fc_bias": True}),
        ("medusa_heads", "", {"truncated_vocab_size": 99}, {"hidden_size": 48, "vocab_size": 211}),
        ("hydra_mlp", "", {"hydra_embedding": "own"}, {"dropout_rate": 0.1}),
        ("mlp_speculator_untied", "", {"tie_lstm_embs": True}, {"tie_lstm_embs": False}),
        ("redrafter_rnn", "", {"beam_width": 20}, {"num_lookback_tokens": 4}),
        ("eagle3_chain", "", {"logit_scale": 0.5}, {"logit_scale": 1.0}),
        ("eagle3_chain", "", {"sliding_window": 512}, {"use_sliding_window": False}),
        ("eagle3_chain", EAGLE, {"use_mtp_layernorm": True}, {"use_mtp_layernorm": False}),
        ("eagle3_chain", EAGLE, {"use_last_layernorm": False}, {"use_last_layernorm": True}),
        ("eagle3_chain", EAGLE, {"planted_setting": 3}, {"parallel_draft_step": 1}),
        ("eagle3_chain", "", {"rope_scaling": {"factor": 4.0}}, {"rope_scaling": {"factor": 1}}),
        ("eagle3_chain", "rope_scaling", {"type": "longrope"}, {"type": "mrope"}),
        ("eagle3_speculators_ttt", INNER, CHUNKS, {"layer_types": ["full_attention"]}),
        ("eagle3_speculators_ttt", INNER, WINDOW | {"sliding_window": 1.5}, WINDOW),
        ("peagle", INNER, CHUNKS, MIXED),
        ("dflash_window", INNER, CHUNKS, MIXED),
        ("dspark_deepspec", "", {"use_confidence_head": False}, {"enable_confidence_head": None}),
        ("dspark_deepspec", DFLASH, {"projector_type": "domino"}, {"projector_type": "dspark"}),
        ("peagle", INNER, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}),
        ("mtp_mimo", "", {"use_sliding_window": True}, {"max_window_layers": 2}),
        ("mtp_deepseek", "", {"scoring_func": "softmax"}, {"n_shared_experts": None}),
        ("peagle", "speculators_config", {"planted_setting": 3}, {"algorithm": "peagle"}),
        ("mtp_speculators", INNER, {"final_logit_softcapping": 30.0}, {"num_labels": None}),
        ("eagle3_chain", "", {"rope_is_neox_style": False}, {"rope_is_neox_style": True}),
        ("dflash_z_lab", "", {"is_neox_style": False}, {"is_neox_style": True}),
        ("dflash_z_lab", "", WINDOW, {"num_target_layers": 9}),
        ("dflash_z_lab", DFLASH, {"projector_type": "domino"}, {"projector_type": "dflash"}),
        ("dflash_z_lab", DFLASH, {"causal": True}, {"causal": False}),
        ("dflash_z_lab", DFLASH, {"swa_window_size": 64}, {"attention_sink_bias": False}),
        ("dflash_window", "", {"use_swa": True}, {"use_swa": False}),
        ("dflash_modelopt", "", {"layer_types": MIXED["layer_types"]}, {"is_causal": False}),
        ("eagle3_chain", "", {"attention_sink_bias": True}, {"attention_sink_bias": False}),
        ("dflash_deepspec", "", {"final_logit_softcapping": 20.0}, {"output_multiplier": 1}),
        ("dspark_deepspec", "", {"attention_mode": "mla"}, {"attention_mode": "gqa"}),
        ("dflash2_speculators", "", {"final_logit_softcapping": 20.0}, {"output_multiplier": 1}),
        ("domino_modelopt", DFLASH, {"projector_type": "dspark"}, {"projector_type": "domino"}),
        ("domino_modelopt", "", {"selector_top_k": 4}, {"emb_dim": 6}),
        ("dspark_deepspec", DFLASH, {"selector_rank": 256}, {"confidence_head_alpha": 1.0}),
    ],
)
def test_a_setting_that_changes_drafts_is_refused_and_its_neutral_value_passes(
    case: str, section: str, setting: dict, neutral: dict, tmp_path: Path
):
    message = refusal(changed(case, tmp_path / "1", section, **setting))
    inner = setting.get("rope_scaling", setting)
    assert all(f"{name}=" in message or repr(value) in message for name, value in inner.items())
    load_head(changed(case, tmp_path / "2", section, **neutral))


MODELOPT = {
    **{"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True},
    **{"use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True},
    **{"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1, "has_lm_head": False},
}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("eagle3_chain", {EAGLE: MODELOPT}),
        ("eagle3_chain", {"num_local_experts": 16, "experts_per_token": 4, "num_beams": 1}),
        # Medusa 1.0 has the config of its base
        ("medusa_heads", {"hidden_act": "silu", "rope_theta": 1e4, "sliding_window": 4096}),
        ("medusa_heads", {"model_type": "medusa", "topk": 10, "max_paths": 64}),
        ("mlp_speculator_untied", {"base_model_name_or_path": "ibm-granite/granite-20b"}),
        ("mtp_mimo", {"use_sliding_window": False, "max_window_layers": 36}),
    ],
)
def test_published_configs_load(case: str, settings: dict, tmp_path: Path):
    load_head(changed(case, tmp_path, **settings))
