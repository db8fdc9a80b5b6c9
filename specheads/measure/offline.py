"""Offline measurement: what a head would do in the loop, read off text the base already wrote.

With the rule `match` the loop's output is the base's own continuation whatever the head guesses, so
whether a guess from some place is right depends on the stored text alone, and above temperature
zero on the noise of each position, which follows from the seed. The places the loop drafts from
follow from that: walk the text, `anchor += accepted + 1`. The plain mean over all places is another
number, off by a quarter either way, because the loop does not visit them evenly.
See docs/losslessness.md.
"""

from dataclasses import asdict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.decoding.acceptance.sampling import GREEDY, Rows, Sampling, each_prompt
from specheads.decoding.trees import policies
from specheads.decoding.trees.coupling import with_noise
from specheads.measure.counts import DepthCounts, conditional_acceptance, rate
from specheads.measure.how import How
from specheads.measure.replay import fixed, replay_texts
from specheads.measure.results import Offline
from specheads.runs.progress import bar

TOP = 5
"""Ranks the top-k accuracy reports: k = 1..TOP."""

CHUNK = 512
"""Positions whose logits exist at one time."""


def offline_logits(
    head: Head, features: Features, tokens: Int[Tensor, "batch time"]
) -> list[Float[Tensor, "batch drafted vocab"]]:
    """Return a head's teacher-forced logits, one tensor a depth.

    Row t of the k-th has read `tokens[:, ..t + 1 + k]` and predicts `tokens[:, t + 2 + k]`; it
    has `time - 2 - k` rows, those whose answer lies within the text.
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
    """Return how far down its list of guesses the head has each token the base went on to say.

    Row i drafts from `continuation[i]` as root, having read the features before it. Column k is
    the rank of `continuation[i + 1 + k]`, zero being its best guess, given the tokens between;
    `width` stands for "not among the best `width`", and -1 for "beyond the text".

    Args:
        base: Who wrote the continuation.
        head: Whose guesses are ranked.
        prompt: What was continued.
        continuation: What the base alone said.
        width: Ranks that are told apart.
        sampling: How it chose its tokens, with the seed that it drew them with.
        coupled: Whether guesses are ranked as one who sees the noise of those draws ranks them.
    """
    if len(continuation) < 2:
        return torch.empty(0, head.depth, dtype=torch.long)
    text = torch.tensor([prompt + continuation], device=base.device)
    num_roots = len(continuation) - 1
    first = len(prompt) - 1
    features = base.read(text, head.aux_layers)
    drawn = sampling if coupled and sampling.temperature > 0 else None
    ranks = torch.full((num_roots, head.depth), -1)
    anchors = drafted_from(text, first, num_roots)
    for level, state in enumerate(head.states(features, text, anchors)):
        num_known = num_roots - level
        if num_known <= 0:
            break
        states = state[0, first : first + num_known]
        # position of the last token that stands before each answer
        before = torch.arange(first + 1 + level, text.shape[1] - 1, device=base.device)
        found = [
            _ranks(head, level, *chunk, text, width, drawn)
            for chunk in zip(states.split(CHUNK), before.split(CHUNK), strict=True)
        ]
        ranks[:num_known, level] = torch.cat(found).cpu()
    return ranks


def drafted_from(
    text: Int[Tensor, "batch time"], first: int, count: int
) -> Bool[Tensor, "batch time"]:
    """Mark so many positions of a text: those that drafts are asked for."""
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
    """Return the rank of the token after each of these positions; `drawn` if the noise is seen."""
    logits = head.logits(states, level)
    if drawn is not None:
        # what was drafted on the way is what the text says: so each token before an answer may
        # stand for the root itself
        each = text.expand(len(before), -1)
        rows = Rows([drawn] * len(before), before, each, head.vocab_size, dtype=logits.dtype)
        logits = with_noise(head, logits[:, None], text[0, before][:, None, None], rows)[:, 0]
    wanted = text[0, before + 1]
    guesses = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
    hits = head.to_tokens(guesses) == wanted[:, None]
    rank = torch.where(hits.any(-1), hits.int().argmax(-1), width)
    # chains draft the argmax and trees the topk, which may order equal logits differently
    best = head.to_tokens(logits.argmax(-1)) == wanted
    return torch.where(best, 0, rank.clamp(min=1))


def top_k_accuracy(ranks: Int[Tensor, "drafted depth"], top: int = TOP) -> list[list[float]]:
    """Return `out[depth][k - 1]`: how often the base's token is among the k best guesses.

    A plain mean over all places whose answer lies within the text, given the true tokens
    between: it describes the head and is not the loop's acceptance rate.
    """
    return [
        [((column < k) & known).sum().item() / known.sum().item() for k in range(1, top + 1)]
        for column in ranks.T
        if (known := column >= 0).any()
    ]


def measure_offline(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    continuations: list[list[int]],
    how: How,
) -> Offline:
    """Return the `offline` section of results.json.

    `continuations` are what the base alone says after each prompt, with the sampling of `how`.
    Without a tree a chain as deep as the head is replayed, and so it is where nothing is drafted,
    and for a tree that differs from step to step, whose shape stored ranks do not tell; `replayed`
    says which it was.
    """
    tree = how.tree
    if tree is None or not tree.depth or fixed(tree) is None:
        tree = policies.chain(head.depth)
    width = max(TOP, tree.num_guesses)
    each = each_prompt(how.sampling, len(prompts))
    texts = list(zip(prompts, continuations, each, strict=True))
    ranks = [
        guess_ranks(base, head, *text, width=width, sampling=one, coupled=how.coupled)
        for *text, one in bar(texts, "offline", how.progress)
    ]
    pairs = list(zip(prompts, continuations, strict=True))
    counts = replay_texts(base, tree, ranks, pairs, how.sources_of(prompts))
    total = DepthCounts.total(counts, tree.depth)
    return Offline(
        **asdict(rate(counts)),
        per_depth=total.per_depth(),
        top_k_accuracy=top_k_accuracy(torch.cat(ranks)),
        forwards=total.forwards,
        replayed=tree.name,
        conditional_acceptance=conditional_acceptance(counts),
    )
