"""Writes are atomic even if the writer is killed, and a folder has one writer at a time."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specheads.core.errors import InputError
from specheads.core.files import LOCK, atomic_folder, remove_incomplete, sole_writer

HOLD = """
import sys
from pathlib import Path
from specheads.core.files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock of `tmp_path`/run."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def take(folder: Path) -> None:
    with sole_writer(folder):
        (folder / "mine").touch()


def test_a_second_process_is_refused_and_the_first_one_is_named(
    holder: subprocess.Popen[bytes], tmp_path: Path
):
    about = json.dumps({"pid": holder.pid, "host": socket.gethostname()})
    with pytest.raises(InputError, match="one process at a time may write") as refused:
        take(tmp_path / "run")
    assert about in str(refused.value)
    assert [file.name for file in (tmp_path / "run").iterdir()] == [LOCK]


def test_the_lock_of_a_killed_process_blocks_nobody(
    holder: subprocess.Popen[bytes], tmp_path: Path
):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    take(tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_waiting_writer_learns_the_owner_and_gets_the_lock_next(
    holder: subprocess.Popen[bytes], tmp_path: Path
):
    messages = []

    def wait(about: str) -> None:
        messages.append(json.loads(about)["pid"])
        # the owner's folder is still empty, so it is removed with the lock
        holder.communicate()

    with sole_writer(tmp_path / "run", wait=wait):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert messages == [holder.pid]


def test_created_folders_that_stay_empty_are_removed(tmp_path: Path):
    with pytest.raises(InputError, match="no"), sole_writer(tmp_path / "runs" / "mine"):
        raise InputError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_a_link_is_refused_and_its_target_is_unchanged(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "thesis")
    with pytest.raises(InputError, match="must be writable"):
        take(tmp_path / "run")
    assert (tmp_path / "thesis").read_text() == "mine"


def test_sweep_removes_only_files_of_killed_processes(tmp_path: Path):
    for folder in (".head.0123abcd", ".step-3.old", "step-3", "keep.0123abcd", ".git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
    for file in (".config.yaml.deadbeef", ".bashrc", ".a.0123abcx", LOCK):
        (tmp_path / file).touch()
    (tmp_path / ".link.0123abcd").symlink_to(tmp_path / ".git")
    remove_incomplete(tmp_path)
    names = {item.name for item in tmp_path.iterdir()}
    assert names == {"step-3", "keep.0123abcd", ".git", ".bashrc", ".a.0123abcx", LOCK}
    assert (tmp_path / ".git" / "file").is_file()


def test_sweep_restores_a_folder_whose_replacement_is_missing(tmp_path: Path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "old").touch()
    # killed between the two renames, without cleanup
    script = """
import os, sys
from pathlib import Path
from specheads.core.files import atomic_folder
rename, left = Path.rename, iter(range(2))
def killed(self, target):
    return os._exit(1) if next(left) else rename(self, target)
Path.rename = killed
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "new").touch()
"""
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path / "head")], check=False)
    assert process.returncode == 1
    assert not (tmp_path / "head").exists()
    remove_incomplete(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["head"]
    assert [item.name for item in (tmp_path / "head").iterdir()] == ["old"]


class FullStream:
    """A file on a full disk."""

    def write(self, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None: ...


@pytest.mark.parametrize("library", ["python", "torch", "safetensors"])
def test_a_full_disk_error_names_the_path(library: str, tmp_path: Path):
    tensors = {"a": torch.zeros(100_000)}

    def fill() -> None:
        with atomic_folder(tmp_path / "head"):
            if library == "torch":
                torch.save(tensors, FullStream())  # pyright: ignore[reportArgumentType]
            if library == "safetensors":
                save_file(tensors, "/dev/full")
            FullStream().write(b"")

    with pytest.raises(OSError, match="No space left") as full:
        fill()
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "head"))
    assert list(tmp_path.iterdir()) == []
