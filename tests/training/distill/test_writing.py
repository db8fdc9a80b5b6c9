"""Self-distilled text does not depend on processes and stops."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specheads.core.errors import InputError
from specheads.core.files import sole_writer
from specheads.training.distill.report import report_of
from specheads.training.distill.run import write_text
from specheads.training.distill.shards import CLAIM_LOCK, read_text
from specheads.training.settings import Distill
from tests.training.distill.pens import END, SETTINGS, Pen, Talks, job, rows, shards, write

NUM_ANSWERS = sum(number % 3 + 1 for number in range(10))


def test_turns_follow_the_bases_answers_which_alone_count(tmp_path: Path):
    write(tmp_path)
    found = rows(tmp_path)
    assert [row["number"] for row in found] == list(range(10))
    assert [row["turns"] for row in found] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    #  asked 1 0, answered 1 0 s END, asked 1 1, answered 1 1 t END
    tokens = found[1]["tokens"]
    assert tokens[:4] + tokens[6:9] == [1, 0, 1, 0, 1, 1, 1]
    assert found[1]["counted"] == [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert tokens[4] != tokens[10], "each turn has a seed of its own"


def test_shards_do_not_depend_on_the_order_of_answers(tmp_path: Path):
    for seed in range(5):
        write(tmp_path / str(seed), Pen(seed))
    assert sorted(shards(tmp_path / "0")) == [f"shard-0000{one}.parquet" for one in range(3)]
    assert all(shards(tmp_path / str(seed)) == shards(tmp_path / "0") for seed in range(5))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_text_does_not_depend_on_processes(world_size: int, tmp_path: Path):
    write(tmp_path / "alone")
    for rank in range(world_size):
        write(tmp_path / "shared", Pen(rank), rank=rank, world_size=world_size)
    assert shards(tmp_path / "shared") == shards(tmp_path / "alone")


@pytest.mark.parametrize("answers", range(NUM_ANSWERS))
def test_stop_loses_only_requests_in_flight(answers: int, tmp_path: Path):
    write(tmp_path / "whole")
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        write(folder, Pen(1, stop_after=answers))
    again = Pen(2)
    write(folder, again)
    assert len(again.asked) == NUM_ANSWERS - answers
    assert shards(folder) == shards(tmp_path / "whole")
    assert not [*folder.glob("open-*"), *folder.glob(".*")]


def test_one_process_resumes_the_text_of_several(tmp_path: Path):
    write(tmp_path / "whole")
    for rank in range(2):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "parts", Pen(stop_after=3), rank=rank, world_size=2)
    again = Pen()
    write(tmp_path / "parts", again)
    assert len(again.asked) == NUM_ANSWERS - 6
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")


def test_raised_num_samples_keeps_existing_texts(tmp_path: Path):
    more = replace(SETTINGS, num_samples=15)
    write(tmp_path / "whole", settings=more)
    write(tmp_path / "parts")
    again = Pen()
    write(tmp_path / "parts", again, settings=more)
    assert {ask.number for ask in again.asked} == set(range(10, 15))
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")
    assert write(tmp_path / "parts") == []
    assert len(read_text(tmp_path / "parts", 10)) == 10


@pytest.mark.parametrize("answers", range(4))
def test_stop_after_raised_num_samples_loses_nothing(answers: int, tmp_path: Path):
    more = replace(SETTINGS, num_samples=12)
    write(tmp_path / "whole", settings=more)
    write(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "parts", Pen(stop_after=answers), settings=more)
    write(tmp_path / "parts", settings=more)
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")


@pytest.mark.parametrize("kept", ["journal and shard", "journal alone"])
def test_kill_between_seal_and_shard_is_repaired(kept: str, tmp_path: Path):
    write(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "parts", Pen(stop_after=NUM_ANSWERS - 1))
    before = {file.name: file.read_bytes() for file in (tmp_path / "parts").glob("open-*")}
    write(tmp_path / "parts")
    for name, content in before.items():
        (tmp_path / "parts" / name).write_bytes(content)
        if kept == "journal alone":
            (tmp_path / "parts" / name.replace("open", "shard")).with_suffix(".parquet").unlink()
    write(tmp_path / "parts")
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")
    assert not list((tmp_path / "parts").glob("open-*"))


@pytest.mark.parametrize("lost", [1, 5, 20])
def test_truncated_last_line_of_a_journal_is_generated_again(lost: int, tmp_path: Path):
    write(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "parts", Pen(stop_after=2))
    journal = next((tmp_path / "parts").glob("open-*"))
    journal.write_bytes(journal.read_bytes()[:-lost])
    write(tmp_path / "parts", pen := Pen())
    assert len(pen.asked) == NUM_ANSWERS - 1
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")


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
    "no text": lambda file: file.write_bytes(b"\xff\xfe\n"),
    "another type": lambda file: file.write_text("[]\n"),
    "deep": lambda file: file.write_text("[" * 100_000 + "\n"),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", ["shard-00001.parquet", "sealed-0.jsonl", "fingerprint.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_text_is_refused_or_repaired(name: str, damage: str, tmp_path: Path):
    folder = tmp_path / "text"
    write(folder)
    before = shards(folder)
    DAMAGES[damage](folder / name)
    told = ""
    try:
        write(folder)
        read_text(folder, 10)
    except InputError as error:
        told = str(error)
        shutil.rmtree(folder)
        write(folder)
    assert not told or "damaged or missing; remove" in told or "that generated it" in told
    assert shards(folder) == before


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_damaged_shard_is_refused_by_name(damage: str, tmp_path: Path):
    write(tmp_path)
    DAMAGES[damage](tmp_path / "shard-00001.parquet")
    with pytest.raises(InputError, match=r"shard-00001\.parquet is damaged or missing"):
        read_text(tmp_path, 10)


def test_damaged_journal_is_refused(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, Pen(stop_after=4))
    flip(next(tmp_path.glob("open-*")))
    with pytest.raises(InputError, match=r"open-00000\.jsonl is damaged"):
        write(tmp_path)


def test_text_has_one_writer_and_many_readers(
    tmp_path: Path,
):
    first = write_text(job(tmp_path), lambda _: Pen())
    next(first)
    with pytest.raises(InputError, match="one process at a time may write"):
        write(tmp_path)
    assert write(tmp_path, rank=1, world_size=2)[-1] == 4
    first.close()
    assert not list(tmp_path.glob(".lock*"))
    write(tmp_path)
    with sole_writer(tmp_path, ".lock-0"):
        assert write(tmp_path) == []


def test_scratch_files_are_removed_by_their_own_process(tmp_path: Path):
    (tmp_path / ".shard-00000.parquet.0123abcd").touch()
    (tmp_path / ".shard-00001.parquet.0123abcd").touch()
    (tmp_path / ".fingerprint.json.0123abcd").touch()
    write(tmp_path, world_size=2)
    assert [file.name for file in tmp_path.glob(".*")] == [".shard-00001.parquet.0123abcd"]


def test_claim_of_another_process_is_not_removed(tmp_path: Path):
    scratch = tmp_path / ".fingerprint.json.0123abcd"
    first = Thread(target=write, args=(tmp_path,), kwargs={"world_size": 2})
    with sole_writer(tmp_path, CLAIM_LOCK):
        scratch.touch()
        first.start()
        first.join(timeout=1)
        assert scratch.exists()
        assert first.is_alive()
    first.join()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": {"base": "c"}},
        {"seed": 1},
        {"settings": replace(SETTINGS, new_tokens=5)},
        {"settings": replace(SETTINGS, shard_size=5)},
        {"settings": replace(SETTINGS, drop=["loop"])},
        {"identity": {"base": "b", "documents": "d"}},
    ],
    ids=["base", "seed", "new_tokens", "shard_size", "drop", "documents"],
)
def test_text_of_other_settings_is_refused_by_name(
    changes: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
):
    write(tmp_path)
    name = request.node.callspec.id
    with pytest.raises(InputError, match=f"that generated it: .* was generated with {name} "):
        write(tmp_path, **changes)


def test_speed_settings_do_not_change_the_claim(tmp_path: Path):
    write(tmp_path)
    other = replace(SETTINGS, batch_size=1, engine="vllm", folder="there", use_head="true")
    assert write(tmp_path, settings=other) == []


@pytest.mark.parametrize("name", ["progress-0.json", "shard-0-00000.parquet"])
def test_text_of_an_earlier_version_is_refused(name: str, tmp_path: Path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="an earlier version; remove it or choose another folder"):
        write(tmp_path)


def test_incomplete_text_is_refused(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, Pen(stop_after=12))
    with pytest.raises(InputError, match="lacks some of 10 texts"):
        read_text(tmp_path, 10)


def test_conversation_ends_at_the_context_limit(tmp_path: Path):
    class Long(Talks):
        def first(self, number: int) -> list[int]:
            return [number % 50] * (number * 20) + [number, 0]

    # the context has 128 tokens: number 6 has space for two turns, number 7 for none
    settings = Distill(num_samples=8, new_tokens=6, shard_size=8, drop=[])
    write(tmp_path, pen := Pen(), prompts=Long(), settings=settings)
    found = rows(tmp_path)
    assert [row["number"] for row in found] == list(range(7))
    assert {ask.new_tokens for ask in pen.asked} == {6}
    assert max(len(row["tokens"]) for row in found) <= 128


def test_faulty_answer_ends_the_text_and_is_counted(tmp_path: Path):
    bad = {(0, 0): [END], (1, 1): [5] * 60, (2, 2): [1, 2, 3]}
    settings = replace(SETTINGS, drop=["loop", "empty", "truncated"], min_tokens=2)
    write(tmp_path, Pen(faults=bad), settings=settings)
    turns = {row["number"]: row["turns"] for row in rows(tmp_path)}
    assert 0 not in turns
    assert (turns[1], turns[2], turns[5]) == (1, 2, 3)
    told = report_of(tmp_path, 10, str)
    assert (told.kept, told.dropped) == (9, {"empty": 1})
    assert told.cut == {"loop": 1, "truncated": 1}
    assert len(told.samples) == 5
    assert sum(count for _, _, count in told.lengths) == 9


def test_fully_dropped_text_is_refused(tmp_path: Path):
    faults = {(number, 0): [1, 2] for number in range(10)}
    write(tmp_path, Pen(faults=faults), settings=replace(SETTINGS, drop=["truncated"]))
    with pytest.raises(InputError, match=r"all 10 texts in .* were dropped"):
        read_text(tmp_path, 10)


def test_template_that_changes_earlier_turns_gives_several_pieces(
    tmp_path: Path,
):
    class Forgetful(Talks):
        def following(
            self, number: int, tokens: list[int], answers: list[list[int]]
        ) -> list[int] | None:
            del tokens
            return [9, 9, number, len(answers)] if len(answers) < 2 else None

    settings = replace(SETTINGS, num_samples=1)
    write(tmp_path, prompts=Forgetful(), settings=settings)
    first, second = rows(tmp_path)
    assert (first["turns"], second["turns"]) == (1, 1)
    assert second["tokens"][:4] == [9, 9, 0, 1]
    assert second["counted"] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_answers_are_stored_at_once(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, Pen(stop_after=2))
    lines = [line for file in tmp_path.glob("open-*") for line in file.read_text().splitlines()]
    assert len([json.loads(line) for line in lines]) == 2
