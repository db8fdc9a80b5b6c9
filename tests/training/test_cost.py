"""FLOPs of a step: by hand for small shapes, and as counted by torch."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from specheads.heads.load import build_for, kinds
from specheads.training.cost import _multiplied, matmul_rate, step_flops
from specheads.training.settings import Phase
from tests import tiny
from tests.packed import alone, packed, texts


def phase(**settings) -> Phase:
    return Phase(text="corpus", steps=1, batch_size=2, sequence_length=40, **settings)


# gpt2 uses Conv1D layers
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_base_flops_equal_torchs_except_masked_attention(architecture: str):
    base, batch = tiny.base(architecture, attention="eager"), alone(texts())
    head = build_for({"kind": "medusa", "depth": 2}, base, None)
    with FlopCounterMode(display=False) as counter:
        base.read(batch.tokens)
    config, (rows, time) = base.config, batch.tokens.shape
    width = config.num_attention_heads * 8
    square = 4 * rows * time**2 * width * config.num_hidden_layers
    causal = 4 * rows * time * (time + 1) / 2 * width * config.num_hidden_layers
    found = step_flops(base, head, batch, phase()).base
    # transformers 5.17 makes the angles of the positions by a product, too
    assert found == pytest.approx(counter.get_total_flops() - square + causal, rel=1e-4)


def test_expert_matrices_count_and_embeddings_do_not():
    experts, table, quantised = nn.Module(), nn.Embedding(9, 4), nn.Linear(6, 4)
    experts.gate_up, experts.bias = nn.Parameter(torch.ones(3, 4, 5)), nn.Parameter(torch.ones(3))
    quantised.weight = nn.Parameter(torch.ones(12, 1))
    layers = experts, table, quantised, nn.LayerNorm(4), nn.Sequential(experts)
    assert [_multiplied(one) for one in layers] == [60, 0, 24, 0, 0]


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy"])
def test_vocabulary_flops_depend_on_labels(loss: str):
    base, batch = tiny.base(), packed(texts())
    made = {"kind": "mlp_speculator", "depth": 2, "inner_dim": 24}
    head = build_for(made, base, None)
    rows = int(batch.loss_mask.sum())
    teacher = 2 * rows * tiny.VOCAB * base.width if loss == "soft_cross_entropy" else 0
    found = step_flops(base, head, batch, phase(loss=loss, scored_share=0.5))
    assert found.loss == 0.5 * (teacher + 2 * 3 * 2 * rows * tiny.VOCAB * 24)
    assert found.total == found.base + found.head + found.loss


@pytest.mark.parametrize("kind", kinds())
def test_all_kinds_have_flops(kind: str):
    base = tiny.base()
    head = build_for({"kind": kind, "depth": 3}, base, None)
    assert step_flops(base, head, packed(texts()), phase()).head > 0


def test_anchor_heads_flops_depend_on_anchors():
    base, batch = tiny.base(), packed(texts())
    few, many = (
        step_flops(
            base,
            build_for({"kind": "dflash", "depth": 3, "num_anchors": most}, base),
            batch,
            phase(),
        )
        for most in (4, 8)
    )
    assert many.loss == 2 * few.loss
    assert few.head < many.head < 2 * few.head  # keys and values of the text are the same


def test_matmul_rate_is_positive():
    assert matmul_rate(torch.device("cpu"), torch.float32) > 1e6
