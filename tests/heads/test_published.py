"""Medusa, Hydra, ReDrafter and MLP speculators: the numbers of their projects."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Features, Head
from specheads.core.features import Committed
from specheads.core.tree import from_paths
from specheads.decoding.trees import policies
from specheads.heads.load import load_head
from specheads.measure.offline import offline_logits
from tests.heads.golden import GOLDEN, close, expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_a_public_medusa_gives_its_project_s_logits(dtype: torch.dtype, tolerance: float):
    head = load_head(GOLDEN / "medusa_heads").to(dtype)
    golden = expected("medusa_heads")
    hidden = golden["in.hidden"].to(dtype)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long)
    states = head.states(Features(hidden), tokens)
    for level, state in enumerate(states):
        reference = golden["out64.logits"][level].to(dtype)
        close(head.logits(state, level), reference, tolerance)


HYDRA = ["hydra_mlp", "hydra_prefix_mlp"]


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
        result = head.logits(state[:, :time], level)
        reference = golden["out64.logits"][level].to(dtype)
        torch.testing.assert_close(result, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", HYDRA)
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
    result = set()
    for leaf in sorted(set(range(policy.num_nodes)) - set(tree.parents[0].tolist())):
        path = tree.ancestors()[0, leaf].nonzero()[:, 0]
        result.add(tuple(tree.tokens[0, path].tolist()))
    paths, positions = golden["out.proposal.paths"], golden["out.tree.retrieve_indices"]
    reference = {
        tuple(path[is_node].tolist()) for path, is_node in zip(paths, positions >= 0, strict=True)
    }
    assert torch.equal(tree.tokens[0], golden["out.proposal.tokens"])
    assert result == reference
    buffers = load_file(GOLDEN / case / "buffers.safetensors")
    assert torch.equal(tree.ancestors()[0], buffers["out.tree.attn_mask"].bool())
    assert torch.equal(tree.depths()[0], buffers["out.tree.position_offsets"])


def test_hydra_s_own_pickled_file_is_read(tmp_path: Path):
    result = load_head(as_published("hydra_mlp", tmp_path)).state_dict()
    for name, value in load_head(GOLDEN / "hydra_mlp").state_dict().items():
        assert torch.equal(value, result[name]), name


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


REDRAFTER = ["redrafter_rnn", "redrafter_sum"]
BEAMS = [(5, 4), (3, 5)]
"""Width and length of the stored beam searches; the given token counts as the first."""

TOLERANCES = pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float32, 1e-4, 1e-4), (torch.float64, 1e-9, 1e-10)],
    ids=["f32", "f64"],
)


def load(case: str, dtype: torch.dtype) -> tuple[Head, dict[str, torch.Tensor]]:
    golden = expected(case)
    head = load_head(GOLDEN / case)
    head.bind(golden["in.embeddings"])
    return head.to(dtype), golden


def root(golden: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple:
    """Return the input of `begin` for a draft from the last position of each row."""
    features = Features(golden["in.hidden"][:, -1:].to(dtype))
    committed = Committed(features, golden["in.tokens"][:, -1:], torch.ones(2, dtype=torch.long))
    return committed, None


@pytest.mark.parametrize("case", REDRAFTER)
@TOLERANCES
def test_a_public_redrafter_gives_its_project_s_logits(
    case: str, dtype: torch.dtype, rtol: float, atol: float
):
    head, golden = load(case, dtype)
    steps, _, time, _ = golden["out64.logits"].shape
    states = list(head.states(Features(golden["in.hidden"].to(dtype)), golden["in.tokens"]))
    assert len(states) == head.depth == 5
    for level in range(steps):
        torch.testing.assert_close(
            head.logits(states[level][:, :time], level),
            golden["out64.logits"][level].to(dtype),
            rtol=rtol,
            atol=atol,
        )


@pytest.mark.parametrize("case", REDRAFTER)
def test_log_probabilities_of_the_best_fifty_equal_the_project_s(case: str):
    """The project gives all other tokens -50000, which is not a log probability."""
    head, golden = load(case, torch.float32)
    states = head.states(Features(golden["in.hidden"]), golden["in.tokens"])
    for level, (state, reference) in enumerate(zip(states, golden["out.log_probs"], strict=False)):
        logits = head.logits(state[:, : reference.shape[1]], level)
        best, guesses = logits.topk(50, dim=-1)
        law = torch.full_like(reference, -50000.0).scatter(-1, guesses, best.log_softmax(-1))
        is_kept = reference > -1000
        assert torch.equal(law > -1000, is_kept)
        torch.testing.assert_close(law[is_kept], reference[is_kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", REDRAFTER)
@pytest.mark.parametrize("search", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_the_deepest_paths_of_a_beam_equal_the_project_s_beams(
    case: str, search: int, dtype: torch.dtype
):
    head, golden = load(case, dtype)
    width, length = BEAMS[search]
    with torch.inference_mode():
        tree = policies.Beam(width, length - 1).grow(head, *root(golden, dtype))
    reach = tree.ancestors()
    for row in range(2):
        beams = [tree.tokens[row, reach[row, leaf]].tolist() for leaf in range(-width, 0)]
        assert beams == golden[f"out.beams.{search}"][row].tolist()


@pytest.mark.parametrize("case", REDRAFTER)
@pytest.mark.parametrize("search", [0, 1])
@TOLERANCES
def test_drafting_along_the_project_s_beams_gives_their_scores(
    case: str, search: int, dtype: torch.dtype, rtol: float, atol: float
):
    head, golden = load(case, dtype)
    beams = golden[f"out.beams.{search}"]
    logits, state = head.begin(*root(golden, dtype))
    score = torch.zeros(beams.shape[:2], dtype=dtype)
    for index in range(1, beams.shape[2]):
        best, guesses = logits.topk(50, dim=-1)
        law = best.log_softmax(-1).expand(-1, beams.shape[1], -1)
        hit = guesses == beams[:, :, index : index + 1]
        assert hit.any(-1).all()
        score += (law * hit).sum(-1)
        parents = torch.arange(beams.shape[1]).expand(2, -1) * int(index > 1)
        logits, state = head.extend(state, beams[:, :, index], parents)
    reference = golden[f"out64.beam_scores.{search}"].to(dtype)
    torch.testing.assert_close(score, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("case", "output", "packing"),
    [("redrafter_pack", "expected", "in.beams")]
    + [(case, "packed", "out.beams") for case in REDRAFTER],
)
def test_beams_share_prefixes_as_the_project_packs_them(case: str, output: str, packing: str):
    packed = load_file(GOLDEN / case / f"{output}.safetensors")
    beams_of = expected(case)
    for search in range(len([name for name in packed if name.startswith("out.packed")])):
        beams = beams_of[f"{packing}.{search}"]
        tree = from_paths(beams)
        assert tree.tokens.shape == packed[f"out.packed.{search}"].shape
        unpacker = packed[f"out.unpacker.{search}"]
        reach, depths = tree.ancestors(), tree.depths()
        for row, positions in enumerate(unpacker):
            # the nodes after a row's own prefixes are padding, there and here
            num_nodes = int(positions.max()) + 1
            assert torch.equal(
                tree.tokens[row, :num_nodes], packed[f"out.packed.{search}"][row, :num_nodes]
            )
            offsets = packed[f"out.position_offsets.{search}"][row, :num_nodes]
            assert torch.equal(depths[row, :num_nodes], offsets)
            assert torch.equal(tree.tokens[row][positions], beams[row])
            for beam in positions:
                assert torch.equal(reach[row, beam[-1]].nonzero()[:, 0], beam.sort().values)
            mask = packed.get(f"out.causal_mask.{search}")
            if mask is not None:
                visible = mask[row, :num_nodes, -tree.tokens.shape[1] :][:, :num_nodes].bool()
                assert torch.equal(reach[row, :num_nodes, :num_nodes], visible)


GATES = ("forget", "input", "output", "cell")
ARCTIC = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "method": "sum_lstm",
    "input_hidden_dim": 12,
    "inner_dim": "8",
    "emb_dim": "8",
    "proj_dim": "8",
    "n_predict": 3,
    "vocab_size": 19,
    "tie_weights": True,
    "tie_lstm_embs": True,
    "scale_input": True,
}
"""As `ArcticLSTMSpeculatorConfig` of snowflakedb/ArcticTraining writes it, dimensions as text."""


@pytest.mark.parametrize("case", ["mlp_speculator_tied_scaled", "mlp_speculator_untied"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_a_public_mlp_speculator_gives_its_project_s_logits(
    case: str, dtype: torch.dtype, tolerance: float
):
    head = load_head(GOLDEN / case).to(dtype)
    golden = expected(case)
    time = golden["in.hidden"].shape[1]
    # there inds[:, t] is the token at t + 1; the token at 0 is not read
    tokens = F.pad(golden["in.inds"], (1, 0))
    hidden = F.pad(golden["in.hidden"], (0, 0, 0, tokens.shape[1] - time)).to(dtype)
    for level, logits in enumerate(offline_logits(head, Features(hidden), tokens)):
        reference = golden["out64.logits"][level].to(dtype)
        close(logits[:, :time], reference, tolerance)


def test_tied_copies_that_differ_are_refused(tmp_path: Path):
    source = GOLDEN / "mlp_speculator_tied_scaled"
    tensors = load_file(source / "model.safetensors")
    tensors["speculator.emb.2.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ValueError, match=r"'emb\.2\.weight' and 'emb\.0\.weight' must be equal"):
        load_head(tmp_path)


def arctic_tensors(depth: int = 3) -> dict[str, Tensor]:
    """Return the tensors of an Arctic LSTM speculator, with tied tensors under each name."""
    generator = torch.manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    embedding, projection = random(19, 8), random(19, 8)
    tensors = {f"{gate}_emb.0.weight": embedding.clone() for gate in GATES}
    tensors |= {f"{gate}_proj.0.weight": random(8, 12) for gate in GATES}
    tensors |= {f"{gate}_proj.1.weight": random(8, 8) for gate in GATES}
    for norm in ("cell_ln", "state_ln"):
        tensors |= {f"{norm}.0.weight": 1 + random(8), f"{norm}.0.bias": random(8)}
    return tensors | {f"head.{level}.weight": projection.clone() for level in range(depth)}


def arctic_logits(tensors: dict[str, Tensor], hidden: Tensor, tokens: list[int]) -> list[Tensor]:
    """Return the logits after each token, computed gate by gate as in ArcticTraining."""

    def norm(values: Tensor, name: str) -> Tensor:
        scaled = values * torch.rsqrt(values.pow(2).mean() + 1e-6)
        return scaled * tensors[f"{name}.0.weight"] + tensors[f"{name}.0.bias"]

    keep = 0.5 ** (0.5 / 3)
    weight = math.sqrt((1 - keep**2) * 8 / 2) / keep
    state = hidden * torch.rsqrt(hidden.pow(2).mean() + 1e-6) / math.sqrt(2)
    cell, out = torch.zeros(8, dtype=hidden.dtype), []
    for index, token in enumerate(tokens):
        mixed = {
            gate: tensors[f"{gate}_proj.{min(index, 1)}.weight"] @ state
            + weight * tensors[f"{gate}_emb.0.weight"][token]
            for gate in GATES
        }
        candidate = F.gelu(norm(mixed["cell"], "cell_ln"))
        cell = cell * mixed["forget"].sigmoid() + candidate * mixed["input"].sigmoid()
        state = F.gelu(norm(cell, "state_ln")) * mixed["output"].sigmoid()
        out.append(tensors["head.0.weight"] @ state)
    return out


def write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint in the layout of Arctic's trainer."""
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_a_public_arctic_lstm_speculator_follows_its_project_s_formula(prefix: str, tmp_path: Path):
    tensors = arctic_tensors()
    prefixed = {prefix + name: value for name, value in tensors.items()}
    head = load_head(write(tmp_path, ARCTIC, prefixed)).double()
    assert (head.width, head.vocab_size, head.depth) == (12, 19, 3)
    hidden = torch.randn(1, 9, 12, generator=torch.manual_seed(5)).double()
    tokens = torch.randint(19, (1, 9), generator=torch.manual_seed(6))
    result = offline_logits(head, Features(hidden), tokens)
    exact = {name: value.double() for name, value in tensors.items()}
    for index in range(5):
        next_tokens = tokens[0, index + 1 : index + 4].tolist()
        reference = arctic_logits(exact, hidden[0, index], next_tokens)
        for level, logits in enumerate(reference):
            torch.testing.assert_close(result[level][0, index], logits, rtol=0, atol=1e-12)


def test_arctic_s_rnn_equals_ibm_s(tmp_path: Path):
    source = GOLDEN / "mlp_speculator_untied"
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    renamed = {}
    for name, value in tensors.items():
        output, level, suffix = name.removeprefix("speculator.").split(".")
        renamed[
            f"{output}.{level}.{suffix}" if output == "head" else f"{output}.{level}.0.{suffix}"
        ] = value
    inner = str(config["inner_dim"])
    widths = {"inner_dim": inner, "proj_dim": inner, "emb_dim": inner}
    config |= widths | {"method": "sum_rnn", "input_hidden_dim": config["emb_dim"]}
    reference = load_head(write(tmp_path, config, renamed)).state_dict()
    for name, value in load_head(source).state_dict().items():
        assert torch.equal(value, reference[name]), name


@pytest.mark.parametrize(
    "change",
    [{"tie_lstm_embs": False}, {"inner_dim": "8.8"}, {"proj_dim": "4"}, {"method": "sum_gru"}],
    ids=["untied", "two layers", "two widths", "unknown"],
)
def test_unsupported_arctic_speculators_are_refused(change: dict, tmp_path: Path):
    with pytest.raises(ValueError, match="an Arctic speculator must have one width"):
        load_head(write(tmp_path, ARCTIC | change, arctic_tensors()))


def test_gates_whose_tied_embeddings_differ_are_refused(tmp_path: Path):
    tensors = arctic_tensors()
    tensors["input_emb.0.weight"] += 1
    with pytest.raises(ValueError, match="the gates' embeddings must be equal"):
        load_head(write(tmp_path, ARCTIC, tensors))
