"""Features from servers: the losses of a local base, refusals at the start, and failing servers."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specheads.base.ends import BaseEnds, ServedBase
from specheads.base.model import FrozenBase
from specheads.config.training import FeatureSettings, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training import feature_server, log
from specheads.training.feature_server import VllmServer
from specheads.training.features import FeatureSource, server_layers
from specheads.training.log import ValidationSet, validate
from tests import tiny
from tests.packed import packed, texts
from tests.slow import each_kind, slow_except
from tests.training.states_server import StatesServer
from tests.training.test_trainer import assert_equal, last_step, phase, run_training

MAX_ROW_TOKENS = 40
HELD_OUT = ValidationSet([packed(texts(50))], every=3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[FrozenBase, ServedBase]:
    """The same base, whole and without its layers."""
    folder = tiny.saved(tmp_path_factory.mktemp("base"))
    base = FrozenBase.load(folder, dtype="float32", device="cpu")
    return base, ServedBase.load(folder, dtype="float32", device="cpu")


class Packs:
    """Packed documents, other ones in each batch."""

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        number = cursor["number"] if cursor else 0
        while True:
            number += 1
            yield packed(texts(number)), {"number": number}


def head_of(kind: str, base: BaseEnds) -> Head:
    torch.manual_seed(0)
    return build_for_base({"kind": kind, "depth": 2}, base)


@pytest.fixture
def server(bases: tuple[FrozenBase, ServedBase], tmp_path: Path) -> Iterator[StatesServer]:
    """A server for heads that read the last state only."""
    server = StatesServer(bases[0], tmp_path / "states", [0, 3])
    yield server
    server.stop()


def source(
    server: StatesServer,
    ends: ServedBase,
    kind: str = "redrafter",
    announce: Any = print,
    **changes: Any,
) -> VllmServer:
    defaults = {"url": [server.url], "folder": str(server.folder), "max_gib": 0.01}
    settings = FeatureSettings(source="vllm", **defaults | changes)
    return VllmServer(settings, ends, head_of(kind, ends), MAX_ROW_TOKENS, announce)


def trained(
    folder: Path,
    base: BaseEnds,
    features: FeatureSource | None,
    kind: str = "redrafter",
    held_out: ValidationSet | None = None,
    steps: int = 6,
) -> Head:
    if features:
        run = RunDirectory(folder)
        if not run.provenance.is_file():
            run.begin("name: test\n", {})
        features.begin(run, 0)
    schedule = Schedule(phases={"corpus": phase(steps=steps, accumulation_steps=2)})
    return run_training(
        folder, schedule, kind=kind, base=base, text=Packs(), held_out=held_out, source=features,
        log_every=1,
    )  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("kind", each_kind())
def test_losses_equal_those_of_a_local_base(kind: str, bases: Any, tmp_path: Path):
    base, ends = bases
    head = head_of(kind, ends)
    server = StatesServer(base, tmp_path / "states", server_layers(head, base))
    trained(tmp_path / "local", base, None, kind, HELD_OUT, steps=3)
    with closing(source(server, ends, kind)) as features:
        trained(tmp_path / "vllm", ends, features, kind, HELD_OUT, steps=3)
    server.stop()
    for local, remote in zip(rows(tmp_path / "local"), rows(tmp_path / "vllm"), strict=True):
        for name in local:
            if name.startswith(("loss", "validation/loss", "accept")):
                assert remote[name] == pytest.approx(local[name], rel=1e-4, abs=1e-7), name
        assert 0 <= remote["features_wait_share"] <= 1
        assert not any(name.startswith("features_") for name in local)
        for name in ("read_share", "gb_per_second", "pool_gb"):
            assert remote[f"features_{name}"] > 0
    assert not list(server.folder.iterdir())
    # no request has the padding, or the token after which nothing is predicted
    assert max(map(len, server.requests[1:])) == 21


def having(**changes: Any) -> Callable[[StatesServer], Any]:
    """Return a function that changes attributes of a server."""
    return lambda server: vars(server).update(changes)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shifted": (
        having(change=lambda states: states.roll(1, 0)),
        "belong to other positions; start it",
    ),
    "fewer layers": (having(layers=[3]), r"layers \[0, 3\] in .* gives \[3\] in"),
    "other layers": (having(layers=[0, 2]), r"but .* gives \[0, 2\] in states"),
    "other layers without ids": (
        having(layers=[0, 2], layer_ids=False),
        r"writes \d+, and .* \d+: it runs other weights, or its last layer is not 3; start it",
    ),
    "short context": (having(context=20), "has a context of 20; lower sequence_length, or start"),
    "long prompt": (having(context=9), r"the prompt is too long.*; start it"),
    "width": (having(change=lambda states: states[..., :16]), r"\(16, 2, 32\) .* of \(16, 2, 16\)"),
    "stopped": (StatesServer.stop, r"must be ready, but http.* failed \(.*refused.*\); start it"),
    "failing": (having(faults=["status_500"]), r"failed .*EngineDeadError"),
    "other transport": (
        having(place="handle", faults=["absent"]),
        r"must send its states by features\.transport=folder, but .* wrote none; start it",
    ),
    "full disk": (having(faults=["cut"]), r"is not whole in .* has [\d.]+ GiB free"),
    "other folder": (
        lambda server: having(folder=server.folder / "other")(server),
        r"is not whole in features\.folder=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_server_is_refused_in_one_line(case: str, server: Any, bases: Any):
    folder = str(server.folder)
    REFUSED[case][0](server)
    with pytest.raises(InputError, match=REFUSED[case][1]) as refused:
        source(server, bases[1], folder=folder)
    assert "\n" not in str(refused.value)
    unread = ("other folder", "other transport")
    assert case in unread or not list(server.folder.rglob("*.safetensors*"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"url": []}, r"needs the servers and their folder, got features.url=\[\]"),
        ({"folder": ""}, "and features.folder=''; set both as"),
        ({"url": ["ftp://here"]}, "url must begin with http:// or https://"),
        ({"max_gib": 1e-6}, "must hold the states of a row of 40 tokens"),
        ({"folder": "README.md/states"}, "a folder to write to is needed"),
    ],
)
def test_unusable_settings_are_refused(changes: Any, line: str, server: Any, bases: Any):
    with pytest.raises(InputError, match=line):
        source(server, bases[1], **changes)


@pytest.mark.parametrize("free_bytes", [0, 1, 64])
def test_folder_without_room_names_the_container_s_option(
    free_bytes: int, server: Any, bases: Any, monkeypatch: pytest.MonkeyPatch
):
    # docker gives /dev/shm 64 MB
    usage = SimpleNamespace(free=free_bytes)
    monkeypatch.setattr("specheads.training.transport.shutil.disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"have space for a row of 40 tokens.*docker --shm-size"):
        source(server, bases[1])
    assert not server.folder.exists() or not any(server.folder.iterdir())


def test_server_with_another_embedding_is_refused(server: Any, bases: Any):
    server.base = tiny.base("qwen3", dtype=torch.float32, vocab_size=bases[0].vocab_size)
    with pytest.raises(InputError, match=r"embedding of the same token .* but http://127"):
        source(server, bases[1])


def test_key_is_sent_and_never_shown(server: Any, bases: Any, monkeypatch: Any):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.faults = ["status_401"]
    line = r"failed .*Bearer \*\*\*.*; set the environment variable OPENAI_API_KEY"
    with pytest.raises(InputError, match=line) as refused:
        source(server, bases[1])
    assert "secret" not in str(refused.value)


@pytest.fixture(scope="module")
def plain(bases: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the tensors of a run without faults."""
    folder = tmp_path_factory.mktemp("plain")
    server = StatesServer(bases[0], folder / "states", [0, 3])
    with closing(source(server, bases[1])) as features:
        head = trained(folder / "run", bases[1], features, held_out=HELD_OUT)
    server.stop()
    return folder / "run", head.state_dict()


def assert_plain(plain: tuple[Path, dict[str, Any]], head: Head, server: StatesServer) -> None:
    """Require the head of a run without faults, and no file left."""
    assert_equal(plain[1], head.state_dict())
    assert not list(server.folder.iterdir())


FAULTS = ("status_500", "absent", "cut", "dropped", "stalled", "late", "removed")


@pytest.mark.parametrize("fault", slow_except(["status_500", "cut"], FAULTS))
def test_failed_requests_are_repeated(
    fault: str, server: Any, bases: Any, plain: Any, tmp_path: Path
):
    lines: list[str] = []
    changes: dict[str, Any] = {"timeout_seconds": 1.0} if fault == "stalled" else {}
    with closing(source(server, bases[1], announce=lines.append, **changes)) as features:
        server.faults += [""] * 9 + [fault] * 2 + [""] * 12 + [fault]
        head = trained(tmp_path / "run", bases[1], features)
    assert not server.faults
    assert_plain(plain, head, server)
    assert bool(lines) == (fault != "late")
    waits = [line for line in lines if line.endswith("; asking again for up to 900 seconds")]
    answers = [line for line in lines if line == f"{server.url} answers again"]
    assert len(waits) + len(answers) == len(lines)
    assert len(waits) == len(answers)


def test_server_that_is_started_again_is_used_again(
    server: Any, bases: Any, plain: Any, tmp_path: Path
):
    def restart() -> None:
        server.stop()
        server.name = "another"
        Timer(0.5, server.start).start()

    with closing(source(server, bases[1])) as features:
        Timer(0.1, restart).start()
        head = trained(tmp_path / "run", bases[1], features)
    assert server.name == "another"
    assert_plain(plain, head, server)


def leave(server: StatesServer, handler: Any) -> None:
    """Stop a server; until it has stopped it answers nothing, on a busy machine too."""
    handler.close_connection = True
    Timer(0, server.stop).start()


def test_requests_are_spread_and_go_to_the_server_that_is_left(
    server: Any, bases: Any, plain: Any, tmp_path: Path
):
    leaving = StatesServer(bases[0], server.folder, [0, 3])
    answer, urls = leaving.answer, [server.url, leaving.url]

    def answer_and_leave(handler: Any, body: Any) -> None:
        if len(leaving.requests) > 5:
            leave(leaving, handler)
        else:
            answer(handler, body)

    with closing(source(server, bases[1], announce=[].append, url=urls)) as features:
        leaving.answer = answer_and_leave
        head = trained(tmp_path / "run", bases[1], features)
    assert 5 < len(leaving.requests) < 36
    assert len(server.requests) > 2
    assert_plain(plain, head, server)


def test_server_that_joins_later_replaces_the_one_that_leaves(
    server: Any, bases: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(feature_server, "LONGEST_PAUSE_SECONDS", 0.05)
    joining = StatesServer(bases[0], server.folder, [0, 3])
    joining.stop()
    joined, lines = list[bool](), list[str]()
    answer, urls = server.answer, [joining.url, server.url]

    def answer_until_joined(handler: Any, body: Any) -> None:
        if len(server.requests) >= 5 and not joined:
            joined.append(True)
            joining.start()
        if len(joining.requests) >= 3:
            leave(server, handler)
        else:
            answer(handler, body)

    with closing(source(server, bases[1], announce=lines.append, url=urls)) as features:
        assert len(lines) == 1
        assert re.fullmatch(rf"{joining.url} failed \(.+\); it is used as soon as .*", lines[0])
        server.answer = answer_until_joined
        head = trained(tmp_path / "run", bases[1], features)
    assert f"{joining.url} answers" in lines
    assert len(joining.requests) > 10
    assert 5 < len(server.requests) < 36
    joining.stop()
    assert_plain(plain, head, server)


LOST: dict[str, tuple[dict[str, Any], type[BaseException], str]] = {
    "layers": ({"layers": [0, 2]}, InputError, r"but .* gives \[0, 2\] in states"),
    # the norm of the last state hides the factor
    "weights": (
        {"change": lambda states: states * torch.tensor([1.0, 1.2])[:, None]},
        InputError,
        "must have the weights and layers of the start of this run, but .* gives other states",
    ),
    "gone": ({}, InputError, "patience_seconds=1, but .* run the same command to resume"),
    "interrupted": ({}, KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_server_saves_the_run_which_resumes_bit_for_bit(
    case: str, server: Any, bases: Any, plain: Any, tmp_path: Path, monkeypatch: Any
):
    """After 30 requests the server changes, and has failed once, or fails for ever."""
    _, ends = bases
    run, (changes, error, line) = RunDirectory(tmp_path / "run"), LOST[case]
    answer, failures = server.answer, []

    def answer_changed(handler: Any, body: Any) -> None:
        if len(server.requests) >= 30:
            vars(server).update(changes)
            if case == "interrupted" and not failures:
                os.kill(os.getpid(), signal.SIGINT)
            if not (changes and failures):
                server.faults = ["status_500"] * (1 if changes else 99)
            failures.append(True)
        answer(handler, body)

    patience = 1.0 if case == "gone" else 900.0
    with closing(source(server, ends, patience_seconds=patience)) as features:
        monkeypatch.setattr(server, "answer", answer_changed)
        with pytest.raises(error, match=line):
            trained(run.path, ends, features)
    monkeypatch.undo()
    assert 0 < last_step(run) < 6
    server.layers, server.change, server.faults = [0, 3], lambda states: states, []
    with closing(source(server, ends)) as features:
        head = trained(run.path, ends, features)
    assert_plain(plain, head, server)


@pytest.mark.parametrize(
    ("case", "lost_step"),
    [
        pytest.param("gone", 3, id="gone in a phase"),
        pytest.param("gone", 6, id="gone at its end", marks=pytest.mark.slow),
        pytest.param("interrupted", 3, id="interrupted in a phase", marks=pytest.mark.slow),
        pytest.param("interrupted", 6, id="interrupted at its end", marks=pytest.mark.slow),
    ],
)
def test_server_that_is_lost_in_a_validation_costs_one_step(
    case: str, lost_step: int, server: Any, bases: Any, plain: Any, tmp_path: Path, monkeypatch: Any
):
    _, ends = bases
    run, (_, error, line) = RunDirectory(tmp_path / "run"), LOST[case]

    def validate_without_server(*values: Any) -> Any:
        if not last_step(run) < lost_step - 1:
            server.faults = ["status_500"] * 99
            if case == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
        return validate(*values)

    patience = 1.0 if case == "gone" else 900.0
    with closing(source(server, ends, patience_seconds=patience)) as features:
        monkeypatch.setattr(log, "validate", validate_without_server)
        with pytest.raises(error, match=line):
            trained(run.path, ends, features, held_out=HELD_OUT)
    monkeypatch.undo()
    server.faults = []
    assert last_step(run) == lost_step - 1
    with closing(source(server, ends)) as features:
        head = trained(run.path, ends, features, held_out=HELD_OUT)
    assert_plain(plain, head, server)
    expected_losses, losses = (
        [(row["step"], row["validation/loss"]) for row in rows(folder) if "validation/loss" in row]
        for folder in (plain[0], run.path)
    )
    assert losses == expected_losses


def test_runs_share_a_folder_and_sweep_only_their_own_files(
    server: Any, bases: Any, tmp_path: Path
):
    _, ends = bases
    runs = [RunDirectory(tmp_path / name) for name in ("first", "second")]
    with closing(source(server, ends)) as first, closing(source(server, ends)) as second:
        for run, features in zip(runs, (first, second), strict=True):
            run.begin("name: test\n", {})
            features.begin(run, 0)
        first_file, second_file = (
            server.folder / f"cmpl-{features.name}-0123456789ab-0-xyz.safetensors"
            for features in (first, second)
        )
        for file in (first_file, second_file):
            file.write_bytes(b"")
            Path(f"{file}.lock").write_bytes(b"")
        first.begin(runs[0], 0)
        assert not first_file.exists()
        assert second_file.exists()
        second.begin(runs[1], 1)
        assert second_file.exists(), "another process of the run"
    assert sorted(file.name for file in server.folder.iterdir()) == [
        second_file.name, f"{second_file.name}.lock"
    ]  # fmt: skip


def test_files_in_flight_are_bounded(server: Any, bases: Any, tmp_path: Path):
    _, ends = bases
    max_bytes = MAX_ROW_TOKENS * (2 * ends.width * 4 + 8)
    sizes: list[int] = []
    unchanged = server.change

    def change(states: torch.Tensor) -> torch.Tensor:
        sizes.append(sum(file.stat().st_size for file in server.folder.glob("*.safetensors")))
        return unchanged(states)

    server.change = change
    with closing(source(server, ends, max_gib=1.01 * max_bytes / 2**30)) as features:
        trained(tmp_path / "run", ends, features)
    assert len(sizes) > 30
    assert max(sizes) <= max_bytes
