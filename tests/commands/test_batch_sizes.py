"""`batch_size=auto` in every command that reads the settings of a training, for every corpus."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from specheads.commands._call import call
from specheads.config import data_dir
from tests.slow import slow_except

pytestmark = pytest.mark.usefixtures("fixed_flop_count")

BASE = data_dir("recipes") / "tiny_code" / "base"
CORPUS, DISTILLED = "schedule.phases.corpus", "schedule.phases.distilled"


def write_corpus(folder: Path, num_characters: int) -> list[str]:
    """Write a text; return the overrides of a small training on rows of 64 tokens."""
    folder.mkdir()
    words = "def add(a, b):\n    return a + b\n" * 400
    (folder / "text.py").write_text(words[:num_characters])
    overrides = ["recipe=smoke", f"base={BASE}", "base.dtype=float32", "data=files"]
    overrides += [f"data.path={folder}", "evaluate_after=false", "head.inner_dim=16"]
    overrides += ["head.depth=1"]
    overrides += [f"{CORPUS}.sequence_length=64", f"{CORPUS}.steps=2", f"{CORPUS}.batch_size=auto"]
    return [*overrides, f"{DISTILLED}.steps=1", f"{DISTILLED}.batch_size=auto"]


DRY, PREVIEW, SERVES = ["dry_run=true"], ["preview=1"], ["~schedule.phases.distilled"]
WRITES = ["out=text", "num_samples=2", "new_tokens=4"]


@pytest.mark.parametrize(
    ("command", "words"),
    slow_except(
        [("train", DRY), ("distill", WRITES), ("serve-features", SERVES)],
        [
            *((command, words) for command in ("train", "distill") for words in (DRY, PREVIEW)),
            *[("distill", WRITES), ("serve-features", SERVES)],
        ],
    ),
)
def test_every_command_takes_auto(
    command: str, words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    overrides = write_corpus(tmp_path / "corpus", 3600)
    if "~schedule.phases.distilled" in words:
        overrides = [word for word in overrides if not word.startswith(DISTILLED)]
        words = [*words, f"folder={tmp_path}/states"]
    call(command, [*overrides, *words])
    output = capsys.readouterr().out
    assert output
    if "dry_run=true" in words:
        settings, plan = yaml.safe_load_all(output)
        for name, phase in settings["schedule"]["phases"].items():
            assert f"# phase {name!r}: batch_size=auto is {phase['batch_size']}\n" in output
            assert plan["plan"]["phases"][name]["batch_size"] == phase["batch_size"]


@pytest.mark.parametrize("num_characters", slow_except([900], [100, 900]))
def test_auto_never_needs_more_rows_than_the_corpus_has(
    num_characters: int, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    overrides = write_corpus(tmp_path / "corpus", num_characters)
    overrides = [word for word in overrides if not word.startswith(DISTILLED)]
    call("train", [*overrides, "~schedule.phases.distilled", "dry_run=true"])
    settings, _ = yaml.safe_load_all(capsys.readouterr().out)
    text = (tmp_path / "corpus" / "text.py").read_text()
    num_rows = math.ceil((len(AutoTokenizer.from_pretrained(BASE)(text)["input_ids"]) + 1) / 64)
    batch_size = settings["schedule"]["phases"]["corpus"]["batch_size"]
    assert batch_size <= num_rows < 2 * batch_size


def test_training_with_auto_reads_a_small_corpus(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    words = [f"{DISTILLED}.distill.num_samples=8", f"{DISTILLED}.distill.new_tokens=8"]
    call("train", [*write_corpus(tmp_path / "corpus", 500), *words, "name=small"])
    assert "phase 'distilled': batch_size=auto is 2" in capsys.readouterr().out
    assert (tmp_path / "runs" / "small" / "head" / "config.json").is_file()


def test_rows_are_split_until_a_step_fits(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    overrides = write_corpus(tmp_path / "corpus", 3600)
    overrides = [word for word in overrides if not word.startswith(DISTILLED)]
    overrides += [f"{CORPUS}.batch_size=8", "~schedule.phases.distilled", "dry_run=true"]
    overrides += [f"{CORPUS}.accumulation_steps=auto"]
    for room, note in ((10**15, "1\n"), (0, "8; the smallest part does not fit in memory: ")):
        monkeypatch.setattr(
            "specheads.training.batch_sizes.usable_bytes", lambda _, room=room: room
        )
        call("train", overrides)
        output = capsys.readouterr().out
        assert f"# phase 'corpus': accumulation_steps=auto is {note}" in output
    with pytest.raises(SystemExit):
        call("train", [*overrides, f"{CORPUS}.batch_size=auto"])
    assert "batch_size or accumulation_steps can be auto" in capsys.readouterr().err
