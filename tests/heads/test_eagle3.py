"""EAGLE-3: the numbers of its projects, and training states that equal drafts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.decoding.trees import policies
from specheads.heads.kinds import eagle3
from specheads.heads.load import build, build_for, load_head
from tests import tiny

GOLDEN = Path(__file__).parents[1] / "golden"
CHAIN = GOLDEN / "eagle3_chain"
TTT = GOLDEN / "eagle3_speculators_ttt"


def loaded(folder: Path) -> eagle3.Head:
    head = load_head(folder)
    assert isinstance(head, eagle3.Head)
    return head


def random(base: FrozenBase, **settings) -> eagle3.Head:
    """Return a head with random tensors in float64."""
    torch.manual_seed(1)
    head = build_for({"kind": "eagle3", **settings}, base).double().eval()
    assert isinstance(head, eagle3.Head)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def features(aux: torch.Tensor) -> Features:
    """Return features with aux only, the input of this head."""
    return Features(aux[..., : aux.shape[-1] // 3], aux)


def chain(head: eagle3.Head, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of drafting along `tokens`, of which all but the last are committed when
    there are as many as positions, and any after that are drafted."""
    time, batch = aux.shape[1], len(aux)
    memory = head.memory(batch, capacity=64)
    count = torch.full((batch,), time)
    logits, state = head.begin(Committed(features(aux), tokens[:, :time], count), memory)
    drafted = [logits]
    for node in tokens[:, time:].split(1, dim=1):
        logits, state = head.extend(state, node, torch.zeros_like(node))
        drafted.append(logits)
    return torch.cat(drafted, dim=1)


@pytest.fixture
def golden() -> dict[str, torch.Tensor]:
    return load_file(CHAIN / "expected.safetensors")


def test_a_public_eagle3_drafts_its_project_s_chain(golden: dict[str, torch.Tensor]):
    head = loaded(CHAIN)
    head.bind(golden["in.embed_tokens"])
    forced = torch.cat([golden["in.tokens"][:, 1:], golden["in.forced"]], dim=1)
    logits = chain(head, golden["in.aux"], forced)
    wanted = golden["out.forced.logits"]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_public_eagle3_drafts_its_project_s_tokens(golden: dict[str, torch.Tensor]):
    head = loaded(CHAIN)
    head.bind(golden["in.embed_tokens"])
    said = golden["out.greedy.tokens"]
    # the last drafted token is not read
    tokens = torch.cat([golden["in.tokens"][:, 1:], said[:, :-1]], dim=1)
    logits = chain(head, golden["in.aux"], tokens)
    assert torch.equal(head.to_tokens(logits.argmax(-1)), said)
    wanted = golden["out.greedy.logits"]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("search", "top_k", "num_nodes"), [(0, 1, 5), (1, 4, 16)])
def test_a_public_eagle3_drafts_its_project_s_trees(
    golden: dict[str, torch.Tensor], search: int, top_k: int, num_nodes: int
):
    """There a depth of 3 counts the levels after the first."""
    head = loaded(CHAIN)
    head.bind(golden["in.embed_tokens"])
    policy = policies.BestFirst(num_nodes, depth=4, beam=top_k, branch=top_k)
    aux, following = golden["in.aux"], golden["in.tokens"][:, 1:]
    count, memory = torch.full((2,), 10), head.memory(2, capacity=16)
    tree = policy.grow(head, Committed(features(aux), following, count), memory)
    assert torch.equal(tree.tokens[0], golden[f"out.tree.tokens.{search}"])
    mask = golden[f"out.tree.attn_mask.{search}"].bool()
    assert torch.equal(tree.ancestors()[0], mask)
    assert torch.equal(tree.depths()[0], golden[f"out.tree.position_offsets.{search}"])


def test_a_public_eagle3_reads_known_text_as_its_project_does(golden: dict[str, torch.Tensor]):
    head = loaded(CHAIN)
    head.bind(golden["in.embed_tokens"])
    # its states read one token beyond the features
    aux = torch.nn.functional.pad(golden["in.aux"], (0, 0, 0, 1))
    state = next(head.states(features(aux), golden["in.tokens"]))[:, :-1]
    torch.testing.assert_close(
        head.logits(state, 0), golden["out.known.logits"], rtol=1e-4, atol=1e-4
    )


def test_training_time_test_gives_speculators_logits():
    head = loaded(TTT)
    golden = load_file(TTT / "expected.safetensors")
    wanted = golden["out.logits"]
    assert head.depth == len(wanted) == 4
    assert head.config.norm_before_residual
    # there tokens are shifted by one position, and the first is not read
    tokens = golden["in.input_ids"].roll(1, dims=1)
    for level, state in enumerate(head.states(features(golden["in.aux"]), tokens)):
        logits = head.logits(state, level)[:, : wanted.shape[2]]
        torch.testing.assert_close(logits, wanted[level], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["eagle3_layers", "eagle3_yarn", "eagle3_linear"])
def test_each_option_trains_on_speculators_logits(case: str):
    """Three layers with llama 3's rotary embedding, both norms of EAGLE-3.1, yarn, and linear."""
    head, golden = loaded(GOLDEN / case).double(), load_file(GOLDEN / case / "expected.safetensors")
    tokens, wanted = golden["in.following"].roll(1, dims=1), golden["out.logits"]
    for level, state in enumerate(head.states(features(golden["in.aux"]), tokens)):
        # the last positions read tokens beyond the end
        known = wanted.shape[1] - level
        ours = head.logits(state, level)[0, :known]
        torch.testing.assert_close(ours, wanted[level, :known], rtol=0, atol=1e-9)


def test_p_eagle_trains_on_speculators_logits_and_drafts_them():
    head = loaded(GOLDEN / "peagle").double()
    assert (head.config.parallel, head.config.mask_token, head.config.num_layers) == (True, 7, 2)
    golden = load_file(GOLDEN / "peagle" / "expected.safetensors")
    aux, following, wanted = (golden[name] for name in ("in.aux", "in.following", "out.logits"))
    states = head.states(features(aux), following.roll(1, dims=1))
    trained = torch.stack([head.logits(state, k)[0] for k, state in enumerate(states)])
    anchors, depths = golden["out.anchors"], golden["out.depths"]
    assert sorted(set(depths.tolist())) == [0, 1, 2, 3]
    torch.testing.assert_close(trained[depths, anchors], wanted, rtol=0, atol=1e-9)
    for anchor in range(3, 8):
        # for any value of the tokens in between
        along = torch.cat([following[:, : anchor + 1], torch.tensor([[4, 40, 2]])], dim=1)
        drafted = chain(head, aux[:, : anchor + 1], along)[0]
        chosen = [int(((anchors == anchor) & (depths == k)).nonzero()) for k in range(4)]
        torch.testing.assert_close(drafted, wanted[chosen], rtol=0, atol=1e-9)


def test_a_scaled_rotary_embedding_drafts_its_project_s_chain():
    head = loaded(GOLDEN / "eagle3_chain_linear").double()
    golden = load_file(GOLDEN / "eagle3_chain_linear" / "expected.safetensors")
    assert head.config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    wanted = golden["out.logits"]
    along = golden["in.following"][:, : golden["in.aux"].shape[1] + wanted.shape[1] - 1]
    drafted = chain(head, golden["in.aux"], along)
    torch.testing.assert_close(drafted, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_training_states_equal_drafts_from_every_position(norm_before_residual: bool):
    """Each anchor reads its prefix at once, then drafts along the true tokens."""
    base = tiny.base("llama")
    head = random(
        base,
        depth=5,
        attention_heads=4,
        key_value_heads=2,
        norm_before_residual=norm_before_residual,
    )
    time = 16
    tokens = torch.randint(base.vocab_size, (2, time), generator=torch.manual_seed(3))
    aux = base.read(tokens, head.aux_layers).aux
    assert aux is not None
    trained = [
        head.logits(state, level) for level, state in enumerate(head.states(features(aux), tokens))
    ]
    for anchor in range(time - head.depth):
        along = tokens[:, 1 : anchor + 1 + head.depth]
        drafted = chain(head, aux[:, : anchor + 1], along)
        at_anchor = torch.stack([logits[:, anchor] for logits in trained], dim=1)
        torch.testing.assert_close(drafted, at_anchor, rtol=0, atol=1e-10)


def test_seven_rounds_from_ragged_anchors_equal_training_states():
    """Draft rows together, each from its own anchor, with invisible padding."""
    base = tiny.base("llama")
    head = random(base, attention_heads=4, key_value_heads=2)
    assert head.depth == 7
    time = 20
    tokens = torch.randint(base.vocab_size, (3, time), generator=torch.manual_seed(5))
    aux = base.read(tokens, head.aux_layers).aux
    assert aux is not None
    states = head.states(features(aux), tokens)
    trained = torch.stack([head.logits(state, k) for k, state in enumerate(states)])
    for anchors in ([0, 12, 5], [7, 1, 12], [3, 3, 0]):
        at = torch.tensor(anchors)
        longest = max(anchors) + 1
        garbage = torch.arange(longest) > at[:, None]
        committed = features(aux[:, :longest].masked_fill(garbage[..., None], 9.0))
        following = tokens[:, 1 : longest + 1].masked_fill(garbage, 3)
        logits, state = head.begin(
            Committed(committed, following, at + 1), head.memory(3, capacity=32)
        )
        drafted = [logits[:, 0]]
        for level in range(1, head.depth):
            node = tokens.gather(1, at[:, None] + 1 + level)
            logits, state = head.extend(state, node, torch.zeros_like(node))
            drafted.append(logits[:, 0])
        wanted = trained[:, torch.arange(3), at]
        torch.testing.assert_close(torch.stack(drafted), wanted, rtol=0, atol=1e-10)


def test_rows_committed_in_pieces_draft_as_if_committed_at_once():
    """Commit different numbers of positions per row, and remove one row."""
    base = tiny.base("llama")
    head = random(base, depth=3)
    tokens = torch.randint(base.vocab_size, (3, 13), generator=torch.manual_seed(3))
    read = base.read(tokens, head.aux_layers)
    at, kept = torch.zeros(3, dtype=torch.long), torch.arange(3)
    memory = head.memory(3, capacity=16)
    for counts in ([5, 2, 3], [1, 4, 2], [3, 2]):
        if len(counts) < len(kept):
            kept = torch.tensor([0, 2])
            memory = memory.keep(kept)
        count = torch.tensor(counts)
        rows = at[kept][:, None] + torch.arange(max(counts))
        following = tokens[kept].gather(1, rows + 1)
        _, state = head.begin(Committed(read.rows(kept).at(rows), following, count), memory)
        at[kept] += count
    node = torch.tensor([[5], [6]])
    together, _ = head.extend(state, node, torch.zeros_like(node))
    for place, row in enumerate(kept.tolist()):
        length = int(at[row])
        aux = read.aux
        assert aux is not None
        along = torch.cat([tokens[row : row + 1, 1 : length + 1], node[place : place + 1]], dim=1)
        alone = chain(head, aux[row : row + 1, :length], along)
        torch.testing.assert_close(together[place], alone[0, 1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_layers", "aux_layers"),
    [(32, (2, 16, 29)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3)), (3, (0, 1, 2))],
)
def test_three_different_aux_layers_are_chosen_for_any_base(
    num_layers: int, aux_layers: tuple[int, ...]
):
    head = build({"kind": "eagle3"}, width=16, vocab_size=11)
    head.choose_aux_layers(num_layers)
    assert head.aux_layers == tuple(head.config.aux_layers) == aux_layers


def test_a_saved_head_keeps_its_aux_layers(tmp_path: Path):
    base = tiny.base("llama", dtype=torch.float32)
    build_for({"kind": "eagle3", "aux_layers": [1, 3]}, base).save_pretrained(tmp_path)
    again = load_head(tmp_path, base)
    assert again.aux_layers == (1, 3)
    assert "embedding" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth must be a whole number, at least 1, at most 64, got 0"),
        ({"aux_layers": [3, 2]}, r"increasing order, got \[3, 2\]"),
        ({"aux_layers": [-1, 2]}, r"at least 0, at most 4,096, got -1 at head.aux_layers\[0\]"),
        ({"aux_layers": [1, 2, 4]}, "after 4 layers, this base has 3"),
        ({"attention_heads": 4, "key_value_heads": 3}, "got 3, 4 and 8"),
        ({"head_dim": 7}, "an even head_dim"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build_for({"kind": "eagle3", **settings}, tiny.base("llama"))


def test_a_base_too_shallow_for_three_layers_is_refused():
    with pytest.raises(ValueError, match=r"got \[0, 1, 1\]; set head.aux_layers"):
        build({"kind": "eagle3"}, width=16, vocab_size=11).choose_aux_layers(2)


def test_missing_inputs_of_the_base_are_named():
    head = build({"kind": "eagle3"}, width=16, vocab_size=11)
    hidden, tokens = torch.zeros(1, 9, 16), torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match=r"aux_layers=head\.aux_layers"):
        next(head.states(Features(hidden), tokens))
    with pytest.raises(ValueError, match="load the head with its base"):
        next(head.states(Features(hidden, hidden.repeat(1, 1, 3)), tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(only 'silu'\)"),
        ({"num_hidden_layers": 2}, r"lacks 'layers\.1\.input_layernorm\.weight'"),
        ({"norm_before_fc": True}, r"lacks 'input_norm\.weight'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "linear, llama3, yarn, got 'lo",
        ),
        ({"rope_scaling": {"type": "linear"}}, "linear needs factor; got nothing: fix 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "number above 0, got '4'"),
        ({"target_hidden_size": 64}, r"target_hidden_size=64 \(only 48\)"),
    ],
)
def test_unsupported_checkpoints_are_refused(change: dict, message: str):
    config = json.loads((CHAIN / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        eagle3.read_public(config, load_file(CHAIN / "model.safetensors"))


@pytest.mark.parametrize("draft_tokens", [0, 20])
def test_exported_vocabulary_maps_are_read_back(draft_tokens: int, tmp_path: Path):
    """A head written in its project's layout loads with its draft vocabulary."""
    base = tiny.base("llama", dtype=torch.float32)
    counts = torch.randint(1, 100, (base.vocab_size,), generator=torch.manual_seed(2))
    settings = {"kind": "eagle3", "attention_heads": 4, "draft_tokens": draft_tokens}
    ours = build_for(settings, base, counts)
    d2t, t2d = ours.draft_maps()
    assert (d2t.dtype, t2d.dtype, len(t2d)) == (torch.int64, torch.bool, base.vocab_size)
    assert int(t2d.sum()) == ours.drafted_size
    tensors = ours.state_dict() | {"d2t": d2t, "t2d": t2d}
    tensors.pop("draft_ids", None)
    save_file(tensors, tmp_path / "model.safetensors")
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96}
    sizes = {"vocab_size": base.vocab_size, "draft_vocab_size": ours.drafted_size}
    config = shape | sizes | {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load_head(tmp_path, base)
    columns = torch.arange(ours.drafted_size)
    assert torch.equal(again.to_tokens(columns), ours.to_tokens(columns))
    assert torch.equal(again.to_tokens(columns), columns + d2t)
    assert torch.equal(t2d.nonzero()[:, 0], again.to_tokens(columns))


def test_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text((CHAIN / "config.json").read_text())
    tensors = load_file(CHAIN / "model.safetensors")
    tensors["d2t"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t and t2d"):
        load_head(tmp_path)
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lacks 'draft_ids'"):
        load_head(tmp_path)
