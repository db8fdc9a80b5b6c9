"""Errors while reading the files of a base, in one line that names the file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from specheads.core.errors import InputError

REWRITE = "name another, or write the folder again with save_pretrained"
FIX_CONFIG = "fix config.json, or write both again with save_pretrained"
MTP_MODULES = re.compile(r"(model\.)?mtp(_layers\.\d+)?\.")
"""Tensors of a module for multi-token prediction, which a base may contain. transformers ignores
them. A head of kind `mtp` is loaded from it: see heads/kinds/mtp.py."""


@contextmanager
def reading(content: str, source: str, remedy: str = REWRITE) -> Iterator[None]:
    """Name what of a base cannot be read; hide transformers' tables and progress bars."""
    # transformers' switch also changes the Hub client's bars, which may be off already
    shows_bars = logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # unlike Path.exists it accepts a name that is too long
        if isinstance(error, OSError) and not os.path.exists(source):  # noqa: PTH110
            raise InputError(
                f"a base must be a folder, a Hub id or a GGUF file, got {source!r:.200}: there is "
                f"no such folder, and the Hub gives {reason(error)}; correct its name, or "
                "check the network"
            ) from error
        # a damaged file can raise any error in transformers, and a bare Exception in tokenizers
        raise InputError(
            f"a base must be a folder or a Hub id that transformers can load, got "
            f"{source!r:.200}, whose {content} it cannot read ({reason(error)}); {remedy}"
        ) from error
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """Return a library's error message in one short line."""
    return f"{type(error).__name__}: {shorten(str(error), 160)}"


def refuse_mismatch(source: str, info: dict[str, Any], remedy: str = FIX_CONFIG) -> None:
    """Refuse weights that do not match config.json; missing ones would be initialised randomly."""
    shapes = [f"{name} of {[*has]} for {[*wants]}" for name, has, wants in info["mismatched_keys"]]
    unexpected = sorted(info["unexpected_keys"])
    mismatches = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": [name for name in unexpected if not MTP_MODULES.match(name)],
        "of another shape": sorted(shapes),
    }
    listed = [
        f"{mismatch} {', '.join(names[:2])}{f' and {len(names) - 2} more' if names[2:] else ''}"
        for mismatch, names in mismatches.items()
        if names
    ]
    if listed:
        raise InputError(
            f"the weights of a base must match its config.json, and those of {source!r} do not: "
            f"{'; '.join(listed)}; {remedy}"
        )
