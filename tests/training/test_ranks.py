"""Losses do not depend on the number of processes and parts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from accelerate.state import AcceleratorState

from specheads.config import compose
from specheads.config.training import JointSettings
from specheads.heads.load import kinds
from tests.slow import SOME_KINDS, slow_except
from tests.training.in_processes import StopError, at_step, forked, train, untimed_rows


def assert_same_rows(
    folder: Path, expected_folder: Path, steps: int, tolerance: float = 1e-6
) -> None:
    """Compare the logs of two runs of this many steps."""
    rows = untimed_rows(folder)
    assert len(rows) == steps
    for row, expected in zip(rows, untimed_rows(expected_folder), strict=True):
        assert row.pop("phase") == expected.pop("phase")
        assert row == pytest.approx(expected, rel=0, abs=tolerance), folder


def each(of: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
    for kind in of:
        train(folder / kind, kind, **settings)


def same_losses(
    folder: Path,
    *runs: tuple[int, int] | tuple[int, int, str],
    of: Sequence[str] = tuple(kinds()),
    **settings: Any,
) -> None:
    """Compare runs with the first one, for several kinds.

    A run is a number of processes and of accumulation steps, and how the base is shared out.
    """
    folders = [folder / "-".join(map(str, run)) for run in runs]
    for (count, accumulation_steps, *sharding), run_folder in zip(runs, folders, strict=True):
        run_settings = settings | {
            "accumulation_steps": accumulation_steps,
            "shared_out": "".join(sharding),
        }
        assert forked(count, each, of, run_folder, run_settings) == [0] * count
    first, *other_folders = folders
    for kind in of:
        for other_folder in other_folders:
            assert_same_rows(other_folder / kind, first / kind, settings["steps"])


@pytest.mark.parametrize("of", slow_except([[*SOME_KINDS]], [[*SOME_KINDS], kinds()]), ids=len)
def test_two_processes_have_the_losses_of_one(of: list[str], tmp_path: Path):
    same_losses(tmp_path, (1, 1), (2, 2), of=of, steps=3)


@pytest.mark.slow
def test_chat_8b_has_the_same_losses_in_one_four_and_eight_processes(tmp_path: Path):
    words = ["recipe=chat_8b", "data.path=conversations.jsonl"]
    settings = compose.settings_of("train", words)
    phase = settings.schedule.phases["distilled"]
    names = ("decay", "learning_rate", "final_share", "loss", "scored_share")
    same_losses(
        tmp_path,
        *((1, 1), (4, 2), (8, 1)),
        of=[settings.head["kind"]],
        steps=3,
        # the tiny text has rows for half of the recipe's batch
        batch_size=phase.batch_size // 2,
        depth=settings.head["depth"],
        drafted=24,
        schedule={"muon_learning_rate": settings.schedule.muon_learning_rate},
        **{name: getattr(phase, name) for name in names},
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["text", "base"])
def test_adapter_dropout_does_not_depend_on_processes(target: str, tmp_path: Path):
    joint = JointSettings(rank=2, dropout=0.3, target=target, learning_rate=1e-2)
    runs = (1, 1), (2, 1), (4, 1), (2, 3)
    same_losses(tmp_path, *runs, of=["medusa", "eagle3"], steps=50, joint=joint)


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [0, 1, 5])
def test_best_head_does_not_depend_on_processes(held_out: int, tmp_path: Path):
    """Three prompts: the last of four processes gets no prompt."""
    of, watched = ["mlp_speculator", "eagle3"], {"every": 1}
    settings = {"steps": 12, "held_out": held_out, "watched": watched}
    for count in (1, 2, 4):
        assert forked(count, each, of, tmp_path / str(count), settings) == [0] * count
    for kind in of:
        alone = tmp_path / "1" / kind
        assert max(row["validation/tokens_per_forward"] for row in untimed_rows(alone)) > 1.0
        for count in ("2", "4"):
            folder = tmp_path / count / kind
            assert_same_rows(folder, alone, 12)
            assert (folder / "best/best.json").read_text() == (alone / "best/best.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "cross_entropy"},
        {"loss": "lk", "drafted": 40, "schedule": {"muon_learning_rate": 0.02}},
    ],
    ids=["cross entropy", "lk, some tokens, muon"],
)
def test_fifty_steps_have_the_same_loss_with_any_processes_and_parts(settings, tmp_path):
    """Six rows per step: four processes have unequal shares."""
    same_losses(tmp_path, (1, 1), (2, 1), (4, 1), (1, 3), (2, 2), steps=50, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_resume_with_other_processes_has_the_same_losses(before: int, after: int, tmp_path: Path):
    reference_folder, resumed_folder = tmp_path / "whole", tmp_path / "parts"
    settings = {"steps": 50, "choices": {"checkpoint_every": 25}}
    assert forked(1, each, kinds(), reference_folder, settings) == [0]
    for kind in kinds():
        assert forked(before, stopped_at, 25, resumed_folder / kind, kind, settings) == [1] * before
    assert {path.name for path in resumed_folder.glob("*/checkpoints/*")} == {"step-25"}
    assert forked(after, each, kinds(), resumed_folder, settings) == [0] * after
    for kind in kinds():
        assert_same_rows(resumed_folder / kind, reference_folder / kind, 50)


def stop() -> None:
    raise StopError


def stopped_at(step: int, folder: Path, kind: str, settings: dict[str, Any]) -> None:
    at_step(step, stop)
    train(folder, kind, **settings)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    # the compiler does not support the type checks of tests
    jaxtyping.config.update("jaxtyping_disable", True)
    # caches of earlier tests in this process
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


@pytest.mark.slow
# of torch, about its own compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_head_has_the_same_losses(tmp_path, monkeypatch):
    settings = {"steps": 2, "shared_out": "none"}
    assert forked(1, each, ["mlp_speculator"], tmp_path / "plain", settings) == [0]
    # the graphs of the compiler, run as they are
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    assert forked(1, each, ["mlp_speculator"], tmp_path / "compiled", settings) == [0]
    plain, compiled = (tmp_path / name / "mlp_speculator" for name in ("plain", "compiled"))
    assert_same_rows(compiled, plain, 2, tolerance=1e-9)
