"""What is kept of a verified tree, by name: acceptance rules for what each row asks for."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance import accept
from specheads.decoding.acceptance.sampling import Rows

AcceptanceRule = Callable[
    [TokenTree, Float[Tensor, "batch node vocab"], Bool[Tensor, "batch node node"], Rows],
    accept.Verdict,
]
"""What is kept of a verified tree: called with it, the base's logits, its ancestors, the rows."""


def match(tree: TokenTree, logits: Tensor, ancestors: Tensor, rows: Rows) -> accept.Verdict:
    """Draw one token after every node and keep the path that agrees: lossless for any tree.

    Nodes of one depth share their noise, with which the base alone would draw at that position:
    so this emits what the base alone emits, token for token, also where drafts have seen the noise.
    """
    if rows.greedy:
        return accept.greedy(tree, logits, ancestors)
    return accept.match(tree, rows.choose(tree, logits, ancestors), ancestors)


def rejection(tree: TokenTree, logits: Tensor, ancestors: Tensor, rows: Rows) -> accept.Verdict:
    """Test drawn nodes against what their siblings left over: lossless in distribution only.

    A tree of best guesses was not drawn from anything. Its children are tested with a draft
    probability of one each, as EAGLE does: child c is kept with the base's probability of c, of
    what remains after its siblings. That is to draw from the base and see who agrees, so `match`.
    """
    if rows.greedy or tree.drawn is None:
        return match(tree, logits, ancestors, rows)
    base_probs = rows.tree_probs(tree, logits, ancestors)
    return accept.rejection(tree, base_probs, rows.coins(ancestors), rows.uniforms(ancestors))


def typical(tree: TokenTree, logits: Tensor, ancestors: Tensor, rows: Rows) -> accept.Verdict:
    """Keep what the base finds likely enough: LOSSY above temperature zero."""
    if rows.greedy:
        return match(tree, logits, ancestors, rows)
    return accept.typical(tree, rows.tree_probs(tree, logits, ancestors), ancestors)


RULES: dict[str, AcceptanceRule] = {"match": match, "rejection": rejection, "typical": typical}
LOSSY = ("typical",)
"""Rules whose output does not have the distribution that was asked for."""


def acceptance_rule(name: str) -> AcceptanceRule:
    """Return the rule of this name."""
    if name not in RULES:
        raise InputError(f"rule must be one of {', '.join(RULES)}, got {name!r}")
    return RULES[name]
