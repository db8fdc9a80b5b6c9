"""Three ways to draft above temperature zero, on the same prompts.

Guesses that see the noise that the base draws with, guesses that do not, and drafts that are drawn
from the drafter's own distribution and tested by rejection.
"""

from dataclasses import asdict

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import own_tree
from specheads.decoding.trees.sampled import Sampled
from specheads.measure.counts import paired_gain, rate
from specheads.measure.how import How
from specheads.measure.online import decode_prompts
from specheads.measure.rates import Drafting
from specheads.measure.speed import Arm


def ways(drafter: Drafter, tree: policies.TreePolicy) -> dict[str, Arm]:
    """Return the three ways, none where the tree drafts nothing.

    Rejection tests one drawn token a level, as many levels as the tree has, copied text aside;
    where the tree is itself one of drawn tokens, it tests that, and a chain as deep is guessed.
    """
    if not tree.depth:
        return {}
    drawn = isinstance(tree, Sampled)
    guessed = policies.chain(tree.depth) if drawn else tree
    tested = tree if drawn else Sampled((1,) * own_tree(tree).depth)
    return {
        "coupled": Arm(drafter, guessed, acceptance="match", coupled=True),
        "uncoupled": Arm(drafter, guessed, acceptance="match", coupled=False),
        "rejection": Arm(drafter, tested, acceptance="rejection", coupled=False),
    }


def measure_drafting(
    base: FrozenBase, drafter: Drafter, prompts: list[list[int]], alone: list[list[int]], how: How
) -> dict[str, Drafting]:
    """Return the `drafting` section of results.json.

    `alone` is what `write_alone` gave each prompt, with the same limit and sampling.
    """
    arms = ways(drafter, how.tree or policies.chain(drafter.depth))
    decoded = {
        name: decode_prompts(base, drafter, prompts, arm.how(how)) for name, arm in arms.items()
    }
    counts = {name: [one.counts for one in texts] for name, texts in decoded.items()}
    same = {
        name: [one.tokens == text for one, text in zip(texts, alone, strict=True)]
        # what is drawn and tested has the base's distribution and other letters
        if arms[name].acceptance == "match"
        else []
        for name, texts in decoded.items()
    }
    return {
        name: Drafting(
            **asdict(rate(counts[name])),
            tree=arm.tree.name,
            num_nodes=arm.tree.num_nodes,
            compared=len(same[name]),
            identical=sum(same[name]),
            gain_of_coupled=(
                None if name == "coupled" else paired_gain(counts["coupled"], counts[name])
            ),
        )
        for name, arm in arms.items()
    }
