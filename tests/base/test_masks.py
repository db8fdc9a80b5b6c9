from typing import Any

import pytest
import torch
import transformers

from specheads.base.masks import attention_windows
from tests import tiny


def neo(*kinds: str) -> transformers.PreTrainedModel:
    config = transformers.GPTNeoConfig(attention_types=[[[*kinds], 2 // len(kinds)]], num_layers=2)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_local_layers_are_refused_and_global_ones_are_not():
    with pytest.raises(ValueError, match=r"'gpt_neo' has attention_layers of kind local.*choose"):
        attention_windows(neo("global", "local"))
    assert attention_windows(neo("global")) == {"all": None}


@pytest.mark.parametrize(
    ("architecture", "window"),
    [
        *((name, None) for name in ("llama", "granite", "gpt_neox", "gpt2", "olmoe", "olmo2")),
        *((name, None) for name in ("gpt_bigcode", "granitemoe")),
        *((name, 12) for name in ("mistral", "phi3", "starcoder2", "mixtral")),
    ],
)
def test_a_window_counts_only_where_the_model_reads_it(architecture, window):
    base = tiny.own_base(architecture, sliding_window=12)
    assert base.windows == {"all": window}


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"use_sliding_window": False}, {"full_attention": None}),
        ({"use_sliding_window": True, "max_window_layers": 3}, {"full_attention": None}),
        (
            {"use_sliding_window": True, "max_window_layers": 1},
            {"full_attention": None, "sliding_attention": 12},
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_layers_with_a_window_are_those_of_the_config(architecture, settings, windows):
    base = tiny.own_base(architecture, sliding_window=12, **settings)
    assert base.windows == windows


class OwnLlama(transformers.LlamaForCausalLM):
    """A class of a user, as in a notebook, whose module may have no source."""

    __module__ = "__main__"


def test_a_class_outside_of_transformers_counts_by_what_it_inherits_from():
    config: Any = tiny.config("llama", sliding_window=12)
    assert attention_windows(OwnLlama(config)) == {"all": None}
