"""The reader of traces: token ids that an agent read and wrote, with the mask of what it wrote."""

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from specheads.core.errors import InputError
from specheads.data.bad_rows import join_keys, locate_errors
from specheads.data.conversations import refuse_unread

TURN_COLUMNS = ("tokens", "message_log")
"""Columns of a list of turns, each with `role` and `token_ids`."""
TEXT_COLUMNS = ("messages", "conversations", "conversation", "tools")
"""Columns that hold the same text for people."""


def trace(
    row: Mapping[str, Any], location: str, ignore: Collection[str] = ()
) -> dict[str, list[int]]:
    """Return `input_ids` and `loss_mask` of a row, both as lists of integers.

    The row has these two columns, as speculators writes them, or a list of turns, as in NeMo RL,
    of which those of the assistant are in the loss.
    """
    columns = {
        name: value for name, value in row.items() if name not in ignore and value is not None
    }
    turns = next((name for name in TURN_COLUMNS if isinstance(columns.get(name), list)), "")
    with locate_errors(location):
        if turns and "input_ids" not in columns:
            ids, mask = _join_turns(columns[turns], ignore)
        else:
            ids, mask = columns.get("input_ids"), columns.get("loss_mask")
        if not (ids and _are_integers(ids) and _are_integers(mask)):
            raise InputError(
                "a trace needs input_ids and loss_mask, lists of integers, or tokens, a list of "
                "turns with role and token_ids",
                fault=f"has {join_keys(columns)}",
            )
        if len(ids) != len(mask):
            raise InputError(
                "input_ids and loss_mask must have the same length",
                fault=f"has {len(ids)} and {len(mask)}",
            )
        if wrong := [label for label in mask if label not in (0, 1)]:
            raise InputError("loss_mask must hold 0 and 1 only", fault=f"has {wrong[0]}")
        if not any(mask):
            raise InputError("a trace needs a token in the loss", fault="has a loss_mask of 0 only")
        refuse_unread(columns, {"input_ids", "loss_mask", turns, *TEXT_COLUMNS})
    return {"input_ids": ids, "loss_mask": [*map(int, mask)]}


def _join_turns(turns: list[Any], ignore: Collection[str]) -> tuple[list[int], list[int]]:
    """Return the ids and the mask of all turns one after the other."""
    ids, mask = [], []
    for published in turns:
        turn: dict[str, Any] = dict(published) if isinstance(published, Mapping) else {}
        role, turn_ids = turn.get("role"), turn.get("token_ids")
        default = [int(role == "assistant")] * len(turn_ids if _are_integers(turn_ids) else [])
        turn_mask = turn.get("token_loss_mask", default)
        if not (
            isinstance(role, str)
            and _are_integers(turn_ids)
            and _are_integers(turn_mask, len(turn_ids))
        ):
            raise InputError(
                "each turn of a trace needs role and token_ids, and a token_loss_mask of the same "
                "length or none",
                fault=f"has {published!r:.60}",
            )
        keys = {name: value for name, value in turn.items() if name not in ignore}
        refuse_unread(keys, {"role", "content", "token_ids", "token_loss_mask"})
        ids += turn_ids
        mask += turn_mask
    return ids, mask


def refuse_unknown_ids(ids: list[int], vocab_size: int) -> None:
    """Raise for a trace with an id outside the vocabulary."""
    if unknown := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
        raise InputError(
            f"a trace needs token ids of the base's tokenizer, 0 to {vocab_size - 1}",
            fault=f"has {unknown[0]}",
        )


def _are_integers(value: Any, count: int | None = None) -> TypeGuard[list[int]]:
    is_list = isinstance(value, list) and all(isinstance(number, int) for number in value)
    return is_list and count in (None, len(value))
