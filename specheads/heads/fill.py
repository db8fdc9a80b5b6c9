"""Tensors into a head, name by name: what is missing, left over or misshapen is refused."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specheads.core.drafter import Head
from specheads.core.errors import InputError


def fill(head: Head, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a head, name by name; nothing may be missing, left over or misshapen.

    The head may be one without memory, of the meta device: its tensors are replaced.

    Raises:
        ValueError: Names the first tensor that does not fit.
    """
    wanted = head.state_dict()
    if missing := sorted(set(wanted) - set(tensors)):
        raise InputError(f"the checkpoint lacks {missing[0]!r}; it is incomplete or another kind's")
    if extra := sorted(set(tensors) - set(wanted)):
        raise InputError(f"the checkpoint has {extra[0]!r}, which this head does not use")
    for name, value in wanted.items():
        if value.shape != tensors[name].shape:
            raise InputError(
                f"{name!r} must have shape {tuple(value.shape)}, got {tuple(tensors[name].shape)}"
            )
    _check_draft_ids(head, tensors.get("draft_ids"))
    copies = {name: tensors[name].to(value.dtype, copy=True) for name, value in wanted.items()}
    head.load_state_dict(copies, assign=True)


def take_maps(head: Head, named: dict[str, Tensor]) -> None:
    """Put the tokens a head can draft in the place of the maps d2t and t2d that say them.

    Raises:
        ValueError: The maps contradict each other.
    """
    marks, offsets = named.pop("t2d", None), named.pop("d2t", None)
    if offsets is None:
        return
    if len(offsets) != head.drafted_size:
        raise InputError(
            f"d2t must name {head.drafted_size} tokens, got {len(offsets)}; repair the maps"
        )
    # the i-th draft token is token i + d2t[i] of the base
    ids = torch.arange(head.drafted_size, device=offsets.device) + offsets
    if marks is not None and not torch.equal(marks.nonzero()[:, 0], ids):
        raise InputError("d2t and t2d must name the same tokens, in order; repair the maps")
    if head.draft_ids is not None:
        named["draft_ids"] = ids


def _check_draft_ids(head: Head, ids: Tensor | None) -> None:
    if ids is None:
        return
    inside = ids[0] >= 0 and ids[-1] < head.vocab_size
    if ids.is_floating_point() or not inside or (ids.diff() < 1).any():
        raise InputError(
            f"tokens that can be drafted must grow within 0 and {head.vocab_size}; repair the "
            "checkpoint's map"
        )
