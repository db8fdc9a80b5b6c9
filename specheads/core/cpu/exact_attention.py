"""Attention that gives each node of a tree, bit for bit, the result of decoding it alone.

See docs/losslessness.md.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.kernels import AttentionInputs, refuse_changed_scores

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
class _NodeGroup:
    """Nodes of one row that read the same slots."""

    row: int
    nodes: Int[Tensor, " node"]
    """The nodes, the last one repeated up to a multiple of `ROWS`."""
    num_nodes: int
    """Number of nodes without the repeated ones."""
    num_shared: int
    """Number of first slots of the row that all nodes read together."""
    tail_slots: Int[Tensor, " tail"]
    """The slots of the row that they read after these; 0 if unused."""
    unused: Bool[Tensor, " tail"]


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
            for row, (length, visible) in enumerate(zip(lengths, ancestors.tolist(), strict=True))
            for group in _group_nodes(row, length, visible)
        ]
        self._masks: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}
        """Masks, and the masks of both parts of each group: most layers share theirs."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention (batch, node, heads, width)."""
        refuse_changed_scores(inputs, "exact=true")
        query, mask, heads = inputs.query, inputs.mask, inputs.query.shape[1]
        if id(mask) not in self._masks:
            group_masks = _split_mask(self._groups, mask, heads // inputs.key.shape[1])
            self._masks[id(mask)] = mask, group_masks
        out = query.new_zeros(len(query), query.shape[2], heads, inputs.value.shape[-1])
        for group, masks in zip(self._groups, self._masks[id(mask)][1], strict=True):
            mixed = _attend_group(group, inputs, masks)
            out[group.row, group.nodes[: group.num_nodes]] = mixed[: group.num_nodes]
        return out


def _attend_group(
    group: _NodeGroup, inputs: AttentionInputs, masks: tuple[Tensor, Tensor]
) -> Tensor:
    """Return attention of the nodes of a group: (node, heads, width)."""
    _, query, key, value, _, scaling, _ = inputs
    row, num_shared, (heads, _, width) = group.row, group.num_shared, query.shape[1:]
    queries = query[row].index_select(1, group.nodes).reshape(1, key.shape[1], -1, width)
    keys, values = (states[row].index_select(1, group.tail_slots)[None] for states in (key, value))
    mixed, log_sum = _attend(queries, keys, values, masks[1], scaling)
    if num_shared:
        keys, values = (states[row : row + 1, :, :num_shared] for states in (key, value))
        shared_mixed, shared_log_sum = _attend(queries, keys, values, masks[0], scaling)
        weights = torch.stack([shared_log_sum, log_sum], -1).softmax(-1)
        mixed = (shared_mixed * weights[..., :1] + mixed * weights[..., 1:]).to(value.dtype)
    return mixed.reshape(heads, -1, value.shape[-1]).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Return the result of attention, and the logarithm of each sum of exponentials."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )


def keeps_order(dtype: torch.dtype) -> bool:
    """Return whether attention on this machine sums in an order that depends on positions only."""
    # a few tokens after a text are moved by multiples of a block, and read with other numbers of
    # rows
    rows, heads, width, num_moved = 40, 64, 64, 5
    generator = torch.Generator().manual_seed(0)
    for length in (20, 40, 60):
        query, key, value = (
            torch.randn(1, heads, count, width, generator=generator).to(dtype)
            for count in (rows, length, length)
        )
        expected = None
        for shift in range(0, TAIL - 2 * BLOCK + 1, BLOCK):
            start = length - num_moved
            positions = [*range(start), *range(start + shift, length + shift)]
            slots = torch.zeros(-(-(positions[-1] + 1) // BLOCK) * BLOCK, dtype=torch.long)
            slots[positions] = torch.arange(length)
            mask = torch.full((1, 1, rows, len(slots)), torch.finfo(dtype).min, dtype=dtype)
            mask[..., positions] = 0
            keys, values = (states.index_select(2, slots) for states in (key, value))
            for first in (0, rows - ROWS, rows - ROWS - 3):
                result = _attend(query[:, :, first:], keys, values, mask[:, :, first:], None)
                expected = expected or result
                if not all(
                    torch.equal(actual, of_all_rows[:, :, first:])
                    for actual, of_all_rows in zip(result, expected, strict=True)
                ):
                    return False
    return True


def _group_nodes(row: int, length: int, visible: list[list[bool]]) -> list[_NodeGroup]:
    """Return the groups of one row's nodes; absent nodes are in none."""
    paths = {
        node: [ancestor for ancestor in range(node + 1) if sees[ancestor]]
        for node, sees in enumerate(visible)
        if sees[0]
    }
    if max(map(len, paths.values())) > BLOCK + 1:
        raise InputError(
            f"exact=true verifies drafts of at most {BLOCK} tokens; lower the depth of the tree"
        )
    groups: list[tuple[int, list[int], dict[int, int]]] = []
    for node, path in paths.items():
        num_shared = max(0, (length + len(path) - 1) // BLOCK - 1) * BLOCK
        for group_shared, nodes, slots in groups:
            if group_shared == num_shared and _assign_slots(path, length - num_shared, slots):
                nodes.append(node)
                break
        else:
            slots: dict[int, int] = {}
            _assign_slots(path, length - num_shared, slots)
            groups.append((num_shared, [node], slots))
    return [_node_group(row, length, *group) for group in groups]


def _assign_slots(path: list[int], first_slot: int, slots: dict[int, int]) -> bool:
    """Give each node of a path a slot behind its parent's; return whether there is room for all."""
    assigned, occupied, parent_slot = dict(slots), set(slots.values()), -1
    for depth, node in enumerate(path):
        if node not in assigned:
            slot = first_slot + depth
            while slot <= parent_slot or slot in occupied:
                slot += BLOCK
            if slot >= TAIL:
                return False
            assigned[node] = slot
        parent_slot = assigned[node]
    slots.update(assigned)
    return True


def _node_group(
    row: int, length: int, num_shared: int, nodes: list[int], slots: dict[int, int]
) -> _NodeGroup:
    tail = -(-(max(slots.values()) + 1) // BLOCK) * BLOCK
    tail_slots = torch.zeros(tail, dtype=torch.long)
    unused = torch.ones(tail, dtype=torch.bool)
    tail_slots[: length - num_shared] = torch.arange(num_shared, length)
    unused[: length - num_shared] = False
    for node, slot in slots.items():
        tail_slots[slot] = length + node
        unused[slot] = False
    padded = torch.tensor(nodes + nodes[-1:] * (-len(nodes) % ROWS))
    return _NodeGroup(row, padded, len(nodes), num_shared, tail_slots, unused)


def _split_mask(
    groups: list[_NodeGroup], mask: Tensor, num_queries_per_key: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the additive masks of the shared slots and of the tail, for each group."""
    masks = []
    for group in groups:
        node_mask = mask[group.row, 0].index_select(0, group.nodes)
        tail = node_mask.index_select(1, group.tail_slots)
        tail.masked_fill_(group.unused, torch.finfo(mask.dtype).min)
        pair = node_mask[:, : group.num_shared], tail
        masks.append(
            tuple(part_mask.repeat(num_queries_per_key, 1)[None, None] for part_mask in pair)
        )
    return masks
