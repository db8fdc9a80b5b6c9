"""A run that is killed many times ends with the same head and rows as one that is not."""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specheads.commands import train  # noqa: F401 - imported once, before the children fork
from specheads.commands._call import call
from specheads.core.files import LOCK
from specheads.runs.checkpoint import CHECKSUMS_FILE
from specheads.runs.directory import RunDirectory
from tests import tiny
from tests.training.in_processes import FORK, started, untimed_rows

pytestmark = pytest.mark.slow

STEPS, SHARDS, KILLS = 6, 8, 20
RECIPE = [
    "recipe=smoke", "data=files", "data.max_documents=0", "base.device=cpu", "base.dtype=float32",
    "evaluate_after=false",
    "head.depth=2", "head.inner_dim=32", "head.draft_tokens=200", "log_every=1",
    "schedule.muon_learning_rate=0.01", "checkpoint_every=1", "validation.every=4",
    f"schedule.phases.corpus.steps={STEPS}", f"schedule.phases.distilled.steps={STEPS}",
    "schedule.phases.corpus.sequence_length=32", "schedule.phases.corpus.scored_share=0.5",
    f"schedule.phases.distilled.distill.num_samples={3 * SHARDS}",
    "schedule.phases.distilled.distill.shard_size=3",
    "schedule.phases.distilled.distill.batch_size=4",
    "schedule.phases.distilled.distill.prompt_tokens=8",
    "schedule.phases.distilled.distill.new_tokens=10",
    "schedule.phases.distilled.distill.temperature=1.0",
]  # fmt: skip
EVENTS = {"/": 60, "/checkpoints/.step-": 12, "/text/": 32, "/metrics.jsonl": 6}
"""Parts of paths that a run touches, and the number of moments to choose a kill from."""

MOMENTS = "corpus", "checkpoint", "writing", "distilled"
"""Each must be the state of the run in at least one kill."""


@dataclass(frozen=True)
class Moment:
    """A moment to signal the killer: the n-th time that a process touches such a path."""

    rank: int
    fragment: str
    number: int


def act(
    words: list[str], run: Path, moment: Moment | None, killer: int, command: str = "train"
) -> None:
    """Run the command in a forked child, and signal the killer at the moment."""
    sys.stdout = sys.stderr = open(f"{run}.log", "a", buffering=1)  # noqa: PTH123, SIM115
    remaining = moment.number if moment and int(os.environ.get("RANK", "0")) == moment.rank else 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if remaining and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            path = str(arguments[0])
            if moment and path.startswith(str(run)) and moment.fragment in path:
                remaining -= 1
                if not remaining:
                    os.write(killer, b"!")

    sys.addaudithook(hear)
    call(command, [*words, f"{'run_dir' if command == 'train' else 'out'}={run}"])


class Killer:
    """Starts the same command until it ends, and kills it at random moments with a seed."""

    def __init__(self, words: list[str], count: int) -> None:
        self.words, self.count, self.chance = words, count, random.Random(count)
        self.landed: Counter[str] = Counter()
        """Kills by state of the run."""

    @property
    def goes_on(self) -> bool:
        """Whether more kills are needed, in number or at a required state."""
        missed = any(not self.landed[state] for state in MOMENTS)
        return self.landed.total() < (4 * KILLS if missed else KILLS)

    def whole(self, run: Path) -> Path:
        """Run without kills."""
        assert self.start(run, None) == [0] * self.count, Path(f"{run}.log").read_text()
        return run

    def start(self, run: Path, moment: Moment | None) -> list[int | None]:
        """Run until shortly after the moment, if it comes; return the exit code of each rank."""
        reader, writer = os.pipe()
        ranks = started(self.count, act, self.words, run, moment, writer, by=FORK)
        os.close(writer)
        if os.read(reader, 1):
            time.sleep(self.chance.choice([0, self.chance.uniform(0, 0.02)]))
            for process in self.chance.choice([[process] for process in ranks] + [ranks]):
                process.kill()
        for process in ranks:
            process.join()
        os.close(reader)
        return [process.exitcode for process in ranks]

    def disturb(self, run: Path) -> None:
        """Start the run once, and kill it if the moment comes before its end."""
        fragment = self.chance.choice([*EVENTS])
        rank = (
            0 if fragment in ("/checkpoints/.step-", "/metrics.jsonl") else self.chance.randrange(2)
        )
        moment = Moment(rank % self.count, fragment, self.chance.randint(1, EVENTS[fragment]))
        codes = self.start(run, moment)
        log = f"{moment} {codes} {Path(f'{run}.log').read_text()}"
        if -signal.SIGKILL not in codes:
            assert codes == [0] * self.count, log
            return
        # one that was not killed missed the others, or was done
        assert {*codes} <= {-signal.SIGKILL, 0, 2}, log
        self.landed[at(RunDirectory(run))] += 1


def at(run: RunDirectory) -> str:
    """Return the state of a run when it was killed."""
    if list(run.checkpoints.glob(".step-*")):
        return "checkpoint"
    steps = [int(step.name.removeprefix("step-")) for step in run.checkpoints.glob("step-*")]
    step, shards = max(steps, default=0), len(list(run.text.glob("shard-*.parquet")))
    if step < STEPS:
        return "corpus" if run.metrics.is_file() else "start"
    return "writing" if shards < SHARDS else "distilled" if step < 2 * STEPS else "end"


def files(run: Path) -> dict[str, Any]:
    """Return the files of a run, without names and times."""
    timed = ("config.yaml", "provenance.json", "metrics.jsonl", "report.md", CHECKSUMS_FILE)
    contents: dict[str, Any] = {
        str(file.relative_to(run)): file.read_bytes()
        for file in run.rglob("*")
        if file.is_file() and file.name not in timed and "README.md" not in file.name
    }
    for name in contents:
        if name.endswith("state.json"):
            contents[name] = json.loads(contents[name]) | {"seconds": 0.0}
        elif "/sealed-" in name:
            # a shard that was sealed, and not yet in its place, is sealed again in the same words
            contents[name] = {*contents[name].splitlines()}
    return contents


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tiny.saved(tmp_path_factory.mktemp("base"))
    corpus = tmp_path_factory.mktemp("corpus")
    for number in range(200):
        text = "".join(f"def f_{number}_{line}(a):\n    return a + {line}\n" for line in range(6))
        (corpus / f"{number}.py").write_text(text)
    return [*RECIPE, f"base.model={base}", f"data.path={corpus}"]


@pytest.mark.parametrize("count", [1, 2])
def test_twenty_kills_do_not_change_the_result(count: int, words: list[str], tmp_path: Path):
    killer, number = Killer(words, count), 0
    reference = killer.whole(tmp_path / "whole")
    assert len(untimed_rows(reference)) == 2 * STEPS
    while killer.goes_on:
        run = tmp_path / f"run-{number}"
        # several runs: one alone is soon past its first phase
        for _ in range(KILLS // 4):
            if killer.goes_on and not RunDirectory(run).finished:
                killer.disturb(run)
        if not RunDirectory(run).finished:
            killer.whole(run)
        assert untimed_rows(run) == untimed_rows(reference)
        contents, expected = files(run), files(reference)
        assert {name: contents.get(name) for name in expected} == expected
        # one that was killed as it put away an older checkpoint, as it wrote text or after its end
        # leaves these
        remaining = {
            name for name in {*contents} - {*expected} if not name.startswith("text/.lock-")
        }
        assert all(name.startswith("checkpoints/step-") for name in remaining - {LOCK}), remaining
        number += 1
    assert all(killer.landed[state] for state in MOMENTS), killer.landed
