"""What several processes of one run do together."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from specheads.base.model import FrozenBase
from specheads.config import Base
from specheads.core.errors import InputError

T = TypeVar("T")


def load_base(settings: Base, accelerator: Accelerator) -> FrozenBase:
    """Load a base, by itself onto this process's own device."""
    choices = asdict(settings)
    if choices["device"] == "auto":
        choices["device"] = str(accelerator.device)
    return FrozenBase.load(**choices)


def together(act: Callable[[], T]) -> list[T]:
    """Act on every process and return what each of them got; where one is refused, all are."""
    got: list[T] = []
    refused: tuple[str, str] | None = None
    try:
        got = [act()]
    except InputError as error:
        refused = str(error), error.details
    told = gather_object([(got, refused)])
    for _, refused in told:
        if refused:
            raise InputError(*refused)
    return [one for got, _ in told for one in got]
