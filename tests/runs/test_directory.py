"""The run directory: atomic files, resume, damaged files, provenance."""

from pathlib import Path

import pytest
import torch

from specheads.core.errors import InputError
from specheads.core.files import LOCK, as_json, read_json
from specheads.core.machine import matrix_instructions
from specheads.heads.load import build_head
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import collect_provenance


def test_finished_run_is_never_overwritten(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    assert not run.finished
    run.end(build_head({"kind": "medusa"}, width=8, vocab_size=11))
    assert run.finished
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"never overwritten.*another name="):
        run.begin("a: 1\n", {"base_fingerprint": "f"})
    assert before == {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}


def test_unfinished_run_resumes_with_its_own_settings_and_base(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    with pytest.raises(ValueError, match="own settings: a was 1, now 2; choose another name="):
        run.begin("a: 2\n", {"base_fingerprint": "f"})
    with pytest.raises(ValueError, match="same base fingerprint: it was f, now g"):
        run.begin("a: 1\n", {"base_fingerprint": "g"})


@pytest.mark.parametrize("fact", ["base_fingerprint", "base_config", "data"])
def test_unfinished_run_resumes_with_the_same_facts(fact: str, tmp_path: Path):
    run, facts = RunDirectory(tmp_path / "run"), {"base_fingerprint": "f", "data": "d"}
    run.begin("a: 1\n", facts)
    # a run of an earlier version has fewer facts
    run.begin("a: 1\n", {"base_config": "c", **facts})
    run.provenance.write_text(as_json(read_json(run.provenance) | {"base_config": "c"}))
    with pytest.raises(ValueError, match=f"same {fact.replace('_', ' ')}: it was ., now other"):
        run.begin("a: 1\n", {"base_config": "c", **facts, fact: "other"})


@pytest.mark.parametrize("damage", [b"", b"\xff", b"a: [", b"a: &x 1\n", b"- a\n"])
def test_damaged_config_is_refused_by_name(damage: bytes, tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {})
    run.config.write_bytes(damage)
    with pytest.raises(InputError, match=r"config\.yaml is not a run's settings"):
        run.begin("a: 1\n", {})
    assert run.config.read_bytes() == damage


PROVENANCES = {
    "nothing": b"",
    "no text": b"\xff\xfe",
    "half": b'{"start": "2026',
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "too much": b" " * (2**20 + 1),
    "an end of a wrong type": b'{"end": {"a": 1}}',
    "a fingerprint of a wrong type": b'{"base_fingerprint": 3, "end": null}',
    "a vocabulary of a wrong type": b'{"draft_vocabulary": "all", "end": "now"}',
}


@pytest.mark.parametrize("damage", PROVENANCES)
def test_damaged_provenance_is_refused_by_name(damage: str, tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {})
    run.provenance.write_bytes(PROVENANCES[damage])
    for act in (lambda: run.begin("a: 1\n", {}), lambda: run.refuse_unfinished("evaluated")):
        with pytest.raises(InputError, match=r"provenance\.json") as refused:
            act()
        assert len(str(refused.value).splitlines()) == 1


def test_provenance_outside_the_folder_is_refused(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {})
    run.provenance.rename(tmp_path / "secret.json")
    run.provenance.symlink_to(tmp_path / "secret.json")
    with pytest.raises(InputError, match="be in its own folder"):
        run.refuse_unfinished("evaluated")


def test_killed_start_begins_again(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    run.provenance.rename(run.path / ".provenance.json.0123abcd")
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    run.provenance.unlink()
    run.config.rename(run.path / ".config.yaml.0123abcd")
    (run.path / LOCK).touch()
    run.begin("a: 1\n", {"base_fingerprint": "f"})
    names = {item.name for item in run.path.iterdir()}
    assert names == {LOCK, "config.yaml", "provenance.json"}


def test_incomplete_files_are_removed_and_old_folders_restored(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin("a: 1\n", {})
    for path in ("checkpoints/.step-3.0123abcd", "phases/.corpus.0123abcd", ".head.old"):
        (run.path / path).mkdir(parents=True)
        (run.path / path / "model.safetensors").touch()
    run.begin("a: 1\n", {})
    files = [file.relative_to(run.path).as_posix() for file in run.path.rglob("*.safetensors")]
    assert files == ["head/model.safetensors"]
    assert list(run.checkpoints.iterdir()) == list(run.phases.iterdir()) == []


def test_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="needs its own folder"):
        RunDirectory(tmp_path).begin("a: 1\n", {})
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_provenance_has_versions_and_machine_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    provenance = collect_provenance()
    # some builds leave out the part after the plus sign in their metadata
    assert (provenance.versions["torch"] or "").split("+")[0] == torch.__version__.split("+")[0]
    assert (provenance.hardware.cores or 0) >= 1
    assert provenance.hardware.instructions == matrix_instructions()
    assert "secret" not in str(provenance)
