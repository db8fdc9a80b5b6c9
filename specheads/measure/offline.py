"""Offline measurement: replay a head over text that the base wrote, with the loop's integers.

With the rule `match` the output of the loop is the base's own continuation whatever the head
drafts. So the stored text decides whether a draft is right; above temperature zero the noise of
each position, which follows from the seed, decides too. The positions from which the loop drafts
follow as well: walk the text with `anchor += accepted + 1`. The plain mean over all positions is
another number, wrong by up to a quarter, because the loop does not visit them evenly. See
docs/losslessness.md.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.decoding.prompt_lookup import LookupText, common_prefix_length
from specheads.decoding.sampling import (
    GREEDY,
    Sampling,
    SamplingState,
    each_prompt,
    with_noise,
)
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.measure.counts import DepthCounts, compute_rate, sections
from specheads.measure.generation import Continuations, GenerationSettings
from specheads.measure.results import Offline
from specheads.runs.progress import bar

TOP = 5
"""The top-k accuracy has k = 1..TOP."""
CHUNK = 512
"""Positions whose logits are in memory at one time."""
RankPath = tuple[int, ...]
"""Ranks of drafts, from the root down."""


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
    num_roots = len(continuation) - 1
    first = len(prompt) - 1
    features = base.read(text, head.aux_layers)
    drawn = sampling if coupled and sampling.temperature > 0 else None
    ranks = torch.full((num_roots, head.depth), -1)
    anchors = anchor_mask(text, first, num_roots)
    for level, state in enumerate(head.states(features, text, anchors)):
        num_known = num_roots - level
        if num_known <= 0:
            break
        states = state[0, first : first + num_known]
        # position of the last token before each label
        before = torch.arange(first + 1 + level, text.shape[1] - 1, device=base.device)
        found = [
            _ranks(head, level, *chunk, text, width, drawn)
            for chunk in zip(states.split(CHUNK), before.split(CHUNK), strict=True)
        ]
        ranks[:num_known, level] = torch.cat(found).cpu()
    return ranks


def anchor_mask(
    text: Int[Tensor, "batch time"], first: int, count: int
) -> Bool[Tensor, "batch time"]:
    """Return a mask of the `count` positions from `first` on: those from which a head drafts."""
    places = torch.arange(text.shape[1], device=text.device)
    return ((places >= first) & (places < first + count)).expand(len(text), -1)


def _ranks(
    head: Head,
    level: int,
    states: Float[Tensor, "time width"],
    before: Int[Tensor, " time"],
    text: Int[Tensor, "1 all"],
    width: int,
    drawn: Sampling | None,
) -> Int[Tensor, " time"]:
    """Return the rank of the token after each position; with `drawn` the head sees the noise."""
    logits = head.logits(states, level)
    if drawn is not None:
        # the drafted path equals the text, so the token before a label can serve as the root
        each = text.expand(len(before), -1)
        size, sampling = head.vocab_size, [drawn] * len(before)
        rows = SamplingState(sampling, before, each, size, dtype=logits.dtype)
        logits = with_noise(head, logits[:, None], text[0, before][:, None, None], rows)[:, 0]
    labels = text[0, before + 1]
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
        [((column < k) & known).sum().item() / known.sum().item() for k in range(1, top + 1)]
        for column in ranks.T
        if (known := column >= 0).any()
    ]


def replays(tree: policies.TreePolicy | None) -> TypeGuard[policies.TreePolicy]:
    """Return whether stored ranks can replay a tree: it drafts, and always in the same shape."""
    return tree is not None and tree.depth > 0 and fixed_tree(tree) is not None


def measure_offline(
    base: FrozenBase, head: Head, texts: Continuations, generation: GenerationSettings
) -> Offline:
    """Return the `offline` section of results.json.

    A chain as deep as the head is replayed in place of a tree that cannot be: see `replays`.
    """
    tree = generation.tree if replays(generation.tree) else policies.chain(head.depth)
    pairs = list(zip(texts.prompts, texts.alone, strict=True))
    each = zip(pairs, each_prompt(generation.sampling, len(pairs)), strict=True)
    width = max(TOP, tree.num_guesses)
    ranks = [
        guess_ranks(base, head, *pair, width=width, sampling=one, coupled=generation.coupled)
        for pair, one in bar(list(each), "offline", generation.progress)
    ]
    rows = zip(ranks, generation.sources_of(pairs), pairs, strict=True)
    counts = [replay(one, tree, source, pair) for one, source, pair in rows]
    accuracy = top_k_accuracy(torch.cat(ranks))
    own = {"top_k_accuracy": accuracy, "replayed": tree.name}
    return Offline(**asdict(compute_rate(counts)), **sections(counts), **own)


# --- replay ------------------------------------------------------------------------------------


Copied = Sequence[tuple[int, int, int]]
"""For each root of a text what prompt lookup proposes: the number of its leading tokens that equal
the text, the number of its tokens, and the length of the n-gram that it found earlier."""


def copied(prompt: list[int], continuation: list[int], size: int) -> Copied:
    """Return what prompt lookup of `size` tokens proposes at each root: see `guess_ranks`."""
    text, found = LookupText(prompt), []
    for place in range(len(continuation) - 1):
        text.extend(continuation[place : place + 1])
        matched, guessed = text.find(size)
        right = common_prefix_length(guessed, islice(continuation, place + 1, None))
        found.append((right, len(guessed), matched))
    return found


def replay(
    ranks: Int[Tensor, "drafted depth"],
    tree: policies.TreePolicy,
    source: str = "",
    text: tuple[list[int], list[int]] = ([], []),
) -> DepthCounts:
    """Walk one stored continuation as the loop would and return the loop's integers.

    The first token comes from reading the prompt and is no forward. If `room` tokens remain after
    the root, at most `room - 1` drafts count as accepted; `generation.decode_prompts` counts in the
    same way. A `HybridTree` also copies from the text, a prompt and its continuation.

    The integers are exact except at ties: reading a text at once and token by token round
    differently, so the two best guesses may swap.
    """
    own, size = fixed_tree(tree), tree.size if isinstance(tree, HybridTree) else 0
    assert own is not None
    copies = copied(*text, tree.copied) if size else []
    paths, inner = {(), *own.paths}, {path[:-1] for path in own.paths}
    counts = DepthCounts.zeros(own.depth + size, source)
    rows: list[list[int]] = ranks.tolist()
    anchor = 0
    while anchor < len(rows):
        room, path = len(rows) - anchor, ()
        # the longest path that the text follows
        for rank in rows[anchor][: min(room - 1, own.depth)]:
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        kept, beyond = len(path), path in inner
        if size:
            # the copied path shares nodes with the tree, and adds up to `size` nodes
            right, length, _ = copies[anchor]
            reach = min(length, kept + size)
            right = min(right, reach, room - 1)
            if right >= kept:
                beyond = reach > right or (right == kept and beyond)
                kept = right
        counts.add(kept, drafted_beyond=beyond)
        anchor += kept + 1
    return counts


def fixed_tree(tree: policies.TreePolicy) -> policies.Static | None:
    """Return the head's own tree if it is the same in every step, else None."""
    own = own_tree(tree)
    return own if isinstance(own, policies.Static) and not own.confidence else None
