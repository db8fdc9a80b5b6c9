"""Text that does not fit a phase is refused before anything is written."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from accelerate import Accelerator

from specheads.base.model import FrozenBase
from specheads.config import Data, compose, data_dir
from specheads.config.parts import WeightedSource
from specheads.core.errors import InputError
from specheads.data.documents import Documents
from specheads.data.packing import PackedText
from specheads.runs.directory import RunDirectory
from specheads.training.schedule import row_tokens
from specheads.training.settings import Distill, Phase
from specheads.training.texts import PhaseTexts, _refuse_too_few

DISTILL = Distill(num_samples=16, prompt_tokens=32, new_tokens=32)


def distilled(**changes: Any) -> Phase:
    usual = {"text": "distilled", "steps": 1, "batch_size": 2, "distill": DISTILL}
    return Phase(**usual | changes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> PhaseTexts:
    """Texts of the smoke recipe, of a small corpus."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(12):
        text = "".join(f"def f_{number}_{at}(a):\n    return a + {at}\n" for at in range(40))
        (folder / f"{number}.py").write_text(text)
    small = ["recipe=smoke", "data=files", f"data.path={folder}", "schedule.phases.corpus.steps=1"]
    settings = compose.settings_of("train", small)
    base = FrozenBase.load(data_dir("recipes") / "tiny_code" / "base", device="cpu")
    return PhaseTexts(settings, base, RunDirectory(folder), Accelerator(cpu=True), lambda _: None)


@pytest.mark.parametrize(
    ("packing", "length"),
    [
        *(("best_fit", length) for length in (0, 128, 150, 33, 30)),
        *(("stream", length) for length in (100, 33)),
        *(("none", length) for length in (128, 33)),
    ],
)
def test_too_little_generated_text_is_refused_first(packing: str, length: int):
    numbers = [np.arange(64)] * 16
    full = Documents(
        pa.table({"tokens": pa.array(numbers, pa.list_(pa.int32())), "loss_mask": [[1] * 64] * 16})
    )
    text = PackedText(full, sequence_length=length, batch_size=1, packing=packing)
    rows = text.rows_per_epoch
    phase = distilled(sequence_length=length, packing=packing, batch_size=rows)
    _refuse_too_few("a", phase, 64)
    fill = f"fill {rows} rows of {length or 64}; "
    told = rf"={rows + 1} rows, but .*16 texts of at most 64 tokens {fill}"
    with pytest.raises(InputError, match=told):
        _refuse_too_few("a", replace(phase, batch_size=rows + 1), 64)


@pytest.fixture
def phases(texts: PhaseTexts, monkeypatch: pytest.MonkeyPatch) -> dict[str, Phase]:
    """Phases that a test can change."""
    found = {"a": distilled()}
    monkeypatch.setattr(texts.settings.schedule, "phases", found)
    return found


def test_every_distilled_phase_is_checked(texts: PhaseTexts, phases: dict[str, Phase]):
    phases["b"] = distilled(batch_size=17)
    with pytest.raises(InputError, match=r"phase 'b' needs at least batch_size=17 rows"):
        texts._check_generated()


def test_conversation_counts_as_one_row(
    texts: PhaseTexts, phases: dict[str, Phase], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(texts.prompts(DISTILL), "conversations", True, raising=False)
    phases["b"] = distilled(batch_size=17, sequence_length=64)
    texts._check_generated()
    phases["b"] = distilled(batch_size=17)
    with pytest.raises(InputError, match=r"16 texts of at most \d+ tokens fill 16 rows of"):
        texts._check_generated()


def test_phases_with_different_text_in_one_folder_are_refused(
    texts: PhaseTexts, phases: dict[str, Phase]
):
    phases["b"] = distilled(distill=replace(DISTILL, temperature=0.5))
    with pytest.raises(
        InputError, match=r"'a' has distill.temperature=1.0 and 'b' 0.5; give one of"
    ):
        texts._check_generated()
    for same in ({"temperature": 0.5, "folder": "other"}, {"num_samples": 20, "batch_size": 1}):
        phases["b"] = distilled(distill=replace(DISTILL, **same))
        texts._check_generated()


def test_processes_with_the_same_rows_generate_different_texts(
    texts: PhaseTexts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(texts, "share", {"rank": 0, "world_size": 1})
    monkeypatch.setattr(Accelerator, "process_index", 1)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    job = texts._job(DISTILL)
    assert (job.rank, job.world_size) == (1, 2)


CHAT = WeightedSource(source="chat", path="x")


@pytest.mark.parametrize(
    ("data", "length", "longest"),
    [
        (Data(source="python_stdlib"), 0, 64),
        (Data(source="chat", path="x"), 0, 4096),
        (Data(source="chat", path="x"), 512, 512),
        (Data(source="mixture", sources={"a": CHAT}), 0, 4096),
        (Data(source="mixture", sources={"a": replace(CHAT, weight=0.0)}), 0, 64),
    ],
    ids=str,
)
def test_conversation_may_fill_the_context(data: Data, length: int, longest: int):
    assert row_tokens(distilled(sequence_length=length), data, 4096) == longest
