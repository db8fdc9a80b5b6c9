"""Parts that several kinds of head are made of."""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class RMSNorm(nn.RMSNorm):
    """torch's own, which warns where 16-bit features meet a weight in float32; same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm in the weight's dtype, and answer in the input's."""
        return super().forward(x.to(self.weight.dtype)).type_as(x)


class ResidualBlock(nn.Module):
    """R x + SiLU(W x + b): at first the leading channels of its input as they are.

    R is the identity except where the input is wider than the output.

    Args:
        width: Width of the output.
        wide: Width of the input. Zero takes the output's.
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
        """Return the values with what the block has to add."""
        return self.res_connection(values) + F.silu(self.linear(values))
