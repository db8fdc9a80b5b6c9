"""Hydra heads: the numbers of the original project, initialisation and borrowed tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.decoding.trees import policies
from specheads.heads.load import load_head
from tests.heads.golden import GOLDEN, expected

CASES = ["hydra_mlp", "hydra_prefix_mlp"]


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in (GOLDEN / case).glob("model*.safetensors"):
        tensors |= load_file(file)
    return tensors


def as_published(case: str, folder: Path, **config) -> Path:
    """Write a case in its project's layout, with these entries of config.json changed."""
    torch.save(tensors_of(case), folder / "hydra_lm_head.pt")
    settings = json.loads((GOLDEN / case / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("case", "dtype", "rtol", "atol"),
    [
        ("hydra_mlp", torch.float32, 1e-4, 1e-4),
        ("hydra_mlp", torch.float64, 1e-9, 1e-10),
        ("hydra_prefix_mlp", torch.float32, 1e-4, 1e-4),
        # there the prefix layer's norms and softmax stay in float32
        ("hydra_prefix_mlp", torch.float64, 5e-5, 5e-5),
    ],
)
def test_a_public_hydra_gives_its_project_s_logits(
    case: str, dtype: torch.dtype, rtol: float, atol: float
):
    head = load_head(GOLDEN / case).to(dtype)
    golden = expected(case)
    time = golden["out64.logits"].shape[2]
    states = list(head.states(Features(golden["in.hidden"].to(dtype)), golden["in.tokens"]))
    assert len(states) == len(golden["out64.logits"])
    for level, state in enumerate(states):
        ours = head.logits(state[:, :time], level)
        theirs = golden["out64.logits"][level].to(dtype)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_a_public_hydra_drafts_its_project_s_tree(case: str, dtype: torch.dtype):
    head = load_head(GOLDEN / case).to(dtype)
    golden = expected(case)
    policy = policies.Static(json.loads((GOLDEN / case / "tree.json").read_text()))
    hidden = golden["in.hidden"][:1].to(dtype)
    time = hidden.shape[1]
    following = torch.cat([golden["in.tokens"][:1, 1:], golden["in.root"]], dim=1)
    count = torch.tensor([time])
    memory = head.memory(1, capacity=time)
    with torch.inference_mode():
        tree = policy.grow(head, Committed(Features(hidden), following, count), memory)
    ours = set()
    for leaf in sorted(set(range(policy.num_nodes)) - set(tree.parents[0].tolist())):
        path = tree.ancestors()[0, leaf].nonzero()[:, 0]
        ours.add(tuple(tree.tokens[0, path].tolist()))
    paths, places = golden["out.proposal.paths"], golden["out.tree.retrieve_indices"]
    theirs = {tuple(path[known].tolist()) for path, known in zip(paths, places >= 0, strict=True)}
    assert torch.equal(tree.tokens[0], golden["out.proposal.tokens"])
    assert ours == theirs
    buffers = load_file(GOLDEN / case / "buffers.safetensors")
    assert torch.equal(tree.ancestors()[0], buffers["out.tree.attn_mask"].bool())
    assert torch.equal(tree.depths()[0], buffers["out.tree.position_offsets"])


def test_hydra_s_own_pickled_file_is_read(tmp_path: Path):
    ours = load_head(as_published("hydra_mlp", tmp_path)).state_dict()
    for name, value in load_head(GOLDEN / "hydra_mlp").state_dict().items():
        assert torch.equal(value, ours[name]), name


@pytest.mark.parametrize(
    "config",
    [{"hydra_head_arch": "eagle-attn"}, {"grounded_heads": False}, {"hidden_state_offset": 1}],
    ids=["architecture", "ungrounded", "earlier state"],
)
def test_unsupported_hydra_heads_are_refused(config: dict, tmp_path: Path):
    with pytest.raises(ValueError, match="must be 'mlp' or 'prefix-mlp'"):
        load_head(as_published("hydra_mlp", tmp_path, **config))


def test_a_prefix_layer_of_unknown_shape_is_refused(tmp_path: Path):
    tensors = tensors_of("hydra_prefix_mlp")
    name = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    config = (GOLDEN / "hydra_prefix_mlp" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=name):
        load_head(tmp_path)
