"""What an engine is made of, refused where it does not fit together or into memory."""

from specheads.base.model import FrozenBase
from specheads.core.bounds import refuse_bytes
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, beside_lookup
from specheads.decoding.trees.tuned import Tuned


def refuse_elsewhere(head: Head, base: FrozenBase) -> None:
    """Refuse a head that lies on another device than its base, or computes in another dtype."""
    parameter = next(head.parameters(), None)
    if parameter is not None and (parameter.dtype, parameter.device) != (base.dtype, base.device):
        raise InputError(
            f"a head decodes in its base's dtype and on its device, got {parameter.dtype} on "
            f"{parameter.device} beside {base.dtype} on {base.device}; load it with "
            "load_head(path, base)"
        )


def default_tree(drafter: Drafter, base: FrozenBase) -> policies.TreePolicy:
    """Return the head's tuned trees where they were measured on such a device, or a chain.

    Another processor or precision may pay for what did not pay there: none is no answer here.
    """
    tuned = drafter.tuned if isinstance(drafter, Head) else None
    if isinstance(tuned, Tuned) and tuned.machine.device == base.device.type:
        policy = tuned.policy()
        if policy.depth or tuned.fits(base.device, base.dtype):
            return policy
    return policies.chain(drafter.depth)


def drafted_by(
    drafter: Drafter | None, tree: policies.TreePolicy | None, base: FrozenBase
) -> tuple[Drafter | None, policies.TreePolicy]:
    """Return who drafts and how drafts grow, but for a tree deeper or wider than can be drafted.

    A tree with copied text has prompt lookup beside the drafter; one that drafts nothing, as is
    best for some tuned heads, has no drafter, which then need not remember the text either.
    """
    if drafter is None:
        return None, policies.NOTHING
    policy = default_tree(drafter, base) if tree is None else tree
    if not isinstance(policy, policies.TreePolicy):
        raise InputError(f"a tree is a TreePolicy, such as policies.chain(3), got {tree!r:.80}")
    if not policy.depth:
        return None, policy
    drafter = beside_lookup(drafter, policy, base)
    held = [(policy.depth, drafter)]
    if policy.copied and isinstance(drafter, Hybrid):
        held.append((policy.own_depth, drafter.head))
    for levels, by in held:
        if levels > by.depth:
            raise InputError(
                f"the tree has {levels} levels but the head drafts {by.depth}; "
                "choose a shallower tree"
            )
    if 0 < drafter.drafted_size < policy.num_guesses:
        raise InputError(
            f"the tree takes {policy.num_guesses} guesses after a node, and the drafter knows "
            f"{drafter.drafted_size} tokens; lower its ranks or branches"
        )
    return drafter, policy


def refuse_larger(
    base: FrozenBase,
    drafter: Drafter | None,
    tree: policies.TreePolicy,
    batch: int,
    length: int,
    slots: int,
) -> None:
    """Refuse what one step of so many rows, and their cache of so many slots, cannot fit."""
    nodes, number = tree.num_nodes, base.dtype.itemsize
    # of each node its mask, its logits and whom it has above; of the drafter one level's logits
    step = nodes * ((length + nodes) * number + base.vocab_size * number + nodes)
    step += tree.num_answers * (drafter.drafted_size if drafter else 0) * number
    refuse_bytes(
        batch * step + slots * base.slot_bytes,
        base.device,
        f"a batch of {batch:.4g} rows of {length:.4g} tokens with trees of {nodes} nodes",
        "lower max_batch, max_length (or max_new_tokens) or the tree's nodes, or take a pool",
    )
