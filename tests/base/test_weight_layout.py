import torch
from torch import nn

from specheads.base.weight_layout import column_major


def test_weights_lie_by_column_and_are_the_same_bit_for_bit():
    torch.manual_seed(0)
    first = nn.Linear(5, 7)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(7, 3, bias=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = torch.randn(4, 5)
    wanted = model(rows)
    column_major(model)
    assert first.weight.stride() == (1, 7)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(rows), wanted)


def test_a_tied_matrix_stays_tied():
    embedding, projection = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    projection.weight = embedding.weight
    column_major(nn.ModuleList([embedding, projection]))
    assert projection.weight is embedding.weight
    assert projection.weight.stride() == (1, 7)
