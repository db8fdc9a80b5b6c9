"""Questions about the standard library, and the file of them that the quickstart reads."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specheads.config import compose
from specheads.data.sources import read_source

CODE = '''"""Numbers that are counted, with everything one needs for it."""


def count(limit: int, step: int = 1) -> int:
    """Return how many numbers there are below a limit, by steps of some length."""
    total = 0
    for number in range(0, limit, step):
        if number < limit and number >= 0:
            total += 1
    return total


def short(): return 1
'''


def question_rows(script: ModuleType, *texts: str) -> list[dict]:
    files = ((f"{number}.py", {"text": text}) for number, text in enumerate(texts))
    return list(script.questions(files))


def contents(rows: list[dict], kind: str) -> list[str]:
    return [row["messages"][0]["content"] for row in rows if row["category"] == kind]


def test_function_gets_every_kind_that_fits(script: ModuleType):
    kinds = {row["category"] for row in question_rows(script, CODE)}
    assert {"module", "write", "explain", "test", "continue"} < kinds
    assert len(kinds) == 6


def test_questions_do_not_show_the_answer(script: ModuleType):
    rows = question_rows(script, CODE)
    (write,), (start,) = contents(rows, "write"), contents(rows, "continue")
    assert "def count(limit: int, step: int = 1) -> int:" in write
    assert "by steps of some length" in write
    assert "total" not in write
    assert "total = 0" in start
    assert "return total" not in start


def test_function_in_two_files_is_used_once_and_never_across_splits(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    def rows_with(split_of: Callable[[str], str]) -> list[dict]:
        monkeypatch.setattr(script, "split_of", split_of)
        return question_rows(script, CODE, CODE + "# more\n")

    rows = rows_with(lambda _: "train")
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 6
    assert {row["specheads_split"] for row in rows} == {"train"}
    rows = rows_with(lambda text: "train" if "more" in text else "prompts")
    assert [row["category"] for row in rows] == ["module"]


def test_quickstart_reads_the_same_questions_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    data = compose.settings_of("train", ["recipe=smollm2"]).data
    documents = [(split, document) for split, _, document in read_source(data)]
    assert Counter(split for split, _ in documents) == {
        **{"train": 38_908, "prompts": 1_799, "validation": 688}
    }
    # the order decides which questions the base answers: the text of the recipe's results
    messages = "\n".join(
        json.dumps(
            {"messages": document["messages"], "tools": None}, sort_keys=True, ensure_ascii=False
        )
        for split, document in documents
        if split == "train"
    )
    digest = hashlib.sha256(messages.encode()).hexdigest()
    assert digest.startswith("282834591346")
