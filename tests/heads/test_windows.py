"""Windows and sinks of draft layers: plain references, and numbers of speculators and ModelOpt."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.core.drafter import Head
from specheads.core.features import Committed, PackedDocuments
from specheads.heads.layers import attention
from specheads.heads.layers.rotary import rotate
from specheads.heads.load import build_for_base, load_head
from tests import tiny
from tests.heads.golden import GOLDEN, close, expected, features
from tests.heads.test_memory import drafted
from tests.packed import packed, texts

DEPTH, WINDOW = 4, 5
CASES = [
    {"kind": "eagle3", "num_layers": 2},
    {"kind": "eagle3", "num_layers": 2, "parallel": True, "mask_token": 5},
    {"kind": "dflash", "num_layers": 2},
    {"kind": "dspark", "num_layers": 2, "causal": True},
    {"kind": "dflash2", "num_layers": 2},
    {"kind": "domino", "num_layers": 2, "gru_hidden_dim": 6},
    {"kind": "eagle3", "num_layers": 2, "attention_sink": True},
    {"kind": "dflash", "num_layers": 2, "window_counts_slots": True, "attention_sink": True},
]
ONLY_WITH_A_WINDOW = ("causal", "window_counts_slots")
each_case = pytest.mark.parametrize(
    "settings", CASES, ids=lambda settings_of_case: "-".join(map(str, settings_of_case.values()))
)


def without(settings: dict, *names: str) -> dict:
    return {name: value for name, value in settings.items() if name not in names}


def head_of(settings: dict, window: int | None = WINDOW) -> Head:
    """Return a head of random tensors in float64."""
    torch.manual_seed(1)
    supported = settings if window else without(settings, *ONLY_WITH_A_WINDOW)
    head = build_for_base({"depth": DEPTH, "sliding_window": window, **supported}, tiny.base())
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head.double().eval()


@each_case
def test_a_window_as_long_as_the_text_sees_all_of_it(settings: dict):
    settings = without(settings, "causal")
    full, long = head_of(settings, None), head_of(settings, 64)
    batch = packed(texts())
    text_features = tiny.base().read(batch.tokens, full.aux_layers, batch.document_ids)
    for full_state, windowed_state in zip(
        full.states(text_features, batch.tokens),
        long.states(text_features, batch.tokens),
        strict=True,
    ):
        assert torch.equal(full_state, windowed_state)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_layers_have_their_own_windows(kind: str):
    """Text outside the window changes what full layers read, and nothing if there are none."""
    tokens, changes = torch.randint(8, (1, 20), generator=torch.manual_seed(0)), {}
    for full_layers in ((), (0,), (1,)):
        head = head_of({"kind": kind, "num_layers": 2, "full_layers": [*full_layers]})
        features = tiny.base().read(tokens, head.aux_layers)
        assert features.aux is not None
        aux = features.aux.clone()
        aux[:, 0] += 1.0
        plain, changed = (
            next(iter(head.states(replace(features, aux=values), tokens))).detach()
            for values in (features.aux, aux)
        )
        # two windows reach back 2 * (WINDOW - 1) positions through two layers
        changes[full_layers] = float((plain - changed)[0, 2 * WINDOW].abs().max())
    assert changes.pop(()) == 0.0
    assert min(changes.values()) > 1e-6


@pytest.mark.parametrize("case", ["slots", "paths", "documents"])
def test_a_sink_is_one_more_logit_without_a_value(case: str):
    """The result and all gradients equal those of a softmax that is written out."""
    heads, shared, size, time, levels = 4, 2, 6, 9, 3
    sizes = {"attention_heads": heads, "key_value_heads": shared, "head_dim": size}
    config = SimpleNamespace(rope_theta=1e4, attention_sink=True, **sizes)
    torch.manual_seed(0)
    layer = attention.Attention(config, 16).double()
    assert layer.attention_sink_bias is not None
    layer.attention_sink_bias.data.normal_(std=2)
    inputs, positions = torch.randn(2, time, 16).double(), torch.arange(time).expand(2, -1)
    text = layer.project_keys_values(torch.randn(2, time, 16).double(), positions)
    text = text.detach().requires_grad_()
    path = torch.randn(2, shared, 2, time, levels, size).double().requires_grad_()
    visible = torch.ones(time, time, dtype=torch.bool).tril().triu(1 - WINDOW)[None]
    context = attention.AttentionContext(text, visible, None if case == "slots" else path)
    documents = PackedDocuments([time, 4, time - 4], torch.tensor([0, time, time + 4, 2 * time]))
    if case == "documents":
        context = attention.AttentionContext(text, None, path, documents, WINDOW)
        is_same_document = (torch.arange(time)[:, None] < 4).eq(torch.arange(time) < 4)
        visible = torch.cat([visible, visible & is_same_document])
    output = layer(inputs, positions, context)

    queries = layer.q_proj(inputs).unflatten(-1, (heads, size)).transpose(1, 2)
    queries = rotate(layer.rope, queries, positions)
    keys, values = text.repeat_interleave(heads // shared, dim=1).unbind(2)
    path_keys, path_values = path.repeat_interleave(heads // shared, dim=1).unbind(2)
    scores = queries @ keys.mT / math.sqrt(size)
    path_scores = (queries[..., None, :] * path_keys).sum(-1) / math.sqrt(size)
    weights = scores.masked_fill(~visible[:, None], -math.inf).exp()
    path_weights = path_scores.exp() * (case != "slots")
    sink = layer.attention_sink_bias.exp()[:, None, None]
    mixed = weights @ values + (path_weights[..., None] * path_values).sum(-2)
    mixed = mixed / (weights.sum(-1, True) + path_weights.sum(-1, True) + sink)
    expected_output = layer.o_proj(mixed.transpose(1, 2).flatten(2))

    torch.testing.assert_close(output, expected_output, rtol=0, atol=1e-12)
    leaves = [text, layer.attention_sink_bias, layer.q_proj.weight]
    leaves += [] if case == "slots" else [path]
    target = torch.randn_like(output)
    gradients, expected_gradients = (
        torch.autograd.grad((values * target).sum(), leaves) for values in (output, expected_output)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
        assert expected_gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "eagle3", "sliding_window": 0}, "sliding_window must be .* at least 1"),
        ({"kind": "eagle3", "parallel": True, "sliding_window": 6}, "at least its depth 7, got 6"),
        ({"kind": "dflash", "causal": True}, "needs head.sliding_window of at least 1, got None"),
        ({"kind": "dflash", "full_layers": [0]}, "full_layers needs head.sliding_window and some"),
        (
            {"kind": "eagle3", "num_layers": 2, "sliding_window": 9, "full_layers": [0, 2]},
            r"some of 2 layers from 0 on, got \[0, 2\]",
        ),
        (
            {"kind": "dflash", "window_counts_slots": True, "sliding_window": 7},
            "head.window_counts_slots=true needs head.sliding_window of at least 8, got 7",
        ),
    ],
)
def test_impossible_windows_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build_for_base(settings, tiny.base())


@each_case
def test_cache_is_cut_to_the_window_and_drafts_the_same(settings: dict, monkeypatch):
    """Rows of different lengths read a long prompt and many steps; some leave, and some join."""
    head, spare, longest = head_of(settings), 3, 60
    tokens = torch.randint(8, (4, longest), generator=torch.manual_seed(0))
    features = tiny.base().read(tokens, head.aux_layers)

    def memory(rows: int, slots: int) -> Any:
        monkeypatch.setattr(attention, "SPARE_SLOTS", slots)
        return head.memory(rows, longest)

    def draft_and_compare(
        rows: list[int], starts: Tensor, counts: Tensor, memories: list[Any]
    ) -> Tensor:
        monkeypatch.setattr(attention, "SPARE_SLOTS", spare)
        positions = starts[:, None] + torch.arange(int(counts.max()))
        following = tokens[rows].gather(1, positions + 1)
        committed = Committed(
            features.select(torch.tensor(rows)).gather(positions), following, counts
        )
        cut, full = (drafted(head, committed, cache) for cache in memories)
        torch.testing.assert_close(cut, full, rtol=0, atol=1e-10)
        return starts + counts

    cut, full = memory(3, spare), memory(3, longest)
    at = draft_and_compare(
        [0, 1, 2], torch.zeros(3, dtype=torch.long), torch.tensor([21, 4, 13]), [cut, full]
    )
    for step in range(6):
        at = draft_and_compare([0, 1, 2], at, 1 + (torch.arange(3) + step) % 3, [cut, full])
        assert cut.kv_cache.shape[3] == WINDOW + spare < full.kv_cache.shape[3]
    cut, full = (cache.keep(torch.tensor([2, 0])) for cache in (cut, full))
    new = [memory(1, spare), memory(1, longest)]
    later = draft_and_compare([3], torch.zeros(1, dtype=torch.long), torch.tensor([17]), new)
    cut, full, at = cut.join(new[0]), full.join(new[1]), torch.cat([at[[2, 0]], later])
    for step in range(6):
        at = draft_and_compare([2, 0, 3], at, 1 + (torch.arange(3) + step) % 3, [cut, full])
        assert cut.kv_cache.shape[3] == WINDOW + spare
    # an engine with a paged cache keeps all positions
    none = torch.zeros(1, dtype=torch.long)
    paged = memory(1, spare).scatter(torch.arange(longest).flip(0)[None], none)
    draft_and_compare([0], none, torch.tensor([21]), [paged, memory(1, longest)])


# the numbers of speculators 0.9, with a window of 5 in texts of 12 positions


def test_eagle3_trains_on_speculators_logits_and_drafts_them():
    head, golden = load_head(GOLDEN / "eagle3_window").double(), expected("eagle3_window")
    assert (head.config.sliding_window, head.config.num_layers) == (5, 2)
    aux, following, reference = (golden[name] for name in ("in.aux", "in.following", "out.logits"))
    time = aux.shape[1]
    for level, state in enumerate(head.states(features(aux), following.roll(1, dims=1))):
        close(head.logits(state, level)[0, : time - level], reference[level, : time - level])
    for last in (4, 5, 8):
        committed = Committed(
            features(aux[:, : last + 1]), following[:, : last + 1], torch.tensor([last + 1])
        )
        logits, state = head.begin(committed, head.memory(1, 32))
        for level in range(head.depth):
            close(logits[0, 0], reference[level, last])
            if level + 1 < head.depth:
                node = following[:, last + 1 + level, None]
                logits, state = head.extend(state, node, torch.zeros_like(node))


def test_p_eagle_trains_on_speculators_logits():
    head, golden = load_head(GOLDEN / "peagle_window").double(), expected("peagle_window")
    assert (head.config.sliding_window, head.config.parallel) == (5, True)
    states = head.states(features(golden["in.aux"]), golden["in.following"].roll(1, dims=1))
    result = torch.stack([head.logits(state, k)[0] for k, state in enumerate(states)])
    # it may sample an anchor before the text
    inside = golden["out.anchors"] >= 0
    depths, anchors = golden["out.depths"][inside], golden["out.anchors"][inside]
    close(result[depths, anchors], golden["out.logits"][inside])


def test_dflash_drafts_speculators_blocks():
    head, golden = load_head(GOLDEN / "dflash_window").double(), expected("dflash_window")
    assert (head.config.sliding_window, head.config.causal) == (5, True)
    drafts_blocks(head, golden, golden["out.logits"][:, 1:])


@pytest.mark.usefixtures("in_float64")
def test_dflash_with_sinks_drafts_modelopt_s_blocks():
    """ModelOpt 0.47, in the format of its exporter; a window of 6 that ends at each slot."""
    head, golden = load_head(GOLDEN / "dflash_modelopt"), expected("dflash_modelopt")
    head.double().bind(golden["in.embedding"], golden["in.projection"])
    config = head.config
    assert (config.sliding_window, config.window_counts_slots, config.causal) == (6, True, False)
    assert config.attention_sink
    drafts_blocks(head, golden, golden["out.logits"])


def drafts_blocks(head: Head, golden: dict[str, Tensor], reference: Tensor) -> None:
    """Compare blocks in training, and in drafting from the positions before their anchors."""
    aux, tokens, anchors = golden["in.aux"], golden["in.tokens"], golden["out.anchors"]
    assert anchors.max() > 6
    result = torch.stack([state[0] for state in head.states(features(aux), tokens)], dim=1)
    for anchor, logits in zip(anchors.tolist(), reference, strict=True):
        if anchor:
            close(head.logits(result[anchor - 1], 0), logits)
            count = torch.tensor([anchor])
            committed = Committed(features(aux[:, :anchor]), tokens[:, 1 : anchor + 1], count)
            drafts, _ = head.begin(committed, head.memory(1, 32))
            close(drafts[0, 0], logits[0])
