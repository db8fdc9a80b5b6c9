"""After damage to its disk a run gives the same head bit for bit, or an error message."""

import errno
import io
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from specheads.config.training import DistillSettings, Schedule
from specheads.core.drafter import Head
from specheads.core.files import sole_writer
from specheads.data.packing import BatchStream, PackedText
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.training.distill.run import TextJob, write_texts
from specheads.training.distill.shards import read_text
from specheads.training.schedule import ScheduledPhase
from tests import tiny
from tests.training.distill.fake_engine import FakeChats, FakeEngine
from tests.training.test_trainer import Counting, phase, power_cut, run_training

pytestmark = pytest.mark.slow

SCHEDULE = Schedule(phases={"corpus": phase(), "distilled": phase(steps=5, scored_share=0.6)})


@pytest.mark.parametrize("step", [5, 10], ids=["phase one", "phase two"])
def test_checkpoint_survives_any_changed_byte(step, tmp_path, capsys):
    """Change fifty bytes per phase, in the newest or the previous checkpoint."""
    chance = random.Random(step)
    expected = run_training(tmp_path / "whole", SCHEDULE).state_dict()
    with power_cut(step):
        run_training(tmp_path / "killed", SCHEDULE, checkpoint_every=2)
    files = sorted((tmp_path / "killed" / "checkpoints").rglob("*.*"))
    assert len({file.parent for file in files}) == 2
    ends = {"same": 0, "told": 0}
    for number in range(50):
        run = shutil.copytree(tmp_path / "killed", tmp_path / f"run-{number}")
        file = run / chance.choice(files).relative_to(tmp_path / "killed")
        content = bytearray(file.read_bytes())
        offset = chance.randrange(len(content))
        content[offset] = (content[offset] + chance.randrange(1, 256)) % 256
        file.write_bytes(content)
        head = run_training(run, SCHEDULE, checkpoint_every=2).state_dict()
        message = " ".join(capsys.readouterr().err.split())
        ends["same"] += all(torch.equal(value, head[name]) for name, value in expected.items())
        ends["told"] += f"{file.parent.name} (" in message
        shutil.rmtree(run)
    assert ends["same"] == 50
    # the one before the newest is not looked at
    assert 10 < ends["told"] < 45


class Disk:
    """Allows a number of writes, and truncates the next one."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.writes, self.room = str(folder), 0, -1
        for module, name in ((os, "mkdir"), (os, "rename"), (os, "replace")):
            patch.setattr(module, name, self.guarded(getattr(module, name)))
        patch.setattr(io, "open", self.guarded_open(io.open))
        patch.setattr(checkpoint, "save_file", self.guarded_save(checkpoint.save_file))

    def is_full(self, path: Any) -> bool:
        if not str(path).startswith(self.folder):
            return False
        self.writes += 1
        return 0 <= self.room < self.writes

    def guarded(self, act: Any) -> Any:
        def guard(path: Any, *arguments: Any, **options: Any) -> Any:
            if self.is_full(path):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return act(path, *arguments, **options)

        return guard

    def guarded_open(self, opened: Any) -> Any:
        def guard(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if mode[0] in "wa" and self.is_full(path):
                with opened(path, mode, *arguments, **options) as stream:
                    stream.write(b'{"st' if "b" in mode else '{"st')
                raise OSError(errno.ENOSPC, "No space left on device")
            return opened(path, mode, *arguments, **options)

        return guard

    def guarded_save(self, save_file: Any) -> Any:
        def guard(tensors: Any, path: Path) -> None:
            if self.is_full(path):
                raise SafetensorError("I/O error: No space left on device (os error 28)")
            save_file(tensors, path)

        return guard


def session(folder: Path) -> Head:
    """Perform the file operations of a command in a run directory."""
    run, base = RunDirectory(folder), tiny.base("llama", dtype=torch.float32)
    prompts = Counting(base.vocab_size)
    settings = DistillSettings(num_samples=8, new_tokens=8, shard_size=2)
    job = TextJob(base=base, prompts=FakeChats(), settings=settings, folder=run.text, identity={})

    def open_text(phase: ScheduledPhase, *arguments: Any) -> BatchStream:
        del arguments
        if phase.settings.steps == 6:
            return prompts
        for _ in write_texts(job, lambda _: FakeEngine().answers):
            pass
        return PackedText(read_text(run.text, 8), sequence_length=0, batch_size=2, packing="none")

    with sole_writer(folder):
        run.begin("a: 1\n", {})
        head = run_training(folder, SCHEDULE, checkpoint_every=2, open_text=open_text)
        run.end(head)
    return head


def test_full_disk_is_reported_and_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path, monkeypatch)
    expected = session(tmp_path / "whole").state_dict()
    moments = random.Random(0).sample(range(disk.writes), 20)
    for moment in moments:
        run = tmp_path / f"run-{moment}"
        disk.writes, disk.room = 0, moment
        with pytest.raises(OSError, match="No space left") as full:
            session(run)
        assert full.value.errno == errno.ENOSPC
        assert str(full.value.filename).startswith(str(run))
        disk.room = -1
        head = session(run).state_dict()
        assert all(torch.equal(value, head[name]) for name, value in expected.items()), moment
        assert RunDirectory(run).finished
        assert not list(run.rglob(".*"))
