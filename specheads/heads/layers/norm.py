"""A norm whose weight may be finer than what it reads."""

from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's own, which warns where 16-bit features meet a weight in float32; same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm in the weight's dtype, and answer in the input's."""
        return super().forward(x.to(self.weight.dtype)).type_as(x)
