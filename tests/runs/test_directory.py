"""The run directory: whole or absent, never overwritten, refused when it is another's."""

from pathlib import Path

import pytest
import torch

from specheads.heads.load import build
from specheads.runs.directory import RunDirectory, atomic_folder, write_atomic
from specheads.runs.provenance import provenance


def test_a_folder_that_fails_while_it_is_filled_never_appears(tmp_path: Path):
    target = tmp_path / "head"

    def fail() -> None:
        with atomic_folder(target) as folder:
            (folder / "half").write_text("written")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_at_once(tmp_path: Path):
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "head") as folder:
            (folder / text).write_text(text)
    assert [file.name for file in (tmp_path / "head").iterdir()] == ["new"]
    assert [item.name for item in tmp_path.iterdir()] == ["head"]


def test_a_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path):
    write_atomic(tmp_path / "deep" / "file.json", "{}\n")
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["file.json"]


def test_a_finished_run_is_never_overwritten(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    assert not run.finished
    run.end(build({"kind": "medusa"}, width=8, vocab_size=11))
    assert run.finished
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"never overwritten.*another name="):
        run.begin("a: 1\n", {"base_fingerprint": "f"})
    assert before == {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}


def test_an_unfinished_run_goes_on_with_its_own_settings_and_base_only(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    with pytest.raises(ValueError, match="own settings only"):
        run.begin("a: 2\n", {"base_fingerprint": "f"})
    with pytest.raises(ValueError, match="same base fingerprint only: it was f, now it is g"):
        run.begin("a: 1\n", {"base_fingerprint": "g"})


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="a folder of its own"):
        RunDirectory(tmp_path).begin("a: 1\n", {})
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_provenance_names_versions_and_machine_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    found = provenance()
    # the index's builds leave out of their metadata what comes after the plus sign
    assert (found.versions["torch"] or "").split("+")[0] == torch.__version__.split("+")[0]
    assert (found.hardware.cores or 0) >= 1
    assert "secret" not in str(found)
