from pathlib import Path

import pytest

from specheads.core.errors import InputError
from specheads.runs.trackers import Tracker, read_metrics


def tracker(folder: Path, *, kind: str = "jsonl") -> Tracker:
    return Tracker(folder / "metrics.jsonl", kind=kind, project="specheads-tests", name="run")


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path: Path):
    first = tracker(tmp_path)
    for step in (2, 4, 6):
        first.log({"step": step, "loss": 1.0})
    second = tracker(tmp_path)
    second.resume(4)
    second.log({"step": 6, "loss": 2.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(2, 1.0), (4, 1.0), (6, 2.0)]


def test_a_row_cut_short_by_a_crash_is_left_out(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 4, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2}]


@pytest.mark.parametrize(
    "content", [b'{"step": 2}', b'{"step": 2}\n{"step": 4, "lo', b'{"step": 2}\n']
)
def test_half_a_row_goes_and_a_whole_one_stays_when_training_goes_on(
    content: bytes, tmp_path: Path
):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    found = tracker(tmp_path)
    found.resume(2)
    found.log({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "line",
    [b"\x00\xff\xfe", b"not JSON", b"[]", b'{"loss": 1.0}', b'{"step": "2"}', b"", b"[" * 100_000],
    ids=["bytes", "words", "list", "no step", "text step", "empty", "deep"],
)
def test_a_line_that_is_no_row_is_refused_by_its_number_and_left_as_it_is(
    line: bytes, tmp_path: Path
):
    path, content = tmp_path / "metrics.jsonl", b'{"step": 1}\n' + line + b'\n{"step": 4}\n'
    path.write_bytes(content)
    with pytest.raises(InputError, match="and line 2 is none; take it out"):
        tracker(tmp_path).resume(4)
    assert path.read_bytes() == content


def test_rows_are_not_read_through_a_link_that_leads_out(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_text('{"step": 1}\n')
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="lie in its own folder"):
        read_metrics(tmp_path / "run" / "metrics.jsonl")


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
