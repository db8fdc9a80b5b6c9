"""MLP speculators: the numbers of their projects, with the mlp and the gated state."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Features
from specheads.heads.load import load_head
from specheads.measure.offline import offline_logits
from tests.heads.golden import GOLDEN, close, expected

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
        wanted = golden["out64.logits"][level].to(dtype)
        close(logits[:, :time], wanted, tolerance)


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
    for place, token in enumerate(tokens):
        mixed = {
            gate: tensors[f"{gate}_proj.{min(place, 1)}.weight"] @ state
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
    named = {prefix + name: value for name, value in tensors.items()}
    head = load_head(write(tmp_path, ARCTIC, named)).double()
    assert (head.width, head.vocab_size, head.depth) == (12, 19, 3)
    hidden = torch.randn(1, 9, 12, generator=torch.manual_seed(5)).double()
    tokens = torch.randint(19, (1, 9), generator=torch.manual_seed(6))
    ours = offline_logits(head, Features(hidden), tokens)
    exact = {name: value.double() for name, value in tensors.items()}
    for place in range(5):
        read = tokens[0, place + 1 : place + 4].tolist()
        theirs = arctic_logits(exact, hidden[0, place], read)
        for level, logits in enumerate(theirs):
            torch.testing.assert_close(ours[level][0, place], logits, rtol=0, atol=1e-12)


def test_arctic_s_rnn_equals_ibm_s(tmp_path: Path):
    source = GOLDEN / "mlp_speculator_untied"
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    renamed = {}
    for name, value in tensors.items():
        part, level, rest = name.removeprefix("speculator.").split(".")
        renamed[f"{part}.{level}.{rest}" if part == "head" else f"{part}.{level}.0.{rest}"] = value
    inner = str(config["inner_dim"])
    widths = {"inner_dim": inner, "proj_dim": inner, "emb_dim": inner}
    config |= widths | {"method": "sum_rnn", "input_hidden_dim": config["emb_dim"]}
    theirs = load_head(write(tmp_path, config, renamed)).state_dict()
    for name, value in load_head(source).state_dict().items():
        assert torch.equal(value, theirs[name]), name


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
