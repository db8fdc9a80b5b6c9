"""Small parts that several kinds of head use."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Nodes


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm for inputs of another dtype than its weight, for which torch's own warns."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in the dtype of the weight; return the dtype of the input."""
        return super().forward(x.to(self.weight.dtype)).type_as(x)


class ResidualBlock(nn.Module):
    """R x + SiLU(W x + b), the block of Medusa, Hydra and ReDrafter.

    R is the identity unless the input is `wide`. The block is initialised to return the leading
    channels of its input.
    """

    def __init__(self, width: int, wide: int = 0) -> None:
        super().__init__()
        wide = wide or width
        self.linear = nn.Linear(wide, width)
        self.res_connection = nn.Linear(wide, width) if wide > width else nn.Identity()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if wide > width:
            nn.init.eye_(self.res_connection.get_parameter("weight"))

    def forward(self, values: Tensor) -> Tensor:
        """Return the output of the block."""
        return self.res_connection(values) + F.silu(self.linear(values))


def pick_parents(
    state: Float[Tensor, "batch level width"], parents: Nodes
) -> Float[Tensor, "batch node width"]:
    """Return the state of each node's parent."""
    if state.shape[1] == 1:
        return state.expand(-1, parents.shape[1], -1)
    return state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
