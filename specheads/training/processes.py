"""What several processes of one run do together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def naming_lost() -> Iterator[None]:
    """Say in a line that another process of the run ended, where it is missed.

    Over gloo that is seen at once. With NCCL the launcher sees it and ends the others; without one
    they would wait for NCCL's own timeout, ten minutes.
    """
    try:
        yield
    except RuntimeError as error:
        if "by peer" not in str(error):
            raise
        raise InputError(
            "a run needs all its processes, and another one of them ended (it or its machine may "
            "say why); start them again, and the same command goes on"
        ) from error


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
