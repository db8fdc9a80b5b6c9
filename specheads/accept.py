"""Acceptance rules: pure functions from a verified tree to what is kept of it.

See docs/losslessness.md.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the base accepts of a tree, per row.

    `path[b, :count[b]]` are the accepted nodes from the root down, the root included; entries
    beyond `count[b]` are nodes without meaning. `bonus` is the base's own next token.
    """

    path: Int[Tensor, "batch path"]
    count: Int[Tensor, " batch"]
    bonus: Int[Tensor, " batch"]


def match(
    tree: TokenTree,
    chosen: Int[Tensor, "batch node"],
    ancestors: Bool[Tensor, "batch node node"] | None = None,
) -> Verdict:
    """Keep the longest path on which every token is the one chosen after its parent.

    Args:
        tree: What was verified. The root is always kept.
        chosen: The token the base goes on with after each node.
        ancestors: `tree.ancestors()` where the caller has it already.

    Returns:
        The kept path, at least the root, and the chosen token after its last node.
    """
    if tree.tokens.shape[1] == 1:
        return Verdict(torch.zeros_like(chosen), torch.ones_like(chosen[:, 0]), chosen[:, 0])
    ancestors = tree.ancestors() if ancestors is None else ancestors
    wrong = chosen.gather(1, tree.parents.clamp(min=0)) != tree.tokens
    wrong[:, 0] = False
    kept = ~(ancestors & wrong[:, None]).any(-1)
    count = kept.sum(-1)
    # the kept nodes are one path, and parents come before children: node order is path order
    path = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path, count, chosen.gather(1, last)[:, 0])


def greedy(
    tree: TokenTree,
    logits: Float[Tensor, "batch node vocab"],
    ancestors: Bool[Tensor, "batch node node"] | None = None,
) -> Verdict:
    """Keep what the base itself would choose at temperature zero: lossless.

    Args:
        tree: What was verified.
        logits: The base's logits after each node.
        ancestors: `tree.ancestors()` where the caller has it already.
    """
    return match(tree, logits.argmax(-1), ancestors)


class Sampling:
    """Draws one token after every node and keeps the path that agrees: sample and match.

    What is emitted is always a draw from the base's own law given the text before it, and the
    draft has no say in it, so the rule is lossless for any tree.

    Args:
        temperature: Above zero.
        top_k: Tokens drawn from, the likeliest ones. Zero draws from all.
        seed: Of the draws.

    Raises:
        ValueError: The temperature is not above zero, or `top_k` is below zero.

    Source: Leviathan et al. 2023, arXiv:2211.17192, appendix; the coupled verifier.
    """

    def __init__(self, temperature: float, *, top_k: int = 0, seed: int = 0) -> None:
        if temperature <= 0 or top_k < 0:
            raise ValueError(
                f"sampling needs temperature > 0 and top_k >= 0, got {temperature} and {top_k}; "
                "temperature 0 is greedy"
            )
        self.temperature, self.top_k, self.seed = temperature, top_k, seed
        self.generator: torch.Generator | None = None

    def __call__(
        self,
        tree: TokenTree,
        logits: Float[Tensor, "batch node vocab"],
        ancestors: Bool[Tensor, "batch node node"] | None = None,
    ) -> Verdict:
        """Draw after every node of the tree, then match."""
        if self.generator is None:
            self.generator = torch.Generator(logits.device).manual_seed(self.seed)
        drawn = self._draw(logits.flatten(0, 1) / self.temperature)
        return match(tree, drawn.view(tree.tokens.shape), ancestors)

    def _draw(self, scaled: Tensor) -> Tensor:
        if not self.top_k:
            return torch.multinomial(scaled.softmax(-1), 1, generator=self.generator)
        best, tokens = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1)
        drawn = torch.multinomial(best.softmax(-1), 1, generator=self.generator)
        return tokens.gather(1, drawn)
