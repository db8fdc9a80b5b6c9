"""The reader of traces: token ids that an agent read and wrote, with the mask of what it wrote."""

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from specheads.core.errors import InputError
from specheads.data.conversations import refuse_unread
from specheads.data.files import located, names

TURNS = ("tokens", "message_log")
"""Columns of a list of turns, each with `role` and `token_ids`."""
SAME_TEXT = ("messages", "conversations", "conversation", "tools")
"""Columns that hold the same text for people."""


def trace(row: Mapping[str, Any], where: str, ignore: Collection[str] = ()) -> dict[str, list[int]]:
    """Return `input_ids` and `loss_mask` of a row, both as lists of integers.

    The row has these two columns, as speculators writes them, or a list of turns, as in NeMo RL,
    of which those of the assistant are in the loss.
    """
    given = {name: one for name, one in row.items() if name not in ignore and one is not None}
    turns = next((name for name in TURNS if isinstance(given.get(name), list)), "")
    with located(where):
        if turns and "input_ids" not in given:
            ids, mask = _joined(given[turns], ignore)
        else:
            ids, mask = given.get("input_ids"), given.get("loss_mask")
        if not (ids and _integers(ids) and _integers(mask)):
            raise InputError(
                "a trace needs input_ids and loss_mask, lists of integers, or tokens, a list of "
                "turns with role and token_ids",
                fault=f"has {names(given)}",
            )
        if len(ids) != len(mask):
            raise InputError(
                "input_ids and loss_mask must have the same length",
                fault=f"has {len(ids)} and {len(mask)}",
            )
        if wrong := [one for one in mask if one not in (0, 1)]:
            raise InputError("loss_mask must hold 0 and 1 only", fault=f"has {wrong[0]}")
        if not any(mask):
            raise InputError("a trace needs a token in the loss", fault="has a loss_mask of 0 only")
        refuse_unread(given, {"input_ids", "loss_mask", turns, *SAME_TEXT})
    return {"input_ids": ids, "loss_mask": [*map(int, mask)]}


def _joined(turns: list[Any], ignore: Collection[str]) -> tuple[list[int], list[int]]:
    """Return the ids and the mask of all turns one after the other."""
    ids, mask = [], []
    for turn in turns:
        given: dict[str, Any] = dict(turn) if isinstance(turn, Mapping) else {}
        role, found = given.get("role"), given.get("token_ids")
        default = [int(role == "assistant")] * len(found if _integers(found) else [])
        own = given.get("token_loss_mask", default)
        if not (isinstance(role, str) and _integers(found) and _integers(own, len(found))):
            raise InputError(
                "each turn of a trace needs role and token_ids, and a token_loss_mask of the same "
                "length or none",
                fault=f"has {turn!r:.60}",
            )
        unread = {name: one for name, one in given.items() if name not in ignore}
        refuse_unread(unread, {"role", "content", "token_ids", "token_loss_mask"})
        ids += found
        mask += own
    return ids, mask


def refuse_unknown_ids(ids: list[int], vocab_size: int) -> None:
    """Raise for a trace with an id outside the vocabulary."""
    if wrong := [one for one in ids if not 0 <= one < vocab_size]:
        raise InputError(
            f"a trace needs token ids of the base's tokenizer, 0 to {vocab_size - 1}",
            fault=f"has {wrong[0]}",
        )


def _integers(value: Any, count: int | None = None) -> TypeGuard[list[int]]:
    is_list = isinstance(value, list) and all(isinstance(one, int) for one in value)
    return is_list and count in (None, len(value))
