"""On-policy training: a head's own drafts from the positions at which decoding would draft.

See docs/train.md. Source of the idea: Lei et al. 2026, Draft-OPD, arXiv:2605.29343.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.kernels import product_dtype
from specheads.data.packing import TokenBatch
from specheads.training.depth_loss import TILE, rows_of
from specheads.training.losses import best_of


@dataclass(frozen=True, slots=True)
class OwnDrafts:
    """What a step needs to train on drafts of the head itself."""

    base: FrozenBase
    chosen: Bool[Tensor, "batch time"]
    """First labels of the chains that read the head's drafts."""


def draft(
    head: Head,
    features: Features,
    batch: TokenBatch,
    own: OwnDrafts,
    labels: Bool[Tensor, "batch time"],
) -> tuple[
    list[Float[Tensor, "batch time width"]],
    Int[Tensor, "batch time depth"],
    Bool[Tensor, "batch time"],
]:
    """Draft from every position; those of chosen labels read their own drafts, others the text.

    Return the states of each depth, the drafts of the positions before chosen labels, and the first
    labels of the chains that decoding would draft.

    Each position drafts up to its first error, so the positions at which decoding would draft
    follow as in measure/offline.py. `labels` is the loss mask without the first two tokens of each
    document, before which no chain can start.
    """
    tokens = batch.tokens
    # a label's chain starts two positions before it
    chosen, right = own.chosen.roll(-2, 1), labels.roll(-2, 1)
    accepted, states, guesses, read = torch.zeros_like(tokens), [], [], None
    every = head.states(features, tokens)
    for level in range(head.depth):
        states.append(every.send(read))
        text = tokens.roll(-2 - level, 1)
        with torch.no_grad():
            at = (right | chosen).nonzero(as_tuple=True)
            guess = text.index_put(at, _guesses(head, states[-1][at], level))
        right = right & (guess == text)
        accepted += right
        guesses.append(guess)
        read = torch.where(chosen, guess, text)
    visited = _visited(accepted.roll(2, 1), labels)
    return states, torch.stack(guesses, dim=-1), visited


@torch.no_grad()
def follow(
    own: OwnDrafts,
    head: Head,
    batch: TokenBatch,
    guesses: Int[Tensor, "batch time depth"],
    hidden: Float[Tensor, "batch time width"],
    rows: Int[Tensor, " row"],
    first: Int[Tensor, " row"],
) -> tuple[Int[Tensor, " chain"], Int[Tensor, "depth chain"], Float[Tensor, "depth chain width"]]:
    """Let the base read the drafts of the chosen chains among those with these first labels.

    Returns which of the chains these are, their expected columns of the logits, and the base's
    final hidden states before them. A depth's label is the token of the text while the drafts equal
    it, else the base's best token. Depths behind a draft that is neither get -1: the base would
    reject it.
    """
    tokens = batch.tokens
    (chains,) = own.chosen[rows, first].nonzero(as_tuple=True)
    rows, first = rows[chains], first[chains]
    guesses = guesses[rows, first - 2]
    branches = own.base.read_branches(tokens, batch.document_ids, rows, first - 1, guesses[:, :-1])
    hidden = torch.cat([hidden[rows, first - 1, None], branches], dim=1)
    places = first[:, None] + torch.arange(head.depth, device=first.device)
    # no label counts past the end of the row
    text = tokens[rows[:, None], places.clamp(max=tokens.shape[1] - 1)]
    best = _best(own.base.projection, hidden.flatten(0, 1), own.base.vocab_size).view_as(text)
    labels = torch.where(_all_before(guesses == text), text, best)
    given = _all_before((guesses == labels) | (guesses == best))
    expected = head.to_drafted(labels).where(given, -1)
    return chains, expected.T, hidden.transpose(0, 1)


def _all_before(right: Bool[Tensor, "chain depth"]) -> Bool[Tensor, "chain depth"]:
    """Return whether all depths before each are right."""
    return torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=1).cumprod(1).bool()


def _guesses(head: Head, states: Float[Tensor, "row width"], level: int) -> Int[Tensor, " row"]:
    """Return the tokens that a head drafts from states."""
    states = states.to(product_dtype(states))
    return head.to_tokens(_best(lambda some: head.logits(some, level), states, head.drafted_size))


def _best(
    logits_of: Callable[[Tensor], Tensor], states: Float[Tensor, "row width"], size: int
) -> Int[Tensor, " row"]:
    """Return the argmax of logits over `size` tokens, chunk by chunk."""
    # padded as in the objective
    padded = F.pad(states, (0, 0, 0, -len(states) % TILE))
    chunk = max(rows_of(states.new_empty(size, 0)) // TILE, 1) * TILE
    return torch.cat([best_of(logits_of(some)) for some in padded.split(chunk)])[: len(states)]


def _visited(
    accepted: Int[Tensor, "batch time"], labels: Bool[Tensor, "batch time"]
) -> Bool[Tensor, "batch time"]:
    """Return the first labels of the chains that decoding would draft in each run of labels.

    `accepted` counts the drafts from each label on that equal the text. The base writes the first
    token of a run and the one after each chain's accepted drafts.
    """
    if labels.is_meta:
        return labels
    marks = []
    for jumps, inside in zip(accepted.tolist(), labels.tolist(), strict=True):
        due, row = -1, [False] * len(jumps)
        for place, counts in enumerate(inside):
            if counts and (place == 0 or not inside[place - 1]):
                due = place + 1
            elif counts and place == due:
                row[place], due = True, place + jumps[place] + 1
        marks.append(row)
    return torch.tensor(marks, device=labels.device)
