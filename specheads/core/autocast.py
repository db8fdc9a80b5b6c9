"""What autocast multiplies in."""

import torch
from torch import Tensor


def as_products(values: Tensor) -> Tensor:
    """Return values in the precision of autocast's products; without autocast as they are.

    Autocast casts what a product reads at each product, and its gradient back: what several read
    is cast once by this. A norm may have left it wider.
    """
    kind = values.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return values
    return values.to(torch.get_autocast_dtype(kind))
