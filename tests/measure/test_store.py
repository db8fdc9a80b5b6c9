"""Stored results and the draft vocabulary; damaged ones are one line that names the field."""

import json
from pathlib import Path

import pytest
import torch

from specheads.core.errors import InputError
from specheads.core.files import to_json
from specheads.heads.load import build_head
from specheads.measure.evaluation import draft_vocabulary
from specheads.measure.results import DraftVocabulary, Results, read_results
from specheads.runs.directory import RunDirectory
from tests.results import bare

WHOLE = to_json(bare(speed={"base_tokens_per_second": 1.0, "tokens_per_second": 2.0, "speedup": 2.0,
    "interval": [1.0, 3.0], "step_overhead": 1.0}))  # fmt: skip


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("head", "depth", "three", r"value of head\.depth .*integer.*, got 'three'"),
        ("head", "depth", None, r"value of head\.depth .*integer.*, got None"),
        ("speed", "interval", [1.0], r"value of speed\.interval\.1 .*, got nothing"),
        ("speed", "interval", ["a", "b"], r"value of speed\.interval\.0 .*number"),
        ("provenance", "hardware", 3, r"value of provenance\.hardware .*object"),
    ],
)
def test_wrong_type_names_the_field(tmp_path: Path, section, name, value, message):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(WHOLE | {section: WHOLE[section] | {name: value}}))
    with pytest.raises(InputError, match=message) as caught:
        read_results(Results, file)
    assert str(file) in str(caught.value)


BROKEN = {
    "cut": b'{"head": {"ki',
    "deep": b'{"head": ' + b"[" * 100_000,
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "large": b" " * 2_000_000 + b"{}",
}


def damage(file: Path, kind: str) -> None:
    if kind == "elsewhere":
        outside = file.parent.parent / "secret.json"
        outside.write_text(json.dumps({"draft_vocabulary": {"size": 1, "coverage": 0.5}}))
        file.unlink(missing_ok=True)
        file.symlink_to(outside)
    else:
        file.write_bytes(BROKEN[kind])


@pytest.mark.parametrize("kind", [*BROKEN, "elsewhere", "missing", "wrong"])
def test_broken_results_and_provenance_raise_one_line(tmp_path: Path, kind: str):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    head = build_head({"kind": "medusa", "draft_tokens": 3}, width=8, vocab_size=11)
    results = run.path / "results.json"
    for file in (results, run.provenance):
        if kind == "wrong":
            file.write_text('{"draft_vocabulary": ["size"]}')
        elif kind != "missing":
            damage(file, kind)
        # missing results are none
        if (file, kind) != (results, "missing"):
            with pytest.raises(InputError, match=rf"{file.stem}"):
                read_results(Results, file) if file == results else draft_vocabulary(head, run)


def test_results_include_the_coverage_of_the_draft_vocabulary(tmp_path: Path):
    head = build_head({"kind": "medusa", "draft_tokens": 2}, width=4, vocab_size=6)
    counts = torch.tensor([0, 6, 1, 0, 3, 0])
    head.choose_vocabulary(counts)
    counted = {"size": 2, "coverage": head.coverage(counts)}
    run = RunDirectory(tmp_path / "run")
    run.begin("name: x", {"draft_vocabulary": counted})
    assert draft_vocabulary(head, run) == DraftVocabulary(**counted)
    assert counted["coverage"] == pytest.approx(0.9)
    assert draft_vocabulary(head, None) == DraftVocabulary(size=2, coverage=None)
    full = build_head({"kind": "medusa"}, width=4, vocab_size=6)
    assert draft_vocabulary(full, None) == DraftVocabulary(size=6, coverage=1.0)
