"""metrics.jsonl stays valid, also if a tracker fails."""

import shutil
from pathlib import Path
from typing import Any

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


class Failing(GeneralTracker):
    """A tracker that fails at one moment."""

    name, requires_logging_directory, tracker = "failing", False, None

    def __init__(self, project: str, **chosen: Any) -> None:
        del project, chosen

    def start(self) -> None:
        self._reach("start")

    def log(self, values: dict, step: int | None = None, **keywords: Any) -> None:
        del values, keywords
        self._reach(f"row {step}")

    def finish(self) -> None:
        self._reach("finish")

    def _reach(self, moment: str) -> None:
        reached.append(moment)
        if moment == failing[0]:
            raise ConnectionError("the network\nis gone")


class Recording(GeneralTracker):
    """A tracker that keeps what it was started with."""

    name, requires_logging_directory, tracker = "recording", False, None

    def __init__(self, project: str, **chosen: Any) -> None:
        self.project, self.chosen = project, chosen
        started.append(chosen)

    def start(self) -> None:
        pass

    def log(self, values: dict, step: int | None = None, **keywords: Any) -> None:
        pass

    def finish(self) -> None:
        pass


started: list[dict[str, Any]] = []


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_tracker_s_run_belongs_to_the_folder_of_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Started, resumed, started again in an emptied folder, in a copy, and beside a namesake."""
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, kind, Recording)
    started.clear()

    def begin(folder: Path) -> Any:
        run = RunDirectory(folder)
        run.begin("a: 1\n", {})
        settings = TrackerSettings(kind=kind, project="p")
        Tracker(folder / "metrics.jsonl", settings, "mine", run.run_id, pytest.fail).resume(0)
        return started[-1].get("id", started[-1]["name"])

    first = begin(tmp_path / "a")
    assert begin(tmp_path / "a") == first
    (tmp_path / "a").rename(tmp_path / "moved")
    assert begin(tmp_path / "moved") == first
    again, beside = begin(tmp_path / "a"), begin(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    assert len({first, again, beside, begin(tmp_path / "b")}) == 4
    assert all(options["resume"] == "allow" for options in started)


reached: list[str] = []
failing = [""]
WHOLE = ["start", "row 1", "row 2", "row 3", "row 4", "row 5", "finish"]


@pytest.mark.parametrize("moment", ["", "start", "row 3", "finish"])
def test_failed_tracker_is_logged_once_and_rows_continue(moment, tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "trackio", Failing)
    failing[0], messages = moment, []
    reached.clear()
    run_tracker = tracker(tmp_path, kind="trackio", messages=messages)
    run_tracker.resume(0)
    for row in ROWS:
        run_tracker.log(row)
    run_tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS
    assert reached == (WHOLE[: WHOLE.index(moment) + 1] if moment else WHOLE)
    reason = "trackio failed (ConnectionError: the network is gone)"
    lost = f"{reason}; rows go to {run_tracker.metrics} only"
    assert messages == ([lost] if moment else [])


def test_missing_tracker_package_is_refused_with_its_pip_command(monkeypatch: pytest.MonkeyPatch):
    for kind in ("jsonl", "wandb"):
        refuse_missing(kind)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    refuse_missing("wandb")
    with pytest.raises(InputError, match=r"a package; pip install trackio, or set"):
        refuse_missing("trackio")
