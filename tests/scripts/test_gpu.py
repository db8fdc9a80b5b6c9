import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu.py"
REHEARSAL = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny"]


@pytest.fixture
def report(script: ModuleType, tmp_path: Path) -> Any:
    options = argparse.Namespace(out=tmp_path, stage="decode", device="cpu", tiny=True, commit="")
    options.seconds, options.eager = 60.0, False
    return script.Report(options)


def read_stage(folder: Path, stage: str) -> dict[str, Any]:
    return json.loads((folder / f"{stage}.json").read_text(encoding="utf-8"))


def test_failed_part_is_recorded_and_the_next_part_runs(report: Any, tmp_path: Path):
    def broken() -> None:
        raise ValueError("no such kernel\nmore")

    assert report.part("broken", broken) is None
    assert report.part("fine", lambda value: {"value": value}, 3) == {"value": 3}
    report.row("fine", "3", "at most 4")
    record = read_stage(tmp_path, "decode")
    assert record["failed"] == {"broken": "ValueError: no such kernel"}
    assert record["values"] == {"fine": {"value": 3}}
    assert record["summary"] == [["fine", "3", "at most 4", ""]]
    assert record["provenance"]["versions"]["torch"] == torch.__version__


def test_part_that_needs_more_time_than_is_left_is_skipped(report: Any, tmp_path: Path):
    assert report.part("long", lambda: 1 / 0, seconds=61) is None
    record = read_stage(tmp_path, "decode")
    assert list(record["skipped"]) == ["long"]
    assert record["failed"] == {}


def test_missing_cuda_device_is_refused_in_one_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device cpu --tiny" in line
    assert not (tmp_path / "out").exists()


def test_stage_that_runs_over_its_time_is_stopped_with_its_children(
    script: ModuleType, tmp_path: Path
):
    words = ["--out", str(tmp_path), "--device", "cpu", "--tiny", "--model", "-"]
    options = script._parse(words)
    assert not script._stage_process("smollm2", options, 0.1)
    assert "the time of this stage is over" in (tmp_path / "smollm2.log").read_text()


@pytest.mark.slow
def test_rehearsal_measures_every_stage(tmp_path: Path):
    process = subprocess.run(
        [*REHEARSAL, "--out", str(tmp_path), "--minutes", "20"], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    for stage in ("tests", "decode", "train", "smollm2", "engine", "chain_8b"):
        record = read_stage(tmp_path, stage)
        assert record["failed"] == {}
        assert record["summary"]
        assert f"**{stage}**" in process.stdout
    assert read_stage(tmp_path, "tests")["values"]["tests"]["passed"] >= 10
    decoded = {"steps", "batch_2", "alone", "graphs_contiguous_batch_2_context_24"}
    assert decoded <= read_stage(tmp_path, "decode")["values"].keys()
    assert read_stage(tmp_path, "train")["values"]["tiny_eagle3"]["planned_gib"] > 0
    assert read_stage(tmp_path, "smollm2")["values"]["results"]["schema"] == 1
    served = read_stage(tmp_path, "engine")["values"]
    assert served["batch_2_context_40"][0]["goodput"]["steps"] > 0
    assert served["graphs_paged_batch_2_context_16"]["paged"]


@pytest.mark.slow
def test_killed_stage_leaves_its_numbers_and_the_other_stages(tmp_path: Path):
    command = [*REHEARSAL, "--out", str(tmp_path), "--minutes", "20"]
    with subprocess.Popen([*command, "--stages", "train", "engine"], stdout=-1, text=True) as run:
        try:
            while (
                not (tmp_path / "train.json").is_file()
                or not read_stage(tmp_path, "train")["values"]
            ):
                assert run.poll() is None
                time.sleep(0.05)
            for child in psutil.Process(run.pid).children():
                child.kill()
            printed, _ = run.communicate()
        finally:
            run.kill()
    assert run.returncode == 1
    assert "train: failed" in printed
    assert "engine: done" in printed
    assert len(read_stage(tmp_path, "train")["values"]) < 3
    assert read_stage(tmp_path, "engine")["values"]["batch_1_context_16"][0]["alone"]["steps"] > 0


def test_a_function_without_its_cuda_graph_has_failed(report: Any, tmp_path: Path):
    report.warn("verification runs without a CUDA graph: no memory", UserWarning, "compile.py", 1)
    report.warn("torch is slow", UserWarning, "torch.py", 1)
    assert list(read_stage(tmp_path, "decode")["failed"]) == ["verification"]


def test_a_stage_with_an_error_of_cuda_runs_again_without_graphs(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stages = []
    # the stages get a folder of their own
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def fail(stage: str, options: argparse.Namespace, seconds: float) -> bool:
        assert seconds > 0
        stages.append(script.file_stem(stage, options))
        (tmp_path / f"{stages[-1]}.log").write_text("AcceleratorError: CUDA error: illegal access")
        return False

    monkeypatch.setattr(script, "_stage_process", fail)
    words = ["--out", str(tmp_path), "--device", "cpu", "--stages", "decode", "engine"]
    assert script._run_stages(script._parse(words), str(tmp_path)) == ["decode", "engine"]
    assert stages == ["decode", "decode-eager", "engine", "engine-eager"]


def test_a_speed_up_above_its_tokens_per_forward_gets_no_row(report: Any, tmp_path: Path):
    slow = [{"alone": 10.0, "with_drafts": 39.0, "tokens_per_forward": 2.79}] * 3
    report.speedup_row("too fast", slow)
    report.speedup_row("right", [row | {"with_drafts": 20.0} for row in slow])
    record = read_stage(tmp_path, "decode")
    text = "2.00 [2.00, 2.00] at 2.79 tokens per forward"
    assert record["summary"] == [["right", text, "", ""]]
