"""metrics.jsonl stays valid, also if a tracker fails."""

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import PartialState, tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType

from specheads.config.shared import TrackerSettings
from specheads.core.errors import InputError
from specheads.runs import trackers
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker, read_metrics, refuse_missing


@pytest.fixture(autouse=True)
def _process() -> None:
    # accelerate's trackers need the state of the process
    PartialState(cpu=True)


def tracker(folder: Path, *, kind: str = "jsonl", messages: list[str] | None = None) -> Tracker:
    tell = pytest.fail if messages is None else messages.append
    settings = TrackerSettings(kind=kind, project="specheads-tests")
    return Tracker(folder / "metrics.jsonl", settings, "run", announce=tell)


def write(rows: list[dict[str, Any]], folder: Path, *, kind: str, after: int) -> None:
    """Track the rows of a run that resumes after a step."""
    run_tracker = tracker(folder, kind=kind)
    run_tracker.resume(after)
    for row in rows:
        run_tracker.log(row)
    run_tracker.close()


@pytest.mark.parametrize("end", ["", '{"step": 4, "lo', '{"step": 4}\n{"step": 6}\n'])
def test_resume_drops_later_and_incomplete_rows(end: str, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2}\n' + end)
    assert read_metrics(path)[0] == {"step": 2}
    run_tracker = tracker(tmp_path)
    run_tracker.resume(2)
    run_tracker.log({"step": 3})
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "line",
    [b"\x00\xff\xfe", b"not JSON", b"[]", b'{"loss": 1.0}', b'{"step": "2"}', b"", b"[" * 100_000],
    ids=["bytes", "words", "list", "no step", "text step", "empty", "deep"],
)
def test_invalid_line_is_refused_by_number(line: bytes, tmp_path: Path):
    path, content = tmp_path / "metrics.jsonl", b'{"step": 1}\n' + line + b'\n{"step": 4}\n'
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"line 2 of .* must be an object with a step"):
        tracker(tmp_path).resume(4)
    assert path.read_bytes() == content


def test_linked_metrics_are_refused(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_text('{"step": 1}\n')
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="be in its own folder"):
        read_metrics(tmp_path / "run" / "metrics.jsonl")


ROWS = [{"step": step, "phase": "corpus", "loss": 1 / step} for step in range(1, 6)]


def test_wandb_is_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_tracker = tracker(tmp_path, kind="wandb")
    run_tracker.resume(0)
    run_tracker.log(ROWS[0])
    wandb_tracker: Any = run_tracker.tracker
    assert wandb_tracker.tracker.offline
    run_tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS[:1]


def test_tensorboard_shows_each_step_once_after_a_stop(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(ROWS, tmp_path, kind="tensorboard", after=0)
    write(ROWS[3:4], tmp_path, kind="tensorboard", after=3)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["step", "loss"]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [1, 1 / 2, 1 / 3, 1 / 4]
    )


def test_trackio_keeps_the_rows_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    write(ROWS, tmp_path, kind="trackio", after=0)
    assert list((tmp_path / "trackio").iterdir())


class FakeTracker(GeneralTracker):
    """A tracker that records its options and its calls, and may fail at one of them."""

    name, requires_logging_directory, tracker = "fake", False, None
    options: ClassVar[list[dict[str, Any]]] = []
    calls: ClassVar[list[str]] = []
    failing_call = ""

    def __init__(self, project: str, **options: Any) -> None:
        del project
        self.options.append(options)

    def start(self) -> None:
        self._record("start")

    def log(self, values: dict, step: int | None = None, **keywords: Any) -> None:
        del values, keywords
        self._record(f"row {step}")

    def finish(self) -> None:
        self._record("finish")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.failing_call:
            raise ConnectionError("the network\nis gone")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracker]:
    """Replace the trackers of accelerate."""
    for kind in ("wandb", "trackio"):
        monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, kind, FakeTracker)
    for name, value in (("options", []), ("calls", []), ("failing_call", "")):
        monkeypatch.setattr(FakeTracker, name, value)
    return FakeTracker


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_tracker_s_run_belongs_to_the_folder_of_the_run(
    kind: str, tmp_path: Path, fake: type[FakeTracker]
):
    """Started, resumed, started again in an emptied folder, in a copy, and beside a namesake."""

    def begin(folder: Path) -> Any:
        run = RunDirectory(folder)
        run.begin("a: 1\n", {})
        settings = TrackerSettings(kind=kind, project="p")
        Tracker(folder / "metrics.jsonl", settings, "mine", run.run_id, pytest.fail).resume(0)
        return fake.options[-1].get("id", fake.options[-1]["name"])

    first = begin(tmp_path / "a")
    assert begin(tmp_path / "a") == first
    (tmp_path / "a").rename(tmp_path / "moved")
    assert begin(tmp_path / "moved") == first
    again, beside = begin(tmp_path / "a"), begin(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    assert len({first, again, beside, begin(tmp_path / "b")}) == 4
    assert all(options["resume"] == "allow" for options in fake.options)


WHOLE = ["start", "row 1", "row 2", "row 3", "row 4", "row 5", "finish"]


@pytest.mark.parametrize("call", ["", "start", "row 3", "finish"])
def test_failed_tracker_is_logged_once_and_rows_continue(call, tmp_path, fake):
    fake.failing_call, messages = call, []
    run_tracker = tracker(tmp_path, kind="trackio", messages=messages)
    run_tracker.resume(0)
    for row in ROWS:
        run_tracker.log(row)
    run_tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS
    assert fake.calls == (WHOLE[: WHOLE.index(call) + 1] if call else WHOLE)
    reason = "trackio failed (ConnectionError: the network is gone)"
    lost = f"{reason}; rows go to {run_tracker.metrics} only"
    assert messages == ([lost] if call else [])


def test_missing_tracker_package_is_refused_with_its_pip_command(monkeypatch: pytest.MonkeyPatch):
    for kind in ("jsonl", "wandb"):
        refuse_missing(kind)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    refuse_missing("wandb")
    with pytest.raises(InputError, match=r"a package; pip install trackio, or set"):
        refuse_missing("trackio")
