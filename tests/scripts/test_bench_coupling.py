"""The bench of drafts that see the noise: its own numbers are those of decoding."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from specheads.base.model import FrozenBase
from specheads.heads.load import build_for

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_heads_in_folders_are_measured_once_and_their_rows_kept(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = FrozenBase.load(ROOT / "recipes/tiny_code/base", dtype="float32", device="cpu")
    kinds = "medusa", "mlp_speculator"
    # as runs leave them: all of one name
    heads = [str(tmp_path / kind / "head") for kind in kinds]
    for kind, folder in zip(kinds, heads, strict=True):
        build_for({"kind": kind, "depth": 3, "draft_tokens": 64}, base).save_pretrained(folder)
    out = tmp_path / "coupling.json"
    small = ["--prompts", "3", "--new-tokens", "12", "--max-batch", "2", "--nodes", "5"]

    def bench(*more: str) -> list[dict]:
        assert script.main(["--heads", *heads, *small, "--out", str(out), *more]) == 0
        return json.loads(out.read_text())["rows"]

    first = bench("--temperature", "1.0")
    assert [row["kind"] for row in first] == ["medusa", "mlp_speculator"]
    for row in first:
        for name in ("chain", "tuned"):
            ways = row[name]["coupled"], row[name]["uncoupled"]
            assert [way["identical"] for way in ways] == [3, 3]
            ratio = ways[0]["tokens_per_forward"] / ways[1]["tokens_per_forward"]
            assert row[name]["gain"]["ratio"] == pytest.approx(ratio)
        assert row["chain"]["coupled"]["num_nodes"] == row["rejection"]["num_nodes"] == 4
        assert row["tuned"]["coupled"]["num_nodes"] <= 5
    capsys.readouterr()
    both = bench("--temperature", "1.0", "0.6")
    assert both[:2] == first
    assert [row["temperature"] for row in both] == [1.0, 1.0, 0.6, 0.6]
    # what was measured of other prompts says nothing here
    assert len(bench("--temperature", "0.6", "--prompts", "2")) == 2
