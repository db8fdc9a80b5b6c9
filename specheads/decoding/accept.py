"""Acceptance rules: pure functions from a verified tree to the accepted path.

Random numbers are arguments, so tests/decoding/test_accept.py can integrate a rule over them
exactly. The functions whose names end in `_rule` get them from a batch's `SamplingState`. See
docs/losslessness.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.core.drafter import Nodes
from specheads.core.errors import InputError
from specheads.core.tree import TokenTree
from specheads.decoding.sampling import Ancestors, NodeScores, SamplingState

Coins = Float[Tensor, "batch node"]
"""Uniform numbers, one for each node."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted path of each row: nodes `path[b, :count[b]]` from the root on, then arbitrary ones.

    `bonus` is the base's own next token.
    """

    path: Int[Tensor, "batch path"]
    count: Int[Tensor, " batch"]
    bonus: Int[Tensor, " batch"]


def match(tree: TokenTree, chosen: Nodes, ancestors: Ancestors | None = None) -> Verdict:
    """Keep the root and the longest path on which every token is the one chosen after its parent.

    If `chosen` are samples of the base's distribution that do not depend on the tree, every emitted
    token is such a sample, so the rule is lossless for any tree.
    """
    if tree.tokens.shape[1] == 1:
        return Verdict(torch.zeros_like(chosen), torch.ones_like(chosen[:, 0]), chosen[:, 0])
    ancestors = tree.ancestors() if ancestors is None else ancestors
    is_right = chosen.gather(1, tree.parents.clamp(min=0)) == tree.tokens
    accepted = accepted_nodes(tree, is_right, ancestors)
    # the accepted nodes are one path, and parents come before children: node order is path order
    path, count = _path_first(accepted), accepted.sum(-1)
    return Verdict(path, count, chosen.gather(1, _last_node(path, count))[:, 0])


def draw(
    probs: Float[Tensor, "*batch vocab"], uniforms: Float[Tensor, "*batch"]
) -> Int[Tensor, "*batch"]:
    """Return the token at which each distribution's cumulative sum passes its uniform number."""
    # float64: the sum over a large vocabulary must not drift or end below the uniform number
    sums = probs.cumsum(-1, dtype=torch.float64)
    thresholds = uniforms.double()[..., None] * sums[..., -1:]
    return torch.searchsorted(sums, thresholds, right=True)[..., 0]


def rejection(tree: TokenTree, base_probs: NodeScores, coins: Coins, uniforms: Coins) -> Verdict:
    """Test sampled nodes one by one, each against the remainder of its rejected siblings.

    On a chain this is speculative sampling: a token x sampled from the draft's distribution q is
    kept with probability min(1, p(x) / q(x)), where p is the base's distribution; otherwise another
    token is sampled from max(0, p - q). The next sibling, sampled without replacement, is tested
    with that remainder as p and with q without x. The rule is lossless, and accepts one child with
    the largest probability of any lossless rule, 1 - TV. `coins` test the nodes; `uniforms` sample
    the token after the last one.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2024,
    arXiv:2402.12374, algorithm 2 (Sequoia).
    """
    path, count, probs = walk_nodes(tree, base_probs, coins)
    return Verdict(path, count, draw(probs, uniforms.gather(1, _last_node(path, count))[:, 0]))


def walk_nodes(
    tree: TokenTree, base_probs: NodeScores, coins: Coins
) -> tuple[Int[Tensor, "batch path"], Int[Tensor, " batch"], Float[Tensor, "batch vocab"]]:
    """Return the path that rejection keeps, its length, and the probs of the next token."""
    assert tree.branch_sampling is not None
    rows = torch.arange(len(base_probs), device=base_probs.device)
    probs, is_running = base_probs[:, 0], torch.ones_like(rows, dtype=torch.bool)
    # `index` is the node's index in its level, which begins at node `level_start`
    index, level_start, size = torch.zeros_like(rows), 0, 1
    path, count = [index], torch.ones_like(rows)
    for width in tree.branch_sampling.branches:
        next_start = level_start + size
        children = next_start + index[:, None] * width + torch.arange(width, device=rows.device)
        # all children of a node may be absent, or none
        is_tested = is_running & (tree.parents[rows, children[:, 0]] >= 0)
        rank, remainder = _first_accepted(
            tree.tokens.gather(1, children),
            coins.gather(1, children),
            probs,
            tree.branch_sampling.probs[rows, level_start + index],
        )
        is_running = is_tested & (rank >= 0)
        # finished rows continue with node 0 of each level; the result is not read
        index = torch.where(is_running, index * width + rank, 0)
        final_probs = torch.where(is_tested[:, None], remainder, probs)
        probs = torch.where(is_running[:, None], base_probs[rows, next_start + index], final_probs)
        path.append(next_start + index)
        count = count + is_running
        level_start, size = next_start, size * width
    return torch.stack(path, dim=1), count, probs


def _first_accepted(tokens: Tensor, coins: Tensor, probs: Tensor, draft: Tensor) -> tuple:
    """Return the first accepted sibling, or -1, and the probs that remain if none is accepted."""
    rank = torch.full_like(tokens[:, 0], -1)
    untried = torch.ones_like(draft, dtype=torch.bool)
    for sibling in range(tokens.shape[1]):
        token = tokens[:, sibling, None]
        accepted = coins[:, sibling, None] * draft.gather(1, token) < probs.gather(1, token)
        rank = torch.where((rank < 0) & accepted[:, 0], sibling, rank)
        # equal probs leave only rounding errors: then no test fails and this is not read
        probs = _normalised((probs - draft).clamp(min=0), probs)
        untried.scatter_(1, token, False)
        # a draft without tokens left continues with the tokens of probability zero
        draft = _normalised(draft * untried, _normalised(untried.to(draft.dtype), draft))
    return rank, probs


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return normalised weights, or `otherwise` if all weights are zero."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def typical(
    tree: TokenTree,
    base_probs: NodeScores,
    ancestors: Ancestors | None = None,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Keep the longest path of tokens that are likely enough under the base: LOSSY.

    A token is likely enough if its probability is above min(epsilon, delta * exp(-H)). H is the
    entropy of the base's distribution in nats; exp(-H) is the probability of a token if all are
    equally likely. Above temperature zero the output does not have the base's distribution. The
    likeliest of equally long paths is kept, and the base's best token follows it.

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.1; ties as in its authors' code.
    """
    ancestors = tree.ancestors() if ancestors is None else ancestors
    parents = tree.parents.clamp(min=0)
    entropy = torch.special.entr(base_probs).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    rows = torch.arange(len(parents), device=parents.device)[:, None]
    probs = base_probs[rows, parents, tree.tokens]
    accepted = accepted_nodes(tree, probs > threshold.gather(1, parents), ancestors)
    # all nodes below a rejected one are rejected, so the sums of accepted nodes are finite
    scores = probs.log().masked_fill(~accepted, 0.0)
    scores[:, 0] = 0.0
    scores = (ancestors.to(scores.dtype) @ scores[..., None])[..., 0]
    length = torch.where(accepted, ancestors.sum(-1), 0)
    is_longest = length == length.amax(-1, keepdim=True)
    end = scores.masked_fill(~is_longest, -torch.inf).argmax(-1)
    is_on_path = ancestors[rows[:, 0], end]
    path, count = _path_first(is_on_path), is_on_path.sum(-1)
    return Verdict(path, count, base_probs[rows[:, 0], end].argmax(-1))


def accepted_nodes(
    tree: TokenTree, is_right: Tensor, ancestors: Tensor
) -> Bool[Tensor, "batch node"]:
    """Return which nodes are present and right, with all their ancestors; the root always is."""
    is_wrong = ~is_right | (tree.parents < 0)
    is_wrong[:, 0] = False
    return ~(ancestors & is_wrong[:, None]).any(-1)


def _path_first(is_on_path: Bool[Tensor, "batch node"]) -> Int[Tensor, "batch node"]:
    """Return each row's nodes with those of its path first, in order."""
    return (~is_on_path).to(torch.uint8).argsort(dim=-1, stable=True)


def _last_node(path: Tensor, count: Tensor) -> Int[Tensor, "batch 1"]:
    return path.gather(1, count[:, None] - 1)


AcceptanceRule = Callable[[TokenTree, Tensor, Tensor, SamplingState], Verdict]
"""Arguments: the verified tree, the base's logits (batch, node, vocab), the ancestors of its nodes
(batch, node, node), and the rows."""


def match_rule(
    tree: TokenTree, logits: Tensor, ancestors: Tensor, sampling: SamplingState
) -> Verdict:
    """Sample one token after every node and keep the path that agrees: lossless for any tree.

    Nodes of one depth share the noise of the base alone at that position, so the output is its own
    token for token, even if drafts have seen the noise.
    """
    return match(tree, sampling.choose(tree, logits, ancestors), ancestors)


def rejection_rule(
    tree: TokenTree, logits: Tensor, ancestors: Tensor, sampling: SamplingState
) -> Verdict:
    """Test sampled nodes with `rejection`: lossless in distribution only.

    The nodes of other trees were not sampled. EAGLE tests such children with a draft probability of
    one: child c is kept with the base's probability of c among what remains after its siblings.
    That is the same as sampling from the base and comparing, so `match_rule` is used.
    """
    if sampling.greedy or tree.branch_sampling is None:
        return match_rule(tree, logits, ancestors, sampling)
    base_probs = sampling.tree_probs(tree, logits, ancestors)
    return rejection(tree, base_probs, sampling.coins(ancestors), sampling.uniforms(ancestors))


def typical_rule(
    tree: TokenTree, logits: Tensor, ancestors: Tensor, sampling: SamplingState
) -> Verdict:
    """Keep tokens that are likely enough under the base: LOSSY above temperature zero."""
    if sampling.greedy:
        return match_rule(tree, logits, ancestors, sampling)
    return typical(tree, sampling.tree_probs(tree, logits, ancestors), ancestors)


RULES: dict[str, AcceptanceRule] = {
    "match": match_rule,
    "rejection": rejection_rule,
    "typical": typical_rule,
}
LOSSY = ("typical",)
"""Rules whose output does not have the base's distribution."""


def acceptance_rule(rule: str | AcceptanceRule) -> AcceptanceRule:
    """Return the acceptance rule with this name, or the rule itself."""
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise InputError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    return RULES[rule]
