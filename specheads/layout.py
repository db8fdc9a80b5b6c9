"""How weights lie in memory: values stay bit for bit, products of a few rows get faster."""

import torch
from torch import nn


def column_major(module: nn.Module) -> None:
    """Store the matrices of all linear layers on a CPU column by column.

    A decode step multiplies a few rows, one a tree node, by each matrix. On CPUs the libraries
    behind torch are slow at that when the matrix lies row by row, as checkpoints have it, and up
    to twice as fast when it lies column by column; one row or hundreds of rows take the same time
    either way. Shapes, values and tying are as before, so nothing else has to know.

    Args:
        module: Changed in place. Parameters that are trained should stay as they are.
    """
    done: dict[int, torch.Tensor] = {}
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu":
            weight = layer.weight
            # a tied matrix is one parameter in several places: it is turned once
            if id(weight) not in done:
                done[id(weight)] = weight
                weight.data = weight.data.t().contiguous().t()
