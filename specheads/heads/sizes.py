"""A head's sizes, before memory is taken for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specheads.core.bounds import host_bytes
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.heads.untrusted import first_line

TRAINING_BYTES = 16
"""Of a parameter while it is trained: itself, its gradient and AdamW's two moments, in float32."""

UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What settings raise that describe nothing."""


@contextmanager
def planning(what: str) -> Iterator[None]:
    """Make heads without memory; whatever their sizes and names raise is one line."""
    try:
        with torch.device("meta"):
            yield
    except InputError:
        raise
    except UNFIT as error:
        raise InputError(
            f"{what} describe no head: {type(error).__name__} {first_line(error)}; mend them"
        ) from error


def refuse_too_large(head: Head, device: torch.device) -> None:
    """Refuse a head that cannot be trained in the memory of a device."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()
    if (needed := TRAINING_BYTES * parameters) > there:
        raise InputError(
            f"a head must fit in memory, and one of {parameters:,} parameters takes "
            f"{needed / 2**30:,.1f} GiB of the {there / 2**30:,.1f} that {device} has; lower "
            "depth, num_layers or the widths under head="
        )
