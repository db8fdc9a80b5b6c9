from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from specheads.base.cache import KVCache
from specheads.base.masks import attention_windows, context_length, tree_mask
from specheads.core.tree import TokenTree
from tests import tiny


def test_a_node_sees_the_committed_text_and_its_path_within_the_window():
    #  row 0 holds 3 tokens, row 1 holds 1      0      the tree of both; by its path
    #                                          / \     node 3 is two after the root,
    #                                         1   2    by its slot it is three
    #                                             |
    #                                             3
    tree = TokenTree(torch.zeros(2, 4, dtype=torch.long), torch.tensor([[-1, 0, 0, 2]] * 2))
    cache = KVCache(num_layers=1, batch=2, capacity=7)
    cache.commit([[0, 1, 2], [0]])
    full, windowed = (
        tree_mask(tree.ancestors(), tree.depths(), cache, window, torch.float64)[:, 0] == 0
        for window in (None, 3)
    )
    assert full.int().tolist() == [
        [
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0, 1, 0],
            [1, 1, 1, 1, 0, 1, 1],
        ],
        [
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 1, 0, 0],
        ],
    ]
    assert windowed.int().tolist() == [
        [
            [0, 1, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 0, 1, 0],
            [0, 0, 0, 1, 0, 1, 1],
        ],
        [
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 0, 1, 0, 0, 0],
            [0, 1, 0, 1, 1, 0, 0],
        ],
    ]


def neo(*kinds: str) -> transformers.PreTrainedModel:
    config = transformers.GPTNeoConfig(attention_types=[[[*kinds], 2 // len(kinds)]], num_layers=2)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_local_layers_are_refused_and_global_ones_are_not():
    with pytest.raises(ValueError, match=r"'gpt_neo' has attention_layers of kind local.*choose"):
        attention_windows(neo("global", "local"))
    assert attention_windows(neo("global")) == {"all": None}


@pytest.mark.parametrize("architecture", ["llama", "granite", "gpt_neox", "gpt2", "mistral"])
def test_a_window_counts_only_where_the_model_reads_it(architecture):
    base = tiny.own_base(architecture, sliding_window=12)
    assert base.windows == {"all": 12 if architecture == "mistral" else None}


class OwnLlama(transformers.LlamaForCausalLM):
    """A class of a user, as in a notebook, whose module may have no source."""

    __module__ = "__main__"


def test_a_class_outside_of_transformers_counts_by_what_it_inherits_from():
    config: Any = tiny.config("llama", sliding_window=12)
    assert attention_windows(OwnLlama(config)) == {"all": None}


def test_a_longrope_base_is_limited_to_its_original_context():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16, "rope_theta": 1e4}
    longrope = SimpleNamespace(max_position_embeddings=64, rope_parameters=rope)
    assert context_length(longrope) == 16
    by_kind = SimpleNamespace(max_position_embeddings=64, rope_parameters={"full": rope})
    assert context_length(by_kind) == 16
    assert context_length(tiny.config("llama")) == context_length(tiny.config("gpt2")) == 128
