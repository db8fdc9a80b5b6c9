"""Reports of a reduced draft vocabulary: its size and its coverage of the text."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specheads.core.files import from_json
from specheads.heads.load import build
from specheads.measure import summary
from specheads.measure.evaluation import draft_vocabulary
from specheads.measure.results import DraftVocabulary
from specheads.runs.directory import RunDirectory
from tests.results import bare


def test_results_include_the_coverage_of_the_draft_vocabulary(tmp_path: Path):
    head = build({"kind": "medusa", "draft_tokens": 2}, width=4, vocab_size=6)
    counts = torch.tensor([0, 6, 1, 0, 3, 0])
    head.choose_vocabulary(counts)
    counted = {"size": 2, "coverage": head.coverage(counts)}
    run = RunDirectory(tmp_path / "run")
    run.begin("name: x", {"draft_vocabulary": counted})
    assert draft_vocabulary(head, run) == DraftVocabulary(**counted)
    assert counted["coverage"] == pytest.approx(0.9)
    assert draft_vocabulary(head, None) == DraftVocabulary(size=2, coverage=None)


def test_a_full_vocabulary_covers_everything():
    head = build({"kind": "medusa"}, width=4, vocab_size=6)
    assert draft_vocabulary(head, None) == DraftVocabulary(size=6, coverage=1.0)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"size": 2048, "coverage": 0.971}, ["2,048 tokens, 97.1% of the training text"]),
        ({"size": 2048, "coverage": None}, ["2,048 tokens"]),
        ({"size": 2048, "coverage": 1.0}, []),
        (None, []),
    ],
    ids=["counted", "not counted", "whole", "measured before"],
)
def test_the_report_shows_a_reduced_vocabulary(section: dict | None, told: list[str]):
    results = replace(bare(), draft_vocabulary=section and from_json(DraftVocabulary, section))
    rows = [row for row in summary.summary(results) if row[0] == "draft vocabulary"]
    assert [what for _, what in rows] == told
