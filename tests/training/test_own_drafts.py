"""Training on a head's own drafts: anchors, targets and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.config.training import Phase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base, build_head, kinds
from specheads.measure.offline import guess_ranks
from specheads.training.objective import (
    Objective,
    drawn_labels,
    early_enough,
    label_counts,
    own_chains,
)
from specheads.training.own_drafts import OwnDrafts, draft, follow
from specheads.training.schedule import refuse_unread
from tests import tiny
from tests.packed import chains_of, packed, texts

DEPTH = 3
SMALL = {"width": 16, "vocab_size": 16}
KINDS = [kind for kind in kinds() if build_head({"kind": kind}, **SMALL).reads_drafts]
PARALLEL = {"kind": "eagle3", "parallel": True}


@pytest.fixture(params=KINDS)
def head(request: pytest.FixtureRequest) -> Head:
    """Return a head that agrees with the base now and then."""
    torch.manual_seed(1)
    head = build_for_base({"kind": request.param, "depth": DEPTH}, tiny.base()).double()
    for parameter in head.parameters():
        parameter.data += 0.05 * parameter.data.std().nan_to_num(0.1) * torch.randn_like(parameter)
    return head


def everywhere(batch: TokenBatch, base: FrozenBase) -> OwnDrafts:
    """Choose every label from the fourth position of a row or document on."""
    return OwnDrafts(base, torch.ones_like(batch.loss_mask))


def _drafted(head: Head, batch: TokenBatch, base: FrozenBase) -> tuple[Any, torch.Tensor]:
    features = base.read(batch.tokens, head.aux_layers, batch.document_ids)
    labels = early_enough(batch.loss_mask, batch.document_ids, 1)
    return draft(head, features, batch, everywhere(batch, base), labels), features.hidden


def drafted(head: Head, base: FrozenBase, known: list[int]) -> list[int]:
    """Return the tokens that a head drafts in decoding after a text that ends with the root."""
    text = torch.tensor([known])
    features = base.read(text[:, :-1], head.aux_layers)
    committed = Committed(features, text[:, 1:], torch.tensor([len(known) - 1]))
    logits, state = head.begin(committed, head.memory(1, 64))
    guesses = [logits.argmax(-1)]
    for _ in range(DEPTH - 1):
        logits, state = head.extend(state, guesses[-1], torch.zeros_like(guesses[-1]))
        guesses.append(logits.argmax(-1))
    return torch.cat(guesses, dim=1)[0].tolist()


def test_visited_positions_are_those_of_a_replay(head: Head):
    base, prompt, text = tiny.base(), tiny.prompts()[1], [7]
    for right in (0, 1, 3, 2, 0, 3, 1):
        # some of the head's drafts, and then another token
        guesses = drafted(head, base, prompt + text)
        text += [*guesses[:right], (guesses[min(right, DEPTH - 1)] + 1) % tiny.VOCAB]
    ranks = guess_ranks(base, head, prompt, text)
    accepted = (ranks == 0).int().cumprod(1).sum(1).tolist()
    anchor, wanted = 0, []
    while anchor < len(accepted):
        wanted.append(len(prompt) + anchor + 1)
        anchor += accepted[anchor] + 1
    tokens = torch.tensor([prompt + text])
    batch = TokenBatch(tokens, torch.arange(tokens.shape[1])[None] >= len(prompt))
    drafts, _ = _drafted(head, batch, base)
    found = drafts[2][0].nonzero()[:, 0]
    assert found.tolist() == wanted
    assert len(wanted) < len(accepted)


def test_deeper_depths_read_the_drafts_of_decoding(head: Head):
    base, batch = tiny.base(), packed(texts())
    drafts, _ = _drafted(head, batch, base)
    for row, label in ((0, 4), (0, 14), (0, 20), (1, 5), (1, 31)):
        assert drafts[1][row, label - 2].tolist() == drafted(head, base, _before(batch, row, label))


def _before(batch: TokenBatch, row: int, label: int) -> list[int]:
    """Return the tokens of a label's document before it."""
    assert batch.document_ids is not None
    own = batch.document_ids[row, :label] == batch.document_ids[row, label - 1]
    return batch.tokens[row, :label][own].tolist()


def test_targets_are_those_of_the_base_on_each_drafted_path():
    """The base reads the text and the drafts of each chain by themselves."""
    base, batch = tiny.base(), packed(texts())
    places = [(0, 4), (0, 14), (0, 20), (1, 5), (1, 19)]
    # what each depth drafts: the token of the text, the base's best token, or another one
    ways = [
        "text text text",
        "best best best",
        "text best text",
        "best text best",
        "other best best",
    ]
    guesses = torch.zeros(*batch.tokens.shape, DEPTH, dtype=torch.long)
    labels, hidden = torch.full((len(places), DEPTH), -1), []
    for chain, ((row, label), way) in enumerate(zip(places, ways, strict=True)):
        known, given, on_text = _before(batch, row, label), True, True
        for level, what in enumerate(way.split()):
            hidden.append(base.read(torch.tensor([known])).hidden[0, -1])
            best, said = (
                int(base.projection(hidden[-1]).argmax()),
                int(batch.tokens[row, label + level]),
            )
            assert best != said
            wanted = said if on_text else best
            labels[chain, level] = wanted if given else -1
            guess = {"text": said, "best": best, "other": (max(best, said) + 1) % tiny.VOCAB}[what]
            on_text, given = on_text and guess == said, given and guess in (wanted, best)
            guesses[row, label - 2, level] = guess
            known = [*known, guess]
    assert labels[3:, 2].tolist() == [-1, -1]
    rows, first = torch.tensor(places).unbind(1)
    read = base.read(batch.tokens, document_ids=batch.document_ids).hidden
    head = build_for_base({"kind": "redrafter", "depth": DEPTH}, base)
    chains, expected, states = follow(
        everywhere(batch, base), head, batch, guesses, read, rows, first
    )
    assert chains.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(expected.T, labels)
    torch.testing.assert_close(
        states.transpose(0, 1).flatten(0, 1), torch.stack(hidden), rtol=1e-9, atol=1e-9
    )


def test_states_read_the_tokens_that_are_sent(head: Head):
    base = tiny.base()
    tokens = torch.randint(base.vocab_size, (2, 14), generator=torch.manual_seed(0))
    features = base.read(tokens, head.aux_layers)
    sent = torch.randint(base.vocab_size, (2, 14, DEPTH - 1), generator=torch.manual_seed(1))
    states = head.states(features, tokens)
    found = [next(states), *(states.send(sent[..., level]) for level in range(DEPTH - 1))]
    for place in range(14 - DEPTH):
        other = tokens.clone()
        other[:, place + 2 : place + 1 + DEPTH] = sent[:, place]
        for ours, theirs in zip(found, head.states(features, other), strict=True):
            torch.testing.assert_close(ours[:, place], theirs[:, place], rtol=0, atol=1e-12)


def test_chains_are_chosen_independently_of_the_drawn_labels():
    head = build_head({"kind": "redrafter", "depth": 1}, width=16, vocab_size=16)
    batch = TokenBatch(torch.zeros(2, 2000, dtype=torch.long), torch.ones(2, 2000).bool())
    settings = Phase(scored_share=0.5, own_drafts=0.5)
    labels = drawn_labels(batch, head, settings, seed=3)
    chosen = own_chains(batch, settings, seed=3)
    for drawn in (labels, ~labels):
        assert chosen[drawn].double().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("weighting", ["geometric", "first_error"])
def test_a_batch_without_chosen_chains_has_the_loss_of_the_text(head: Head, weighting: str):
    base, batch = tiny.base(), packed(texts())
    settings = Phase(loss="kl", weighting=weighting, own_drafts=0.5)
    features = base.read(batch.tokens, head.aux_layers, batch.document_ids)
    none = OwnDrafts(base, torch.zeros_like(batch.loss_mask))
    losses = [
        Objective(head)(features, batch, batch.loss_mask, base.logits_of, settings, None, own).total
        for own in (None, none)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


def test_only_visited_and_reached_depths_learn_from_own_drafts(head: Head):
    """The loss equals that of the rows which a replay and the base's verification leave."""
    base, batch = tiny.base(), packed(texts())
    # one run of labels, from whose first tokens no chain can start
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    drafts, hidden = _drafted(head, batch, base)
    settings = Phase(loss="cross_entropy", own_drafts=1.0)
    features = base.read(batch.tokens, head.aux_layers, batch.document_ids)
    counts = label_counts(head, batch, batch.loss_mask, settings)
    found = Objective(head)(
        features, batch, batch.loss_mask, base.logits_of, settings, counts, everywhere(batch, base)
    )
    left = early_enough(batch.loss_mask, batch.document_ids, 1) & drafts[2]
    rows, first = left.nonzero(as_tuple=True)
    own, wanted = everywhere(batch, base), torch.zeros((), dtype=torch.double)
    _, labels, _ = follow(own, head, batch, drafts[1], hidden, rows, first)
    labels = labels.where(chains_of(batch, rows, first, DEPTH).T >= 0, -1)
    assert (labels[0] >= 0).all()
    for level, state in enumerate(drafts[0]):
        logits = head.logits(state[rows, first - 2], level)
        sums = F.cross_entropy(logits, labels[level], ignore_index=-1, reduction="sum")
        wanted = wanted + sums / counts[level]
    assert 0 < len(rows) < batch.loss_mask.sum()
    torch.testing.assert_close(found.total, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", kinds())
def test_reads_drafts_tells_whether_states_read_the_tokens_that_are_sent(kind: str):
    base = tiny.base()
    torch.manual_seed(1)
    head = build_for_base({"kind": kind, "depth": 2}, base).double()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    tokens = torch.randint(base.vocab_size, (1, 12))
    features, found = base.read(tokens, head.aux_layers), []
    for sent in (tokens.roll(-2, 1), (tokens.roll(-2, 1) + 1) % base.vocab_size):
        states = head.states(features, tokens)
        next(states)
        found.append(states.send(sent)[:, :8])
    assert torch.equal(*found) != head.reads_drafts


@pytest.mark.parametrize("settings", [{"kind": kind} for kind in kinds()] + [PARALLEL], ids=str)
def test_heads_that_do_not_read_drafts_are_refused(settings: dict[str, Any]):
    head = build_head({"depth": 2, **settings}, **SMALL)
    phase = Phase(text="corpus", steps=1, batch_size=1, sequence_length=16, own_drafts=0.5)
    if head.reads_drafts:
        refuse_unread({"corpus": phase}, head)
        return
    with pytest.raises(InputError, match=f"drafted tokens in training, got {head.kind} with"):
        refuse_unread({"corpus": phase}, head)
