"""Reading what belongs to a base: what is wrong is told by name, in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from specheads.core.errors import InputError

ANEW = "name another, or write the folder anew with save_pretrained"
MENDED = "mend config.json, or write both anew with save_pretrained"

BESIDE = re.compile(r"(model\.)?mtp(_layers\.\d+)?\.")
"""Names in a module for multi-token prediction, which a base may come with and has no place for: a
head of kind `mtp` is read from it (heads/kinds/mtp.py)."""


@contextmanager
def reading(part: str, source: str, remedy: str = ANEW) -> Iterator[None]:
    """Tell by name which part of a base cannot be read; keep transformers' tables and bars back."""
    # transformers' switch turns the Hub client's bars too, and not every reader has those on
    shows_bars = logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # a damaged file brings any error out of transformers, and a bare one out of tokenizers
        raise InputError(
            f"a base must be a folder or a Hub id that transformers can load, got "
            f"{source!r:.200}, whose {part} it cannot read ({reason(error)}); {remedy}"
        ) from error
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """Return in one short line what a library says of a file."""
    return f"{type(error).__name__}: {shorten(str(error), 160)}"


def refuse_unwhole(source: str, told: dict[str, Any], remedy: str = MENDED) -> None:
    """Refuse weights that are not those of the settings: what is lacking would be random."""
    shapes = [f"{name} of {[*has]} for {[*wants]}" for name, has, wants in told["mismatched_keys"]]
    unexpected = sorted(told["unexpected_keys"])
    parts = {
        "lack": sorted(told["missing_keys"]),
        "have too much with": [name for name in unexpected if not BESIDE.match(name)],
        "have in another shape": sorted(shapes),
    }
    if strange := {what: names for what, names in parts.items() if names}:
        listed = ", and ".join(
            f"{what} {', '.join(names[:2])}{f' and {len(names) - 2} more' if names[2:] else ''}"
            for what, names in strange.items()
        )
        raise InputError(
            f"a base must be whole: beside its settings the weights of {source!r} {listed}; "
            f"{remedy}"
        )
