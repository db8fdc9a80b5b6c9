"""Offline measurement: replay a head over text that the base wrote, with the loop's integers.

With the rule `match` the output of the loop is the base's own continuation whatever the head
drafts. So the stored text decides whether a draft is right; above temperature zero the noise of
each position, which follows from the seed, decides too. The positions from which the loop drafts
follow as well: walk the text with `anchor += accepted + 1`. The plain mean over all positions is
another number, wrong by up to a quarter, because the loop does not visit them evenly. See
docs/losslessness.md.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import NamedTuple, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState, expand_sampling, with_noise
from specheads.decoding.suffix_decoding import LookupText, common_prefix_length
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.tuned import fixed_tree
from specheads.measure.counts import DepthCounts, compute_rate, conditional_acceptance
from specheads.measure.generation import BaseTexts, GenerationSettings
from specheads.measure.results import Offline
from specheads.runs.progress import progress_bar

TOP = 5
"""The top-k accuracy has k = 1..TOP."""
CHUNK = 512
"""Positions whose logits are in memory at one time."""


def offline_logits(
    head: Head, features: Features, tokens: Int[Tensor, "batch time"]
) -> list[Float[Tensor, "batch drafted vocab"]]:
    """Return a head's teacher-forced logits, one tensor for each depth.

    Row t of tensor k has read `tokens[:, ..t + 1 + k]` and predicts `tokens[:, t + 2 + k]`. The
    tensor has `time - 2 - k` rows, those whose label is inside the text.
    """
    time = tokens.shape[1]
    if time < head.depth + 2:
        raise InputError(
            f"text of {time} tokens is too short to score {head.depth} drafted depths: need at "
            f"least {head.depth + 2}"
        )
    return [
        head.logits(state[:, : time - 2 - level], level)
        for level, state in enumerate(head.states(features, tokens))
    ]


@torch.inference_mode()
def guess_ranks(
    base: FrozenBase,
    head: Head,
    prompt: list[int],
    continuation: list[int],
    *,
    width: int = TOP,
    sampling: Sampling = GREEDY,
    coupled: bool = True,
) -> Int[Tensor, "drafted depth"]:
    """Return the rank among the head's guesses of each token that the base alone wrote.

    Row i drafts from `continuation[i]` as root, with the features before it. Column k is the rank
    of `continuation[i + 1 + k]` given the tokens between; 0 is the best guess, `width` is "not
    among the best `width`", and -1 is "after the end of the text". `sampling`, with its seed, is
    that of the continuation; with `coupled` the head sees its noise.
    """
    if len(continuation) < 2:
        return torch.empty(0, head.depth, dtype=torch.long)
    text = torch.tensor([prompt + continuation], device=base.device)
    noise = sampling if coupled and sampling.temperature > 0 else None
    ranks = torch.full((len(continuation) - 1, head.depth), -1)
    for level, states in enumerate(draft_states(base, head, text, len(prompt))):
        # position of the last token before each label
        positions = torch.arange(len(prompt) + level, text.shape[1] - 1, device=base.device)
        chunks = [
            _rank_labels(head, level, *chunk, text, width, noise)
            for chunk in zip(states.split(CHUNK), positions.split(CHUNK), strict=True)
        ]
        ranks[: len(states), level] = torch.cat(chunks).cpu()
    return ranks


def draft_states(
    base: FrozenBase, head: Head, text: Int[Tensor, "1 time"], num_read: int
) -> Iterator[Float[Tensor, "position width"]]:
    """Yield a head's states at each level, from which it drafts the tokens of a text.

    The first root is the token after `num_read` tokens. A level has the positions whose draft is
    inside the text; its first one drafts the token `level + 1` after the first root.
    """
    start, time = num_read - 1, text.shape[1]
    positions = torch.arange(time, device=text.device)
    anchors = ((positions >= start) & (positions < time - 2))[None]
    features = base.read(text, head.aux_layers)
    for level, states in enumerate(head.states(features, text, anchors)):
        if start < time - 2 - level:
            yield states[0, start : time - 2 - level]


def _rank_labels(
    head: Head,
    level: int,
    states: Float[Tensor, "time width"],
    positions: Int[Tensor, " time"],
    text: Int[Tensor, "1 all"],
    width: int,
    noise: Sampling | None,
) -> Int[Tensor, " time"]:
    """Return the rank of the token after each position; the head sees the noise, if there is."""
    logits = head.logits(states, level)
    if noise is not None:
        # the drafted path equals the text, so the token before a label can serve as the root
        num_rows = len(positions)
        texts = text.expand(num_rows, -1)
        rows = SamplingState([noise] * num_rows, positions, texts, head.vocab_size, logits.dtype)
        logits = with_noise(head, logits[:, None], text[0, positions][:, None, None], rows)[:, 0]
    labels = text[0, positions + 1]
    guesses = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
    hits = head.to_tokens(guesses) == labels[:, None]
    rank = torch.where(hits.any(-1), hits.int().argmax(-1), width)
    # chains draft the argmax and trees the topk, which may order equal logits differently
    best = head.to_tokens(logits.argmax(-1)) == labels
    return torch.where(best, 0, rank.clamp(min=1))


def top_k_accuracy(ranks: Int[Tensor, "drafted depth"], top: int = TOP) -> list[list[float]]:
    """Return `out[depth][k - 1]`: how often the base's token is among the k best guesses.

    This is a plain mean over all positions, and not the acceptance rate of the loop.
    """
    return [
        [(depth_ranks < k).sum().item() / len(depth_ranks) for k in range(1, top + 1)]
        for column in ranks.T
        if len(depth_ranks := column[column >= 0])
    ]


def can_replay(tree: policies.TreePolicy | None) -> TypeGuard[policies.TreePolicy]:
    """Return whether stored ranks can replay a tree: it drafts, and always in the same shape."""
    return tree is not None and tree.depth > 0 and fixed_tree(tree) is not None


def measure_offline(
    base: FrozenBase, head: Head, texts: BaseTexts, generation: GenerationSettings
) -> Offline:
    """Return the `offline` section of results.json.

    A chain as deep as the head is replayed in place of a tree that cannot be: see `can_replay`.
    """
    tree = generation.tree if can_replay(generation.tree) else policies.chain(head.depth)
    pairs = texts.pairs
    samplings = expand_sampling(generation.sampling, len(pairs))
    width = max(TOP, tree.num_guesses)
    seeded_pairs = list(zip(pairs, samplings, strict=True))
    ranks = [
        guess_ranks(base, head, *pair, width=width, sampling=sampling, coupled=generation.coupled)
        for pair, sampling in progress_bar(seeded_pairs, "offline", generation.progress)
    ]
    rows = zip(ranks, generation.sources_of(pairs), pairs, strict=True)
    counts = [replay(prompt_ranks, tree, source, pair) for prompt_ranks, source, pair in rows]
    total = DepthCounts.total(counts, len(counts[0].offered))
    return Offline(
        **asdict(compute_rate(counts)),
        per_depth=total.per_depth(),
        top_k_accuracy=top_k_accuracy(torch.cat(ranks)),
        forwards=total.forwards,
        replayed=tree.name,
        conditional_acceptance=conditional_acceptance(counts),
    )


# --- replay ------------------------------------------------------------------------------------


class LookupDraft(NamedTuple):
    """What prompt lookup drafts at one root of a text."""

    num_right: int
    """Leading tokens that equal the text."""
    num_tokens: int
    ngram: int
    """Length of the n-gram that occurred earlier; zero without a match."""


def lookup_drafts(prompt: list[int], continuation: list[int], size: int) -> list[LookupDraft]:
    """Return what prompt lookup of `size` tokens drafts at each root: see `guess_ranks`."""
    text, drafts = LookupText(prompt), []
    for root in range(len(continuation) - 1):
        text.extend(continuation[root : root + 1])
        ngram, tokens = text.find(size)
        num_right = common_prefix_length(tokens, islice(continuation, root + 1, None))
        drafts.append(LookupDraft(num_right, len(tokens), ngram))
    return drafts


def replay(
    ranks: Int[Tensor, "drafted depth"],
    tree: policies.TreePolicy,
    source: str = "",
    text: tuple[list[int], list[int]] = ([], []),
) -> DepthCounts:
    """Walk one stored continuation as the loop would and return the loop's integers.

    The first token comes from reading the prompt and is no forward. If n tokens remain after the
    root, at most n - 1 drafts count as accepted; `generation.decode_prompts` counts in the same
    way. A `HybridTree` also copies from the text, a prompt and its continuation.

    The integers are exact except at ties: reading a text at once and token by token round
    differently, so the two best guesses may swap.
    """
    head_tree, size = fixed_tree(tree), tree.num_copied if isinstance(tree, HybridTree) else 0
    assert head_tree is not None
    drafts = lookup_drafts(*text, tree.lookup_length) if size else []
    paths, inner_paths = {(), *head_tree.paths}, {path[:-1] for path in head_tree.paths}
    counts = DepthCounts.zeros(head_tree.depth + size, source)
    rows: list[list[int]] = ranks.tolist()
    anchor = 0
    while anchor < len(rows):
        remaining, path = len(rows) - anchor, ()
        # the longest path that the text follows
        for rank in rows[anchor][: min(remaining - 1, head_tree.depth)]:
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        num_accepted, drafted_beyond = len(path), path in inner_paths
        if size:
            # the copied path shares nodes with the tree, and adds up to `size` nodes
            draft = drafts[anchor]
            num_copied = min(draft.num_tokens, num_accepted + size)
            num_right = min(draft.num_right, num_copied, remaining - 1)
            if num_right >= num_accepted:
                is_same_depth = num_right == num_accepted
                drafted_beyond = num_copied > num_right or (is_same_depth and drafted_beyond)
                num_accepted = num_right
        counts.add(num_accepted, drafted_beyond=drafted_beyond)
        anchor += num_accepted + 1
    return counts
