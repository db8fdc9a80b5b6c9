from pathlib import Path

import pytest

from specheads.runs.trackers import Tracker, read_metrics


def tracker(folder: Path, *, kind: str = "jsonl", resumed_step: int = 0) -> Tracker:
    return Tracker(
        folder / "metrics.jsonl",
        kind=kind,
        project="specheads-tests",
        name="run",
        resumed_step=resumed_step,
    )


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path: Path):
    first = tracker(tmp_path)
    for step in (2, 4, 6):
        first.log({"step": step, "loss": 1.0})
    second = tracker(tmp_path, resumed_step=4)
    second.log({"step": 6, "loss": 2.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(2, 1.0), (4, 1.0), (6, 2.0)]


def test_a_row_cut_short_by_a_crash_is_left_out(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 4, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2}]


def test_wandb_is_offline_where_no_key_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = tracker(tmp_path, kind="wandb")
    found.log({"step": 1, "loss": 1.0})
    assert found.run is not None
    assert found.run.offline
    found.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_an_unknown_tracker_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match="got 'mlflow'"):
        tracker(tmp_path, kind="mlflow")
    assert not (tmp_path / "metrics.jsonl").exists()
