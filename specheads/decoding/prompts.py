"""Prompts as they come in: lists, tuples, ranges, arrays and tensors of whole numbers."""

from collections.abc import Sequence
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.bounds import whole
from specheads.core.errors import InputError


def token_ids(given: Any, name: str) -> list[int]:
    """Return token ids in a row as plain numbers; `name` says which row is refused."""
    ids = _listed(given, name, "base.tokenizer(text).input_ids")
    for place, one in enumerate(ids):
        if type(one) is not int or one < 0:
            if getattr(one, "ndim", None) or (isinstance(one, Sequence) and not _is_text(one)):
                raise InputError(
                    f"{name} must be one list of token ids, got a list at place {place}; give "
                    "several prompts to generate, or a request for each"
                )
            ids[place] = whole(one, f"token {place} of {name}")
    return ids


def read_prompts(base: FrozenBase, given: Any) -> list[list[int]]:
    """Return prompts as lists of token ids that the base knows; the first wrong one is told."""
    rows = _listed(given, "prompts", "[base.tokenizer(text).input_ids]")
    if rows and not _is_text(rows[0]) and not hasattr(rows[0], "__len__"):
        raise InputError(
            f"prompts must be a list of prompts, got one with {rows[0]!r:.80} in place of a list; "
            "for a single prompt of token ids give [prompt]"
        )
    prompts = [token_ids(row, f"prompt {number}") for number, row in enumerate(rows)]
    for number, prompt in enumerate(prompts):
        refuse_unknown(base, prompt, f"prompt {number}")
    return prompts


def refuse_unknown(base: FrozenBase, ids: list[int], name: str) -> None:
    """Refuse token ids beyond the vocabulary: nothing is embedded for them."""
    size = len(base.embedding)
    if ids and max(ids) >= size:
        place = next(place for place, one in enumerate(ids) if one >= size)
        raise InputError(
            f"token ids must lie within the base's vocabulary of {size}, got {ids[place]} at place "
            f"{place} of {name}; use this base's own tokenizer"
        )


def _is_text(given: Any) -> bool:
    return isinstance(given, str | bytes | bytearray)


def _listed(given: Any, name: str, remedy: str) -> list[Any]:
    if hasattr(given, "tolist"):
        given = given.tolist()
    if _is_text(given) or not isinstance(given, Sequence):
        raise InputError(
            f"{name} must be a list of token ids, got {type(given).__name__} {given!r:.60}; "
            f"tokenise text first: {remedy}"
        )
    return list(given)
