"""Commands with the base on a device: train, distil, evaluate, compare, tune, export, load."""

import json

import pyarrow.parquet as pq
import pytest
import torch

import specheads
from specheads.config import data_dir
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.export.layouts import find_layout
from specheads.export.write import export_head
from specheads.heads.load import build_for_base
from specheads.measure.offline import guess_ranks, replay
from specheads.measure.results import Results, read_results
from specheads.runs.trackers import read_metrics
from tests import tiny
from tests.gpu import trained

pytestmark = pytest.mark.gpu

SHIPPED = data_dir("recipes") / "tiny_code" / "base"
SMALL = [
    "evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1",
    "evaluation.repeats=1", "tree=chain",
]  # fmt: skip
EXPORTS = [
    ("mlp_speculator", "vllm"), ("eagle3", "vllm"), ("medusa", "vllm"), ("eagle3", "sglang"),
    ("mtp", "vllm"), ("dflash", "speculators"),
]  # fmt: skip
AFTER = 24


@pytest.fixture(scope="module")
def base(device: torch.device) -> specheads.FrozenBase:
    return specheads.FrozenBase.load(SHIPPED, dtype="float32", device=str(device))


@pytest.fixture(scope="module")
def head(base: specheads.FrozenBase, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the override that names an untrained head."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("head")
    head = build_for_base({"kind": "mlp_speculator", "depth": 3, "inner_dim": 32}, base)
    head.save_pretrained(folder)
    return f"head={folder}"


def assert_lossless(results: Results) -> None:
    assert results.lossless is not None
    assert results.lossless.compared == 2
    assert results.lossless.wrong == 0


def test_the_smoke_recipe_trains_distils_evaluates_and_loads(device, tmp_path):
    folder = tmp_path / "run"
    # the base loads itself onto the device, as it does for a command
    overrides = [f"base.device={device}", "base.dtype=float32", "tracker=jsonl", *SMALL]
    run = specheads.train("smoke", [*overrides, f"run_dir={folder}"])
    rows = read_metrics(run.metrics)
    assert [row["phase"] for row in rows] == ["corpus"] * 3 + ["distilled"] * 2
    lines = [row for file in run.text.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(lines) > 0
    results = read_results(Results, run.report / "results.json")
    assert results is not None
    assert_lossless(results)
    assert results.offline is not None
    assert results.online is not None
    assert results.offline.per_depth == results.online.per_depth
    assert results.speed is not None
    assert results.speed.base_tokens_per_second > 0
    base = specheads.FrozenBase.load(SHIPPED, dtype="float32", device=str(device))
    head = specheads.load_head(run.head, base)
    assert {value.device for value in head.state_dict().values()} == {device}
    prompts = [[11, 300, 42, 7], [5, 6]]
    out = generate(base, head, prompts, max_new_tokens=12)
    assert out.tokens == generate(base, None, prompts, max_new_tokens=12).tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_head_distils_the_text_of_the_base_alone(temperature, base, head, tmp_path):
    arguments = [
        "recipe=smoke", "num_samples=6", "new_tokens=8", "batch_size=3", "data.max_documents=20",
        f"temperature={temperature}", "base.dtype=float32",
    ]  # fmt: skip
    tables = []
    for name, drafter in (("alone", []), ("drafted", [head])):
        report = specheads.distill(overrides=[*arguments, *drafter], base=base, out=tmp_path / name)
        assert report is not None
        assert report["requested"] == 6
        tables.append([pq.read_table(file) for file in sorted((tmp_path / name).glob("*.parquet"))])
    assert len(tables[0]) > 0
    assert tables[0] == tables[1]


@pytest.mark.parametrize(("kind", "engine"), EXPORTS)
def test_an_export_passes_the_gate(kind, engine, device, tmp_path):
    # seven layers are the fewest at which all engines read the same three
    base = tiny.base("llama", dtype=torch.float32, device=device, num_hidden_layers=7)
    torch.manual_seed(1)
    settings = trained.SETTINGS.get(kind, {})
    head = build_for_base({"kind": kind, "depth": 3, **settings}, base).eval()
    find_layout(head, base, engine)
    prompts = tiny.prompts()
    texts = list(
        zip(prompts, generate(base, None, prompts, max_new_tokens=AFTER).tokens, strict=True)
    )
    _, parity = export_head(head, base, engine, tmp_path / "out", texts)
    walked = [replay(guess_ranks(base, head, *text, width=1), policies.chain(3)) for text in texts]
    assert sum(counts.new_tokens for counts in walked) > 0
    assert parity.largest_difference < 1e-5
    assert json.loads((tmp_path / "out" / "config.json").read_text())
    assert {value.device for value in head.state_dict().values()} == {device}
