"""Attention that gives each node of a tree, bit for bit, the result of decoding it alone.

See docs/losslessness.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from specheads.base.masks import refuse_special
from specheads.core.errors import InputError

BLOCK = 32
"""The part of the text that all nodes read at once is a multiple of this, in slots. Slots whose
numbers differ by a multiple of it are added up in the same lane of a vector."""
TAIL = 192
"""Most slots of the part that is laid out for the nodes: two blocks of text, and four for siblings.
Products over more slots are summed in two halves."""
ROWS = 4
"""The number of nodes in a product is a multiple of this: fewer than four rows are summed in
another order."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes of one row that read the same slots."""

    row: int
    nodes: Tensor
    """The nodes, the last one repeated up to a multiple of `ROWS`."""
    count: int
    """Number of nodes without the repeated ones."""
    shared: int
    """All nodes read the first so many slots of the row together."""
    slots: Tensor
    """(tail,): the slots of the row that they read after these; 0 if unused."""
    unused: Bool[Tensor, " tail"]
    whole: bool
    """Whether these are all nodes of the row, in order, and none is repeated."""


class ExactAttention:
    """Attention of one tree over a cache, in the order of sums of single steps.

    The order of a sum depends on the position in the text only. A node at position p reads the text
    in two parts. The first has the blocks of `BLOCK` slots before the one that precedes p's. The
    other has at most `TAIL` slots: the rest of the text, then each node behind its parent, in a
    slot that differs from its position by a multiple of `BLOCK`. Slots that a node does not see add
    zeros. Both parts are joined by their sums of exponentials.
    """

    def __init__(self, ancestors: Bool[Tensor, "batch node node"], lengths: list[int]) -> None:
        self._groups = [
            group
            for row, (length, reach) in enumerate(zip(lengths, ancestors.tolist(), strict=True))
            for group in _groups(row, length, reach)
        ]
        self._whole = len(self._groups) == 1 and self._groups[0].whole
        self._masks = WeakTensorKeyDictionary()

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention; arguments are those of `grouped_attention`."""
        refuse_special(settings, "exact=true")
        heads, shared = query.shape[1], key.shape[1]
        if attention_mask not in self._masks:
            # the layers of a forward share their masks
            self._masks[attention_mask] = _masks(self._groups, attention_mask, heads // shared)
        found = [
            _read(group, query, key, value, masks, scaling)
            for group, masks in zip(self._groups, self._masks[attention_mask], strict=True)
        ]
        if self._whole:
            return found[0][None].contiguous(), None
        out = query.new_zeros(len(query), query.shape[2], heads, value.shape[-1])
        for group, one in zip(self._groups, found, strict=True):
            out[group.row, group.nodes[: group.count]] = one[: group.count]
        return out, None


def _read(
    group: _Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor, Tensor],
    scaling: float | None,
) -> Tensor:
    """Return what the nodes of a group read: (node, heads, width)."""
    row, bound, (heads, _, width) = group.row, group.shared, query.shape[1:]
    asked = query[row]
    if not group.whole:
        asked = asked.index_select(1, group.nodes)
    asked = asked.reshape(1, key.shape[1], -1, width)
    keys, values = (one[row].index_select(1, group.slots)[None] for one in (key, value))
    found, total = _attend(asked, keys, values, masks[1], scaling)
    if bound:
        keys, values = (one[row : row + 1, :, :bound] for one in (key, value))
        before, weight = _attend(asked, keys, values, masks[0], scaling)
        share = torch.stack([weight, total], -1).softmax(-1)
        found = (before * share[..., :1] + found * share[..., 1:]).to(value.dtype)
    return found.reshape(heads, -1, value.shape[-1]).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Return the result of attention, and the logarithm of each sum of exponentials."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )


def keeps_order(dtype: torch.dtype) -> bool:
    """Return whether attention on this machine sums in an order that depends on positions only."""
    # a few tokens after a text are moved by whole blocks, and read with other numbers of rows
    rows, heads, width, moved = 40, 64, 64, 5
    generator = torch.Generator().manual_seed(0)
    for length in (20, 40, 60):
        query, key, value = (
            torch.randn(1, heads, count, width, generator=generator).to(dtype)
            for count in (rows, length, length)
        )
        expected = None
        for shift in range(0, TAIL - 2 * BLOCK + 1, BLOCK):
            places = [*range(length - moved), *range(length - moved + shift, length + shift)]
            slots = torch.zeros(-(-(places[-1] + 1) // BLOCK) * BLOCK, dtype=torch.long)
            slots[places] = torch.arange(length)
            mask = torch.full((1, 1, rows, len(slots)), torch.finfo(dtype).min, dtype=dtype)
            mask[..., places] = 0
            keys, values = (one.index_select(2, slots) for one in (key, value))
            for first in (0, rows - ROWS, rows - ROWS - 3):
                found = _attend(query[:, :, first:], keys, values, mask[:, :, first:], None)
                expected = expected or found
                if not all(
                    torch.equal(one, whole[:, :, first:])
                    for one, whole in zip(found, expected, strict=True)
                ):
                    return False
    return True


def _groups(row: int, length: int, reach: list[list[bool]]) -> list[_Group]:
    """Return the groups of one row's nodes; absent nodes are in none."""
    paths = {
        node: [one for one in range(node + 1) if seen[one]]
        for node, seen in enumerate(reach)
        if seen[0]
    }
    if max(map(len, paths.values())) > BLOCK + 1:
        raise InputError(
            f"exact=true verifies drafts of at most {BLOCK} tokens; lower the depth of the tree"
        )
    groups: list[tuple[int, list[int], dict[int, int]]] = []
    for node, path in paths.items():
        shared = max(0, (length + len(path) - 1) // BLOCK - 1) * BLOCK
        for bound, nodes, slots in groups:
            if bound == shared and _place(path, length - shared, slots):
                nodes.append(node)
                break
        else:
            slots: dict[int, int] = {}
            _place(path, length - shared, slots)
            groups.append((shared, [node], slots))
    return [_group(row, length, len(reach), *group) for group in groups]


def _place(path: list[int], first: int, slots: dict[int, int]) -> bool:
    """Give each node of a path a slot behind its parent's; return whether there is room for all."""
    placed, taken, last = dict(slots), set(slots.values()), -1
    for depth, node in enumerate(path):
        if node not in placed:
            slot = first + depth
            while slot <= last or slot in taken:
                slot += BLOCK
            if slot >= TAIL:
                return False
            placed[node] = slot
        last = placed[node]
    slots.update(placed)
    return True


def _group(
    row: int, length: int, total: int, shared: int, nodes: list[int], places: dict[int, int]
) -> _Group:
    tail = -(-(max(places.values()) + 1) // BLOCK) * BLOCK
    slots = torch.zeros(tail, dtype=torch.long)
    unused = torch.ones(tail, dtype=torch.bool)
    slots[: length - shared] = torch.arange(shared, length)
    unused[: length - shared] = False
    for node, slot in places.items():
        slots[slot] = length + node
        unused[slot] = False
    padded = nodes + nodes[-1:] * (-len(nodes) % ROWS)
    whole = padded == list(range(total))
    return _Group(row, torch.tensor(padded), len(nodes), shared, slots, unused, whole)


def _masks(groups: list[_Group], mask: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """Return the additive masks of both parts for each group; `heads` share their keys."""
    masks = []
    for group in groups:
        own = mask[group.row, 0].index_select(0, group.nodes)
        last = own.index_select(1, group.slots)
        last.masked_fill_(group.unused, torch.finfo(mask.dtype).min)
        first = own[:, : group.shared]
        masks.append(tuple(one.repeat(heads, 1)[None, None] for one in (first, last)))
    return masks
