"""Text that does not fit a phase is refused before anything is written."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from accelerate import Accelerator
from rich.console import Console
from rich.progress import Progress

from specheads.base.model import FrozenBase
from specheads.config import compose, data_dir
from specheads.config.data import DataSettings, MixtureSource
from specheads.config.training import DistillSettings, Phase
from specheads.core.errors import InputError
from specheads.data.packing import PackedText
from specheads.data.tokenise import TokenisedDocuments
from specheads.training.distill.shards import read_text
from specheads.training.phase_data import PhaseData
from specheads.training.schedule import ScheduledPhase, row_tokens

DISTILL = DistillSettings(num_samples=16, prompt_tokens=32, new_tokens=32)


def distilled(**changes: Any) -> Phase:
    defaults = {"text": "distilled", "steps": 1, "batch_size": 2, "distill": DISTILL}
    return Phase(**defaults | changes)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return FrozenBase.load(data_dir("recipes") / "tiny_code" / "base", device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSettings:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(12):
        text = "".join(f"def f_{number}_{at}(a):\n    return a + {at}\n" for at in range(40))
        (folder / f"{number}.py").write_text(text)
    return compose.settings_of("train", ["recipe=smoke", "data=files", f"data.path={folder}"]).data


def texts(base: FrozenBase, data: DataSettings, *phases: Phase) -> PhaseData:
    phases_by_name = dict(zip("abc", phases, strict=False))
    return PhaseData(
        phases_by_name, data, base, Path("text"), Accelerator(cpu=True), lambda _: None, 0
    )


def test_phases_with_different_text_in_one_folder_are_refused(base: FrozenBase, data: DataSettings):
    changes = {"temperature": 0.5}
    with pytest.raises(InputError, match=r"'b' generates other text than .* own distill.folder"):
        texts(base, data, distilled(), distilled(distill=replace(DISTILL, **changes)))
    for allowed in (changes | {"folder": "other"}, {"num_samples": 20, "batch_size": 1}):
        texts(base, data, distilled(), distilled(distill=replace(DISTILL, **allowed)))


def test_folder_of_other_text_is_refused_before_the_first_phase(
    base: FrozenBase, data: DataSettings, tmp_path: Path
):
    (tmp_path / "fingerprint.json").write_text('{"new_tokens": 64}', encoding="utf-8")
    phase = distilled(distill=replace(DISTILL, folder=str(tmp_path)))
    with pytest.raises(InputError, match=r"was generated with \w+ .*; use the same settings"):
        texts(base, data, distilled(), phase)


@pytest.mark.parametrize("corpus", [False, True])
def test_tokens_are_counted_in_the_text_of_the_phases(
    corpus: bool, base: FrozenBase, data: DataSettings
):
    """The base's answers have other tokens than the corpus, which no phase may read."""
    answers = TokenisedDocuments(pa.table({"tokens": pa.array([[7, 7, 9]], pa.list_(pa.int32()))}))
    phases = [distilled(), *([Phase(text="corpus", batch_size=2, sequence_length=64)] * corpus)]
    phase_data, opened_runs = texts(base, data, *phases), []
    phase_data._generate = lambda *_: answers  # pyright: ignore[reportAttributeAccessIssue]
    counts = phase_data.count_tokens(lambda: opened_runs.append(None))
    if corpus:
        assert not opened_runs
        assert counts[7] + counts[9] < counts.sum()
    else:
        assert opened_runs
        assert (counts[7], counts[9], counts.sum()) == (2, 1, 3)


def test_dropped_texts_are_counted_in_the_log(base: FrozenBase, data: DataSettings, tmp_path: Path):
    # greedy text of a small model repeats itself
    settings = replace(DISTILL, new_tokens=96, drop=["loop"], folder=str(tmp_path))
    phase = distilled(batch_size=1, distill=replace(settings, temperature=0.0, top_k=0))
    log = StringIO()
    bar = Progress(console=Console(file=log, width=200))
    texts(base, data, phase).open_phase(
        ScheduledPhase(name="a", settings=phase, first=0), bar, lambda: None
    )
    number = len(read_text(tmp_path, 16))
    assert 0 < number < 16
    assert f"{16 - number} of 16 texts were dropped (loop: {16 - number}), see " in log.getvalue()


@pytest.mark.parametrize("packing", ["none", "best_fit", "stream"])
@pytest.mark.parametrize(
    ("num_question_tokens", "answers"), [((64,), 1), ((65, 90), 1), ((200,), 3), ((64, 300), 2)]
)
def test_answers_behind_the_first_row_are_refused_until_rows_are_longer(
    num_question_tokens: tuple[int, ...], answers: int, packing: str
):
    """Each text is a question, and answers with questions between them."""
    texts = [[0] * count + ([1] * 8 + [0] * 8) * answers for count in num_question_tokens * 8]
    columns = {"tokens": texts, "loss_mask": texts}
    table = pa.table(
        {
            "tokens": pa.array(columns["tokens"], pa.list_(pa.int32())),
            "loss_mask": pa.array(columns["loss_mask"], pa.list_(pa.uint8())),
        }
    )
    documents, rows = TokenisedDocuments(table), {"batch_size": 1, "packing": packing}
    line = f"none of {len(texts)} documents has one in its first 64 tokens"
    with pytest.raises(InputError, match=f"{line}, .*; raise sequence_length"):
        PackedText(documents, sequence_length=64, **rows)
    assert PackedText(documents, sequence_length=400, **rows).rows_per_epoch
    assert PackedText(documents, sequence_length=65 + min(num_question_tokens), **rows)


CHAT = MixtureSource(source="chat", path="x")


@pytest.mark.parametrize(
    ("data", "length", "longest"),
    [
        (DataSettings(source="python_stdlib"), 0, 64),
        (DataSettings(source="chat", path="x"), 0, 4096),
        (DataSettings(source="chat", path="x"), 512, 512),
        (DataSettings(source="mixture", sources={"a": CHAT}), 0, 4096),
        (DataSettings(source="mixture", sources={"a": replace(CHAT, weight=0.0)}), 0, 64),
    ],
    ids=str,
)
def test_row_of_a_conversation_may_fill_the_context(data: DataSettings, length: int, longest: int):
    assert row_tokens(distilled(sequence_length=length), data, 4096) == longest
