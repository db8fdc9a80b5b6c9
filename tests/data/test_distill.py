"""Self-distilled text: only what the base wrote counts, written once, resumed to the bit."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from specheads.config import Distill
from specheads.core.errors import InputError
from specheads.core.files import sole_writer
from specheads.data.distill import documents, write_shards
from specheads.data.packing import PackedText, TokenBatch

SETTINGS = Distill(num_samples=10, prompt_tokens=3, new_tokens=4, batch_size=4)


class Prompts:
    """Rows that count upwards, so that every token says where it came from."""

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        number = cursor["number"] if cursor else 0
        while True:
            tokens = torch.arange(28).view(4, 7) + 100 * number
            number += 1
            yield TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool)), {"number": number}


def pen(prompts: list[list[int]], seed: int) -> list[list[int]]:
    """Continue each prompt by what shows prompt and seed; every second text ends early."""
    return [
        [row[-1] + 1000, seed % 1000, 7, 8][: 2 if place % 2 else 4]
        for place, row in enumerate(prompts)
    ]


def write(folder: Path, settings: Distill = SETTINGS, **changes: Any) -> list[int]:
    arguments: dict[str, Any] = {"write": pen, "identity": {"base": "b"}} | changes
    return list(write_shards(folder, Prompts(), settings=settings, **arguments))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def test_prompts_are_the_beginnings_of_corpus_rows_and_as_many_are_written_as_asked(tmp_path: Path):
    assert write(tmp_path) == [4, 8, 10]
    found = rows(tmp_path)
    assert len(found) == 10
    counted = [0, 0, 0, 1, 1, 1, 1]
    assert found[0] == {"number": 0, "tokens": [0, 1, 2, 1002, 0, 7, 8], "counted": counted}
    assert [row["number"] for row in found] == list(range(10))
    assert found[4]["tokens"][:3] == [100, 101, 102]
    assert found[1]["tokens"] == [7, 8, 9, 1009, 0]


def test_stopping_and_going_on_writes_the_same_text(tmp_path: Path):
    write(tmp_path / "whole")
    calls = 0

    def breaking(prompts: list[list[int]], seed: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the machine went away")
        return pen(prompts, seed)

    with pytest.raises(RuntimeError):
        write(tmp_path / "parts", write=breaking)
    assert len(rows(tmp_path / "parts")) == 4
    assert write(tmp_path / "parts") == [8, 10]
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert write(tmp_path / "parts") == []
    assert not list((tmp_path / "parts").glob("*.tmp"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "flipped": flip,
    "empty": lambda file: file.write_bytes(b""),
    "no text": lambda file: file.write_bytes(b"\xff\xfe"),
    "another type": lambda file: file.write_text("[]"),
    "deep": lambda file: file.write_text("[" * 100_000),
}


@pytest.mark.parametrize("name", ["shard-0-00001.parquet", "progress-0.json", "fingerprint.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_text_is_refused_by_the_file_and_written_again_once_it_is_removed(
    name: str, damage: str, tmp_path: Path
):
    folder = tmp_path / "text"
    write(folder)
    before = rows(folder)
    DAMAGES[damage](folder / name)
    # a flipped bit of the fingerprint is another fingerprint
    with pytest.raises(InputError, match=f"{name} is damaged|that wrote it only"):
        write(folder)
    if name != "fingerprint.json":
        with pytest.raises(InputError, match=f"{name} is damaged"):
            documents(folder)
    shutil.rmtree(folder)
    assert write(folder) == [4, 8, 10]
    assert rows(folder) == before


def test_a_missing_shard_is_never_passed_over(tmp_path: Path):
    write(tmp_path)
    (tmp_path / "shard-0-00000.parquet").unlink()
    for use in (lambda: write(tmp_path), lambda: documents(tmp_path)):
        with pytest.raises(InputError, match=r"00000\.parquet is damaged or missing"):
            use()


def test_without_its_progress_the_same_text_is_written_again(tmp_path: Path):
    write(tmp_path)
    before = rows(tmp_path)
    (tmp_path / "progress-0.json").unlink()
    assert write(tmp_path) == [4, 8, 10]
    assert rows(tmp_path) == before


def test_text_that_is_being_written_has_one_writer_and_is_read_by_all_once_it_is_there(
    tmp_path: Path,
):
    first = write_shards(tmp_path, Prompts(), pen, SETTINGS, {"base": "b"})
    assert next(first) == 4
    with pytest.raises(InputError, match="one process at a time may write"):
        write(tmp_path)
    assert write(tmp_path, rank=1, world_size=2) == [4, 5]
    first.close()
    assert not list(tmp_path.glob(".lock*"))
    assert write(tmp_path) == [8, 10]
    with sole_writer(tmp_path, ".lock-0"):
        assert write(tmp_path) == []


def test_what_killed_writers_left_half_written_is_swept(tmp_path: Path):
    (tmp_path / ".shard-0-00000.parquet.0123abcd").touch()
    (tmp_path / ".shard-1-00000.parquet.0123abcd").touch()
    write(tmp_path, world_size=2)
    assert [file.name for file in tmp_path.glob(".*")] == [".shard-1-00000.parquet.0123abcd"]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    (tmp_path / ".fingerprint.json.0123abcd").touch()
    write(tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": {"base": "c"}},
        {"seed": 1},
        {"settings": replace(SETTINGS, new_tokens=5)},
        {"identity": {"base": "b", "corpus": {"column": "code"}}},
        {"identity": {"base": "b", "documents": "d"}},
    ],
    ids=["base", "seed", "new_tokens", "corpus", "documents"],
)
def test_text_of_another_base_corpus_or_setting_is_refused_by_name(
    changes: dict, tmp_path: Path, request: pytest.FixtureRequest
):
    write(tmp_path)
    name = request.node.callspec.id
    with pytest.raises(ValueError, match=f"that wrote it only: .* was written with {name} "):
        write(tmp_path, **changes)


def test_text_is_recognised_whatever_the_order_of_its_names(tmp_path: Path):
    write(tmp_path, identity={"base": "b", "corpus": {"path": "x", "patterns": ("y",)}})
    assert write(tmp_path, identity={"corpus": {"patterns": ["y"], "path": "x"}, "base": "b"}) == []


def test_text_from_before_its_corpus_was_hashed_is_refused(tmp_path: Path):
    (tmp_path / "fingerprint.json").write_text('{"text": "0123"}\n')
    with pytest.raises(ValueError, match="that wrote it only"):
        write(tmp_path)


def test_text_kept_elsewhere_is_the_same_text(tmp_path: Path):
    write(tmp_path)
    shared = Distill(num_samples=10, prompt_tokens=3, new_tokens=4, batch_size=4, folder="there")
    assert write(tmp_path, shared) == []


def test_only_what_the_base_wrote_counts(tmp_path: Path):
    #  prompt  p p p      counted  . . .
    #  written w w w w             x x x x   or, ended early:  x x . .
    write(tmp_path)
    batch, _ = next(pack(tmp_path, 10).batches())
    long = batch.tokens[:, 5] == 7
    assert batch.counted[long].tolist() == [[False] * 3 + [True] * 4] * 5
    assert batch.counted[~long].tolist() == [[False] * 3 + [True] * 2 + [False] * 2] * 5
    assert batch.tokens[~long, 5:].any().item() is False


def pack(folder: Path, batch_size: int, **share: int) -> PackedText:
    sizes = {"sequence_length": 0, "batch_size": batch_size} | share
    return PackedText(documents(folder), packing="none", **sizes)


def test_the_shards_of_all_ranks_are_one_text(tmp_path: Path):
    for rank in (1, 0):
        write(tmp_path, rank=rank, world_size=2)
    assert sorted(row["number"] for row in rows(tmp_path)) == list(range(10))
    assert len(documents(tmp_path)) == 10
    before = documents(tmp_path).fingerprint
    (tmp_path / "progress-1.json").unlink()
    assert documents(tmp_path).fingerprint != before


def test_too_few_texts_for_a_batch_is_an_error_with_both_numbers(tmp_path: Path):
    write(tmp_path)
    with pytest.raises(ValueError, match=r"needs 11 rows.*fill 10"):
        pack(tmp_path, 11)
    with pytest.raises(ValueError, match=r"needs 2 rows.*fill 0"):
        pack(tmp_path / "empty", 2)
