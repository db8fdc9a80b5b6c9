"""Reports of a reduced draft vocabulary: its size and its coverage of the text."""

from pathlib import Path

import pytest
import torch

from specheads.heads.load import build
from specheads.measure.evaluation import draft_vocabulary
from specheads.measure.results import DraftVocabulary
from specheads.runs.directory import RunDirectory


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
