"""Mixture-of-experts bases: the code that computes the experts, and what rounding does to them."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specheads.base.experts import experts_of
from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from tests import tiny
from tests.core.test_exact_attention import PARENTS, assert_single_steps, rows


@pytest.mark.parametrize(
    ("dtype", "changes", "chosen"),
    [
        (torch.float64, {}, "eager"),
        (torch.float32, {}, "grouped_mm"),
        (torch.bfloat16, {}, "grouped_mm"),
        # rows of 24 bytes
        (torch.bfloat16, {"moe_intermediate_size": 12}, "eager"),
    ],
)
def test_experts_are_grouped_where_torch_computes_it(dtype, changes, chosen):
    base = tiny.own_base("qwen3_moe", dtype=dtype, **changes)
    assert base.config._experts_implementation == chosen


@pytest.mark.parametrize("always", [False, True])
def test_base_is_refused_only_if_every_text_gives_a_path_other_logits(always: bool):
    model = AutoModelForCausalLM.from_config(tiny.config("mixtral"), dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.mul_(9)
    trees = 0

    def reroute(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Send the nodes of a tree, of the first one or of all, to other experts."""
        nonlocal trees
        hidden, chosen, shares = inputs
        if len(hidden) != 6:
            return None
        trees += 1
        return (hidden, (chosen + 1) % 4, shares) if always or trees == 1 else None

    experts_of(model)[0].register_forward_pre_hook(reroute)
    if always:
        with pytest.raises(InputError, match="'mixtral' does not compute a path in a tree"):
            FrozenBase(model)
    else:
        FrozenBase(model)
    assert trees == (3 if always else 2)


def exact_base(architecture: str, seed: int, experts: int) -> FrozenBase:
    """Return a base with matrices large enough for oneDNN; `experts` is the width of an expert."""
    setting = "num_local_experts" if architecture in ("mixtral", "granitemoe") else "num_experts"
    sizes = {"hidden_size": 192, "intermediate_size": experts, "num_attention_heads": 6}
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = experts // 2
    torch.manual_seed(seed)
    config = tiny.config(architecture, head_dim=32, **sizes | {setting: 16})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(4.0)
    return FrozenBase(model, exact=True)


@pytest.mark.parametrize(
    ("architecture", "seeds"),
    [
        ("mixtral", [3]),
        *(pytest.param(name, range(20), marks=pytest.mark.slow) for name in tiny.EXPERTS),
    ],
)
def test_exact_bases_do_not_depend_on_the_rows_of_an_expert(
    architecture: str, seeds: list[int] | range
):
    for seed in seeds:
        # narrow, so that one row and two rows are multiplied by different code
        assert_single_steps(exact_base(architecture, seed, 48), [37], rows, PARENTS)
