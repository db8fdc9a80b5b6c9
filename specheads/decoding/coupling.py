"""Draft with the noise that the base samples with, so that more drafts are accepted."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, State
from specheads.core.features import Committed
from specheads.decoding.sampling import Paths, SamplingState


class Coupled(Drafter):
    """Adds the noise of each position to a drafter's logits.

    The logits get each row's temperature, cuts and penalties, and then the noise that the base
    samples with at that position. The argmax is the base's token with a probability of at least
    (1 - TV) / (1 + TV), where TV is the total variation distance of both distributions. Rows at
    temperature zero keep their logits. The decoded text is the same for every drafter.

    Source: Daliri, Musco and Suresh 2024, arXiv:2408.07978.
    """

    def __init__(self, drafter: Drafter, rows: SamplingState) -> None:
        self.drafter, self.rows = drafter, rows
        self.depth, self.aux_layers = drafter.depth, drafter.aux_layers
        self.drafted_size = drafter.drafted_size

    def to_tokens(self, drafted: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the tokens of these columns of its logits."""
        return self.drafter.to_tokens(drafted)

    def confidence(self, state: State) -> Float[Tensor, "batch node"] | None:
        """Return the drafter's own estimate of acceptance, which does not use the noise."""
        return self.drafter.confidence(state[0])

    def begin(self, committed: Committed, memory: Any) -> tuple[Tensor, State]:
        """Read the committed tokens; return logits for the token after the root."""
        logits, state = self.drafter.begin(committed, memory)
        paths = committed.root()[..., None]
        return with_noise(self.drafter, logits, paths, self.rows), (state, paths)

    def extend(self, state: State, tokens: Tensor, parents: Tensor) -> tuple[Tensor, State]:
        """Read one level of nodes; return logits for the token after each node."""
        state, paths = state
        logits, state = self.drafter.extend(state, tokens, parents)
        above = paths.take_along_dim(parents[..., None], dim=1)
        paths = torch.cat([above, tokens[..., None]], dim=-1)
        return with_noise(self.drafter, logits, paths, self.rows), (state, paths)


def with_noise(
    drafter: Drafter, logits: Float[Tensor, "batch node drafted"], paths: Paths, rows: SamplingState
) -> Float[Tensor, "batch node drafted"]:
    """Return a drafter's logits after the nodes of one level with the noise added.

    `paths` are the tokens from the root to each node. Greedy rows keep their logits.
    """
    wide = over_vocabulary(drafter, logits, rows.vocab_size)
    noisy = rows.scores(wide, paths) + rows.level_noise(paths.shape[-1] - 1)
    if wide is not logits:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        noisy = noisy[..., drafter.to_tokens(columns)]
    if rows.all_draw:
        return noisy
    return torch.where(rows.drawing[:, None, None], noisy, logits)


def over_vocabulary(drafter: Drafter, logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits over the base's vocabulary; tokens that cannot be drafted get -inf."""
    if logits.shape[-1] == vocab_size:
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device)
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    out[..., drafter.to_tokens(columns)] = logits
    return out
