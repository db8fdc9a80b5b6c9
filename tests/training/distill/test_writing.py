"""Self-distilled text does not depend on processes and stops."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig

from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.core.files import sole_writer
from specheads.training.distill.engines import GeneratedAnswer
from specheads.training.distill.run import find_fault, write_texts
from specheads.training.distill.shards import read_shards, read_text, report_of
from tests import tiny
from tests.training.distill.fake_engine import (
    END,
    SETTINGS,
    FakeChats,
    FakeEngine,
    job,
    rows,
    shards,
    write,
)

ALL = ("loop", "empty", "truncated")
NUM_ANSWERS = sum(number % 3 + 1 for number in range(10))


def test_turns_follow_the_bases_answers_which_alone_count(tmp_path: Path):
    write(tmp_path)
    text_rows = rows(tmp_path)
    assert [row["number"] for row in text_rows] == list(range(10))
    assert [row["turns"] for row in text_rows] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    #  asked 1 0, answered 1 0 s END, asked 1 1, answered 1 1 t END
    tokens = text_rows[1]["tokens"]
    assert tokens[:4] + tokens[6:9] == [1, 0, 1, 0, 1, 1, 1]
    assert text_rows[1]["loss_mask"] == [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert tokens[4] != tokens[10], "each turn has a seed of its own"


def test_shards_do_not_depend_on_the_order_of_answers(tmp_path: Path):
    for seed in range(5):
        write(tmp_path / str(seed), FakeEngine(seed))
    assert sorted(shards(tmp_path / "0")) == [f"shard-0000{block}.parquet" for block in range(3)]
    assert all(shards(tmp_path / str(seed)) == shards(tmp_path / "0") for seed in range(5))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_text_does_not_depend_on_processes(world_size: int, tmp_path: Path):
    write(tmp_path / "alone")
    for rank in range(world_size):
        write(tmp_path / "shared", FakeEngine(rank), rank=rank, world_size=world_size)
    assert shards(tmp_path / "shared") == shards(tmp_path / "alone")


@pytest.mark.parametrize("answers", range(NUM_ANSWERS))
def test_stop_loses_only_incomplete_blocks(answers: int, tmp_path: Path):
    write(tmp_path / "complete")
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        write(folder, FakeEngine(1, stop_after=answers))
    before = shards(folder)
    engine = FakeEngine(2)
    write(folder, engine)
    complete = {f"shard-{request.number // 4:05d}.parquet" for request in engine.requests}
    assert complete.isdisjoint(before)
    assert len(complete) == 3 - len(before)
    assert shards(folder) == shards(tmp_path / "complete")
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("answers", [0, 3, 99])
def test_raised_num_samples_keeps_complete_blocks(answers: int, tmp_path: Path):
    settings, folder = replace(SETTINGS, num_samples=15), tmp_path / "grown"
    write(tmp_path / "complete", settings=settings)
    write(folder)
    if answers < 99:
        with pytest.raises(KeyboardInterrupt):
            write(folder, FakeEngine(stop_after=answers), settings=settings)
        assert len(read_text(folder, 10)) == 10
    write(folder, engine := FakeEngine(), settings=settings)
    assert {request.number for request in engine.requests} <= set(range(8, 15))
    assert shards(folder) == shards(tmp_path / "complete")
    assert write(folder) == []
    assert len(read_text(folder, 10)) == 10


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


@pytest.mark.parametrize("name", ["shard-00001.parquet", "fingerprint.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_text_is_refused_or_repaired(name: str, damage: str, tmp_path: Path):
    write(tmp_path)
    before = rows(tmp_path)
    DAMAGES[damage](tmp_path / name)
    try:
        write(tmp_path)
        read_text(tmp_path, 10)
    except InputError as error:
        message = str(error)
        assert f"{name} is damaged; remove" in message or "that generated it" in message
        (tmp_path / name).unlink()
        write(tmp_path)
    assert rows(tmp_path) == before
    assert len(read_text(tmp_path, 10)) == 10


def test_a_changed_byte_of_a_shard_is_found_or_harmless(tmp_path: Path):
    write(tmp_path)
    before, file = read_shards(tmp_path, 10), tmp_path / "shard-00001.parquet"
    content = file.read_bytes()
    num_refused = 0
    for index in range(0, len(content), 7):
        file.write_bytes(content[:index] + bytes([content[index] ^ 16]) + content[index + 1 :])
        try:
            assert read_shards(tmp_path, 10).equals(before)
        except InputError:
            num_refused += 1
    assert num_refused > len(content) / 7 / 2


def test_text_has_one_writer_and_many_readers(tmp_path: Path):
    first = write_texts(job(tmp_path), lambda _: FakeEngine().answers)
    next(first)
    with pytest.raises(InputError, match="one process at a time may write"):
        write(tmp_path)
    assert write(tmp_path, rank=1, world_size=2)[-1] == 4
    first.close()
    assert not list(tmp_path.glob(".lock*"))
    write(tmp_path)
    with sole_writer(tmp_path, ".lock-0"):
        assert write(tmp_path) == []


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
def test_text_of_other_settings_is_refused_by_name(changes, tmp_path, request):
    write(tmp_path)
    name = request.node.callspec.id
    with pytest.raises(InputError, match=f"that generated it: .* was generated with {name} "):
        write(tmp_path, **changes)


def test_speed_settings_do_not_change_the_claim(tmp_path: Path):
    write(tmp_path)
    settings = replace(SETTINGS, batch_size=1, engine="vllm", folder="there", use_head=True)
    assert write(tmp_path, settings=settings) == []


def test_incomplete_text_is_refused(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, FakeEngine(stop_after=12))
    with pytest.raises(InputError, match="has 4 of 10 texts"):
        read_text(tmp_path, 10)


def test_conversation_ends_at_the_context_limit(tmp_path: Path):
    class LongPrompts(FakeChats):
        def first_prompt(self, number: int) -> list[int]:
            return [number % 50] * (number * 20) + [number, 0]

    # the context has 128 tokens: number 6 has space for two turns, number 7 for none
    settings = DistillSettings(num_samples=8, new_tokens=6, shard_size=8, drop=[])
    write(tmp_path, engine := FakeEngine(), prompts=LongPrompts(), settings=settings)
    text_rows = rows(tmp_path)
    assert [row["number"] for row in text_rows] == list(range(8))
    assert [row["turns"] for row in text_rows] == [1, 2, 3, 1, 2, 3, 1, 0]
    assert text_rows[7]["fault"] == "context"
    assert {request.new_tokens for request in engine.requests} == {6}
    assert max(len(row["tokens"]) for row in text_rows) <= 128


def test_faulty_answer_ends_the_text_and_is_counted(tmp_path: Path):
    faults = {(0, 0): [], (1, 1): [5] * 60, (2, 2): [1, 2, 3]}
    settings = replace(SETTINGS, drop=["loop", "empty", "truncated"])
    write(tmp_path, FakeEngine(faults=faults), settings=settings)
    turns = {row["number"]: row["turns"] for row in rows(tmp_path)}
    assert (turns[0], turns[1], turns[2], turns[5]) == (0, 1, 2, 3)
    report = report_of(tmp_path, 10, str)
    assert (report["kept"], report["dropped"]) == (9, {"empty": 1})
    assert report["cut"] == {"loop": 1, "truncated": 1}
    assert len(report["samples"]) == 5
    assert report["lengths"]["0 %"] == 4
    assert report["lengths"]["100 %"] == 12
    assert report["tokens"] == sum(sum(row["loss_mask"]) for row in rows(tmp_path))


class NoQuestions(FakeChats):
    def first_prompt(self, number: int) -> list[int]:
        del number
        return []


class FullPrompts(FakeChats):
    def first_prompt(self, number: int) -> list[int]:
        return [number] * 128


def ending_base() -> FrozenBase:
    """Return the tiny base with an end token."""
    model = copy.deepcopy(tiny.base().model)
    model.generation_config = GenerationConfig(eos_token_id=END)
    return FrozenBase(model)


@pytest.mark.parametrize(
    "name",
    [
        "report.md",
        "shard-00000.parquet",
        "shard-00001.parquet",
        "shard-1.parquet",
        "shard-.parquet",
    ],
)
def test_files_of_others_stay(name: str, tmp_path: Path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"a folder of its own, .* another {name}; choose"):
        write(tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]
    # follow the remedy
    assert write(tmp_path / "another")


LOOP = [*[7, 8, 9] * 20, END]


@pytest.mark.parametrize(
    ("answers", "prompts", "counts", "remedy"),
    [
        ([[1, 2]], FakeChats, "truncated: 10", "raise new_tokens, or set drop=[loop,empty]"),
        ([[60]], FakeChats, "empty: 10", "or set drop=[loop,truncated]"),
        ([[60], [1, 2]], FakeChats, "empty: 5, truncated: 5", "check the base's chat template"),
        ([LOOP], FakeChats, "loop: 10", "or set drop=[empty,truncated]"),
        ([LOOP, [1, 2], LOOP], FakeChats, "loop: 7, truncated: 3", "raise temperature"),
        ([[1, 60]], NoQuestions, "unasked: 10", "give conversations with a user's message"),
        ([[1, 60]], FullPrompts, "context: 10", "give shorter conversations"),
    ],
)
def test_text_without_answers_is_refused_with_a_remedy(answers, prompts, counts, remedy, tmp_path):
    faults = {(number, 0): answers[number % len(answers)] for number in range(10)}
    base = ending_base()
    settings = replace(SETTINGS, drop=[*ALL])
    write(
        tmp_path / "a", FakeEngine(faults=faults), prompts=prompts(), settings=settings, base=base
    )
    with pytest.raises(InputError, match=r"none of 10 in .* was kept") as error:
        read_text(tmp_path / "a", 10)
    assert f"(dropped: {counts}); " in str(error.value)
    assert remedy in str(error.value)
    # follow the remedy, into another folder
    _, is_drop, words = str(error.value).partition("drop=[")
    drop = words.partition("]")[0].split(",") if is_drop else [*ALL]
    settings, engine = replace(SETTINGS, drop=drop), FakeEngine(faults=faults if is_drop else {})
    write(tmp_path / "b", engine, settings=settings, base=base)
    assert len(read_text(tmp_path / "b", 10)) > 0


def test_template_that_changes_earlier_turns_gives_several_pieces(tmp_path: Path):
    class ChangedPrompts(FakeChats):
        def next_prompt(
            self, number: int, tokens: list[int], answers: list[list[int]]
        ) -> list[int] | None:
            del tokens
            return [9, 9, number, len(answers)] if len(answers) < 2 else None

    settings = replace(SETTINGS, num_samples=1)
    write(tmp_path, prompts=ChangedPrompts(), settings=settings)
    first, second = rows(tmp_path)
    assert (first["turns"], second["turns"]) == (1, 1)
    assert second["tokens"][:4] == [9, 9, 0, 1]
    assert second["loss_mask"] == [0, 0, 0, 0, 1, 1, 1, 1]


PARAGRAPH = list(range(100, 160))


@pytest.mark.parametrize(
    ("tokens", "finish", "fault"),
    [
        ([7, 8, 9, 2], "eos", ""),
        ([2], "eos", "empty"),
        ([], "eos", "empty"),
        ([0, 0, 2], "eos", "empty"),
        ([7, 8, 9], "length", "truncated"),
        ([1, 5, *[7, 8, 9] * 20], "length", "loop"),
        ([*[7, 8, 9] * 20, 2], "eos", "loop"),
        ([*PARAGRAPH * 2, 2], "eos", ""),
        ([*PARAGRAPH * 4, 2], "eos", "loop"),
        ([*[7] * 30, 2], "eos", ""),
    ],
)
def test_faults_are_found_whatever_ended_the_answer(tokens, finish, fault):
    def decode(ids: list[int]) -> str:
        return "".join(" " if token == 0 else "x" for token in ids)

    assert find_fault(GeneratedAnswer(0, tokens, finish), ALL, (2,), decode) == fault
    assert find_fault(GeneratedAnswer(0, tokens, finish), (), (2,), decode) == ""
