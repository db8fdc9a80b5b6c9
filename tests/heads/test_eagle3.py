"""EAGLE-3: the numbers of its projects, and training states that equal drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specheads.core.features import Committed
from specheads.decoding.trees import policies
from specheads.heads.kinds import eagle3
from specheads.heads.load import build_for_base, build_head, load_head
from tests import tiny
from tests.heads.golden import GOLDEN, close, expected, features

CHAIN = GOLDEN / "eagle3_chain"
TTT = GOLDEN / "eagle3_speculators_ttt"


def loaded(folder: Path) -> eagle3.Head:
    head = load_head(folder)
    assert isinstance(head, eagle3.Head)
    return head


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


def bound(golden: dict[str, torch.Tensor]) -> eagle3.Head:
    head = loaded(CHAIN)
    head.bind(golden["in.embed_tokens"])
    return head


@pytest.fixture
def golden() -> dict[str, torch.Tensor]:
    return load_file(CHAIN / "expected.safetensors")


@pytest.mark.parametrize("run", ["forced", "greedy"])
def test_a_public_eagle3_drafts_its_project_s_chain(golden: dict[str, torch.Tensor], run: str):
    head, greedy_tokens = bound(golden), golden["out.greedy.tokens"]
    # the last drafted token is not read
    after = golden["in.forced"] if run == "forced" else greedy_tokens[:, :-1]
    logits = chain(head, golden["in.aux"], torch.cat([golden["in.tokens"][:, 1:], after], dim=1))
    assert run == "forced" or torch.equal(head.to_tokens(logits.argmax(-1)), greedy_tokens)
    close(logits, golden[f"out.{run}.logits"], 1e-4)


@pytest.mark.parametrize(("search", "top_k", "num_nodes"), [(0, 1, 5), (1, 4, 16)])
def test_a_public_eagle3_drafts_its_project_s_trees(
    golden: dict[str, torch.Tensor], search: int, top_k: int, num_nodes: int
):
    """There a depth of 3 counts the levels after the first."""
    head = bound(golden)
    policy = policies.BestFirst(num_nodes, depth=4, beam=top_k, branch=top_k)
    aux, following = golden["in.aux"], golden["in.tokens"][:, 1:]
    count, memory = torch.full((2,), 10), head.memory(2, capacity=16)
    tree = policy.grow(head, Committed(features(aux), following, count), memory)
    assert torch.equal(tree.tokens[0], golden[f"out.tree.tokens.{search}"])
    mask = golden[f"out.tree.attn_mask.{search}"].bool()
    assert torch.equal(tree.ancestors()[0], mask)
    assert torch.equal(tree.depths()[0], golden[f"out.tree.position_offsets.{search}"])


def test_a_public_eagle3_reads_known_text_as_its_project_does(golden: dict[str, torch.Tensor]):
    head = bound(golden)
    # its states read one token beyond the features
    aux = torch.nn.functional.pad(golden["in.aux"], (0, 0, 0, 1))
    state = next(head.states(features(aux), golden["in.tokens"]))[:, :-1]
    close(head.logits(state, 0), golden["out.known.logits"], 1e-4)


def test_training_time_test_gives_speculators_logits():
    head = loaded(TTT)
    golden = load_file(TTT / "expected.safetensors")
    reference = golden["out.logits"]
    assert head.depth == len(reference) == 4
    assert head.config.norm_before_residual
    # there tokens are shifted by one position, and the first is not read
    tokens = golden["in.input_ids"].roll(1, dims=1)
    for level, state in enumerate(head.states(features(golden["in.aux"]), tokens)):
        logits = head.logits(state, level)[:, : reference.shape[2]]
        torch.testing.assert_close(logits, reference[level], rtol=1e-4, atol=1e-4)


def test_stored_embedding_is_borrowed_if_equal_to_the_bases_and_kept_if_not(tmp_path: Path):
    equal, changed_head = loaded(TTT), loaded(TTT)
    stored = equal.embedding
    assert stored is not None
    equal.bind(stored.double())
    assert not equal.config.own_embedding
    assert "embed_tokens.weight" not in equal.state_dict()
    planned = loaded(TTT).to("meta")
    planned.bind(stored.to("meta"))
    assert planned.embedding is not None
    assert planned.embedding.is_meta
    changed_head.bind(stored + 1)
    changed_head.save_pretrained(tmp_path)
    own_head = loaded(tmp_path)
    own_head.bind(stored + 1)
    tokens = torch.arange(len(stored))
    assert torch.equal(own_head.embed(tokens, stored), stored)


@pytest.mark.parametrize("case", ["eagle3_layers", "eagle3_yarn", "eagle3_linear"])
def test_each_option_trains_on_speculators_logits(case: str):
    """Three layers with llama 3's rotary embedding, both norms of EAGLE-3.1, yarn, and linear."""
    head, golden = loaded(GOLDEN / case).double(), expected(case)
    tokens, reference = golden["in.following"].roll(1, dims=1), golden["out.logits"]
    for level, state in enumerate(head.states(features(golden["in.aux"]), tokens)):
        # the last positions read tokens beyond the end
        num_compared = reference.shape[1] - level
        logits = head.logits(state, level)[0, :num_compared]
        torch.testing.assert_close(logits, reference[level, :num_compared], rtol=0, atol=1e-9)


def test_p_eagle_trains_on_speculators_logits_and_drafts_them():
    head = loaded(GOLDEN / "peagle").double()
    assert (head.config.parallel, head.config.mask_token, head.config.num_layers) == (True, 7, 2)
    golden = expected("peagle")
    aux, following, reference = (golden[name] for name in ("in.aux", "in.following", "out.logits"))
    states = head.states(features(aux), following.roll(1, dims=1))
    trained = torch.stack([head.logits(state, k)[0] for k, state in enumerate(states)])
    anchors, depths = golden["out.anchors"], golden["out.depths"]
    assert sorted(set(depths.tolist())) == [0, 1, 2, 3]
    torch.testing.assert_close(trained[depths, anchors], reference, rtol=0, atol=1e-9)
    for anchor in range(3, 8):
        # for any value of the tokens in between
        along = torch.cat([following[:, : anchor + 1], torch.tensor([[4, 40, 2]])], dim=1)
        drafted = chain(head, aux[:, : anchor + 1], along)[0]
        chosen = [int(((anchors == anchor) & (depths == k)).nonzero()) for k in range(4)]
        torch.testing.assert_close(drafted, reference[chosen], rtol=0, atol=1e-9)


def test_a_scaled_rotary_embedding_drafts_its_project_s_chain():
    head = loaded(GOLDEN / "eagle3_chain_linear").double()
    golden = expected("eagle3_chain_linear")
    assert head.config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    reference = golden["out.logits"]
    along = golden["in.following"][:, : golden["in.aux"].shape[1] + reference.shape[1] - 1]
    drafted = chain(head, golden["in.aux"], along)
    torch.testing.assert_close(drafted, reference, rtol=0, atol=1e-9)


def test_rope_theta_beside_the_parameters_of_the_embedding_counts_for_less():
    # a class writes its own default at the top level
    settings = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    config = json.loads((CHAIN / "config.json").read_text()) | settings
    head = eagle3.read_public(config, load_file(CHAIN / "model.safetensors"))
    assert head is not None
    rope: Any = LlamaConfig(**settings).rope_parameters
    assert head.config.rope_theta == rope["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("num_layers", "aux_layers"),
    [(32, (2, 16, 29)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3)), (3, (0, 1, 2))],
)
def test_three_different_aux_layers_are_chosen_for_any_base(
    num_layers: int, aux_layers: tuple[int, ...]
):
    head = build_head({"kind": "eagle3"}, width=16, vocab_size=11)
    head.choose_aux_layers(num_layers)
    assert head.aux_layers == tuple(head.config.aux_layers) == aux_layers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth must be a whole number, at least 1, at most 64, got 0"),
        ({"aux_layers": [3, 2]}, r"must increase, got \[3, 2\]"),
        ({"aux_layers": [-1, 2]}, r"at least 0, at most 4,096, got -1 at head.aux_layers\[0\]"),
        ({"aux_layers": [1, 2, 4]}, "after 4 layers, this base has 3"),
        ({"attention_heads": 4, "key_value_heads": 3}, "got 3, 4 and 8"),
        ({"head_dim": 7}, "an even head_dim"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build_for_base({"kind": "eagle3", **settings}, tiny.base("llama"))


def test_a_base_too_shallow_for_three_layers_is_refused():
    with pytest.raises(ValueError, match=r"this one has 2; set head\.aux_layers=\[0, 1\]"):
        build_head({"kind": "eagle3"}, width=16, vocab_size=11).choose_aux_layers(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(only 'silu'\)"),
        ({"norm_before_fc": True}, r'Missing key.* "input_norm\.weight"'),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "linear, llama3, yarn, got 'lo",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "linear needs factor and may have no more; fix 'factor'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "number above 0, got '4'"),
        ({"target_hidden_size": 64}, r"target_hidden_size=64 \(only 48\)"),
    ],
)
def test_unsupported_checkpoints_are_refused(change: dict, message: str):
    config = json.loads((CHAIN / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        eagle3.read_public(config, load_file(CHAIN / "model.safetensors"))


def test_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text((CHAIN / "config.json").read_text())
    tensors = load_file(CHAIN / "model.safetensors")
    tensors["d2t"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t and t2d"):
        load_head(tmp_path)
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r'Missing key.* "draft_ids"'):
        load_head(tmp_path)
