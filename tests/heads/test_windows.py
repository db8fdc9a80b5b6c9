"""Windows of draft layers: a plain masked reference, and the numbers of speculators."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specheads.core.drafter import Head
from specheads.core.features import Committed, Features
from specheads.heads.kinds import eagle3
from specheads.heads.layers.attention import LlamaLayer
from specheads.heads.layers.block import BlockHead
from specheads.heads.layers.rotary import rotate
from specheads.heads.load import build_for, copy_of, load_head
from tests import tiny
from tests.heads.golden import GOLDEN, close, expected, features
from tests.packed import packed, pieces, rows, texts

DEPTH, WINDOW = 4, 5
CASES = [
    {"kind": "eagle3", "num_layers": 2},
    {"kind": "eagle3", "num_layers": 2, "parallel": True, "mask_token": 5},
    {"kind": "dflash", "num_layers": 2},
    {"kind": "dspark", "num_layers": 2, "causal": True},
]
each_case = pytest.mark.parametrize(
    "settings", CASES, ids=lambda one: "-".join(map(str, one.values()))
)


def head_of(settings: dict, window: int | None = WINDOW) -> Head:
    """Return a head of random tensors in float64."""
    torch.manual_seed(1)
    own = settings if window else {name: settings[name] for name in settings if name != "causal"}
    head = build_for({"depth": DEPTH, "sliding_window": window, **own}, tiny.base())
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head.double().eval()


def with_window(head: Head, window: int) -> Head:
    other = copy_of(head)
    other.config = replace(head.config, sliding_window=window)
    return other


def run(layer: LlamaLayer, own: tuple, keys: tuple, visible: Tensor) -> Tensor:
    """Return a layer's output with plain attention under a mask (query, key).

    `own` is the stream, the inputs and the positions of the queries, `keys` are the last two of
    the keys.
    """
    attention, (stream, inputs, at) = layer.self_attn, own
    queries = attention.q_proj(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    queries = rotate(attention.rope, attention.q_norm(queries), at)
    there, values = attention.keys_values(*keys).unbind(2)
    scores = queries @ there.mT / math.sqrt(attention.head_dim)
    mixed = scores.masked_fill(~visible, -math.inf).softmax(-1) @ values
    stream = stream + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return stream + layer.mlp(layer.post_attention_layernorm(stream))


@torch.no_grad()
def reference(head: Head, aux: Tensor, tokens: Tensor, last: int) -> Tensor:
    """Return the logits of all levels after position `last` of a text, along the text.

    Every level is computed from scratch, with one mask over all positions.
    """
    read = features(aux[None, : last + 1])
    if isinstance(head, BlockHead):
        return torch.cat(of_block(head, read, tokens[None], last))
    assert isinstance(head, eagle3.Head)
    return torch.cat(of_rounds(head, read, tokens[None], last))


def of_rounds(head: eagle3.Head, read: Features, tokens: Tensor, last: int) -> list[Tensor]:
    hidden, following, answers = head.first(read), tokens[:, 1 : last + 2], []
    for level in range(head.depth):
        at = torch.arange(last + 1 + level)
        counted = at if head.config.parallel else at.clamp(max=last)
        drafted = at > last
        inside = drafted | (at > counted[:, None] - head.config.sliding_window)
        stream, embedded = hidden, head.embed(following, hidden)
        for layer in head.blocks():
            stream, inputs, _ = layer.read(stream, at[None], embedded)
            stream = run(
                layer, (stream, inputs, at[None]), (inputs, at[None]), (at <= at[:, None]) & inside
            )
        newest = stream[:, -1:]
        answers.append(head.logits(head.norm(newest), level)[0])
        token = tokens[:, last + 2 + level : last + 3 + level]
        if head.config.parallel:
            token = torch.full((1, 1), head.config.mask_token)
        hidden = torch.cat([hidden, head.feed_back(newest)], dim=1)
        following = torch.cat([following, token], dim=1)
    return answers


def of_block(head: BlockHead, read: Features, tokens: Tensor, last: int) -> list[Tensor]:
    fused, text = head._fuse(read), torch.arange(last + 1)
    slots = head.depth + (not head.config.sample_from_anchor)
    at = last + 1 + torch.arange(slots)
    block = torch.full((1, slots), head.mask_token)
    block[:, 0] = tokens[:, last + 1]
    stream = head.embed(block, fused)
    own = torch.ones(slots, slots, dtype=torch.bool)
    own = own.tril() if head.config.causal else own
    near = (text > last - head.config.sliding_window).expand(slots, -1)
    for layer in head.blocks():
        stream, inputs, _ = layer.read(stream, at[None])
        keys = torch.cat([fused, inputs], dim=1), torch.cat([text, at])[None]
        stream = run(layer, (stream, inputs, at[None]), keys, torch.cat([near, own], dim=1))
    hidden = head.norm(stream)[:, slots - head.depth :]
    answers = []
    for level in range(head.depth):
        before = tokens[:, last + 1 + level : last + 2 + level]
        state = head.answering(hidden[:, level : level + 1], before)
        answers.append(head.logits(state, level)[0])
    return answers


@torch.no_grad()
def trained(head: Head) -> tuple[Tensor, Tensor]:
    """Return the logits at three positions of each packed document, and the reference's."""
    documents = texts(lengths=(12, 22, 15, 10))
    batch = rows([documents[:2], documents[2:]])
    read = tiny.base().read(batch.tokens, head.aux_layers, batch.document_ids)
    assert read.aux is not None
    cut = [pieces(state, batch) for state in head.states(read, batch.tokens)]
    found, wanted = [], []
    for number, (aux, text) in enumerate(zip(pieces(read.aux, batch), documents, strict=True)):
        for last in sorted({2, WINDOW, len(text) - 1 - DEPTH}):
            found.append([head.logits(cut[k][number][last], k) for k in range(DEPTH)])
            wanted.append(reference(head, aux, text, last))
    return torch.stack([torch.stack(one) for one in found]), torch.stack(wanted)


def drafted(head: Head) -> tuple[Tensor, Tensor]:
    """Return the logits of ragged rows drafted along the text, and the reference's."""
    tokens = torch.stack([text[:22] for text in texts(lengths=(22, 24))])
    read = tiny.base().read(tokens, head.aux_layers)
    assert read.aux is not None
    memory, ends = head.memory(2, 32), torch.zeros(2, dtype=torch.long)
    for counts in (torch.tensor([3, 9]), torch.tensor([6, 2]), torch.tensor([1, 4])):
        places = ends[:, None] + torch.arange(int(counts.max()))
        committed = Committed(read.at(places), tokens.gather(1, places + 1), counts)
        logits, state = head.begin(committed, memory)
        ends = ends + counts
    found = [logits]
    for level in range(DEPTH - 1):
        node = tokens.gather(1, ends[:, None] + 1 + level)
        logits, state = head.extend(state, node, torch.zeros_like(node))
        found.append(logits)
    each = zip(read.aux, tokens, ends.tolist(), strict=True)
    wanted = [reference(head, aux, text, end - 1) for aux, text, end in each]
    return torch.cat(found, dim=1), torch.stack(wanted)


@each_case
@pytest.mark.parametrize("answers", [trained, drafted], ids=["trained", "drafted"])
def test_logits_beyond_the_window_equal_a_plain_masked_reference(settings: dict, answers):
    head = head_of(settings)
    found, wanted = answers(head)
    close(found, wanted, 1e-10)
    # an error of one position is seen
    for window in (WINDOW - 1, WINDOW + 1):
        wrong, _ = answers(with_window(head, window))
        assert (wrong - wanted).abs().max() > 1e-3


@each_case
def test_a_window_as_long_as_the_text_sees_all_of_it(settings: dict):
    if settings.get("causal"):
        settings = {name: settings[name] for name in settings if name != "causal"}
    full, long = head_of(settings, None), head_of(settings, 64)
    batch = packed(texts())
    read = tiny.base().read(batch.tokens, full.aux_layers, batch.document_ids)
    for one, other in zip(
        full.states(read, batch.tokens), long.states(read, batch.tokens), strict=True
    ):
        assert torch.equal(one, other)


def test_a_head_without_a_window_writes_the_config_it_wrote_before():
    for settings in CASES:
        assert not {"sliding_window", "causal"} & head_of(settings, None).settings().keys()
        assert head_of(settings).settings()["sliding_window"] == WINDOW


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "eagle3", "sliding_window": 0}, "sliding_window must be .* at least 1"),
        ({"kind": "eagle3", "parallel": True, "sliding_window": 6}, "at least its depth 7, got 6"),
        ({"kind": "dflash", "causal": True}, "got causal=true and no sliding_window"),
    ],
)
def test_impossible_windows_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build_for(settings, tiny.base())


# the numbers of speculators 0.9, with a window of 5 in texts of 12 positions


def test_eagle3_trains_on_speculators_logits_and_drafts_them():
    head, golden = load_head(GOLDEN / "eagle3_window").double(), expected("eagle3_window")
    assert (head.config.sliding_window, head.config.num_layers) == (5, 2)
    aux, following, wanted = (golden[name] for name in ("in.aux", "in.following", "out.logits"))
    time = aux.shape[1]
    for level, state in enumerate(head.states(features(aux), following.roll(1, dims=1))):
        close(head.logits(state, level)[0, : time - level], wanted[level, : time - level])
    for last in (4, 5, 8):
        read = Committed(
            features(aux[:, : last + 1]), following[:, : last + 1], torch.tensor([last + 1])
        )
        logits, state = head.begin(read, head.memory(1, 32))
        for level in range(head.depth):
            close(logits[0, 0], wanted[level, last])
            if level + 1 < head.depth:
                node = following[:, last + 1 + level, None]
                logits, state = head.extend(state, node, torch.zeros_like(node))


def test_p_eagle_trains_on_speculators_logits():
    head, golden = load_head(GOLDEN / "peagle_window").double(), expected("peagle_window")
    assert (head.config.sliding_window, head.config.parallel) == (5, True)
    states = head.states(features(golden["in.aux"]), golden["in.following"].roll(1, dims=1))
    found = torch.stack([head.logits(state, k)[0] for k, state in enumerate(states)])
    # it may sample an anchor before the text
    inside = golden["out.anchors"] >= 0
    depths, anchors = golden["out.depths"][inside], golden["out.anchors"][inside]
    close(found[depths, anchors], golden["out.logits"][inside])


def test_dflash_drafts_speculators_blocks():
    head, golden = load_head(GOLDEN / "dflash_window").double(), expected("dflash_window")
    assert (head.config.sliding_window, head.config.causal) == (5, True)
    aux, tokens, anchors = golden["in.aux"], golden["in.tokens"], golden["out.anchors"]
    wanted = golden["out.logits"][:, 1:]
    assert anchors.max() > 6
    found = torch.stack([state[0] for state in head.states(features(aux), tokens)], dim=1)
    for anchor, logits in zip(anchors.tolist(), wanted, strict=True):
        if anchor:
            close(head.logits(found[anchor - 1], 0), logits)
            count = torch.tensor([anchor])
            read = Committed(features(aux[:, :anchor]), tokens[:, 1 : anchor + 1], count)
            drafts, _ = head.begin(read, head.memory(1, 32))
            close(drafts[0, 0], logits[0])
