"""Commands in poor surroundings: no home, no UTF-8, no space, a proxy, an application's Hydra."""

import errno
import io
import os
import pwd
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.version import getbase
from openai import DefaultHttpxClient

from specheads.commands._call import call
from specheads.config import compose, data_dir
from specheads.core.errors import InputError
from specheads.training.distill.openai import http_client, proxy_note

COMMANDS = sorted(compose.SCHEMAS)
NEEDS_HOME = {
    "train": ["recipe=smoke", "data=files", "data.path=~/texts"],
    "distill": ["recipe=smoke", "out=~/text"],
    "evaluate": ["run=~/run"],
    "compare": ["run=~/run"],
    "tune": ["run=~/run"],
    "chat": ["run=~/run"],
    "export": ["run=~/run", "engine=vllm", "out=~/served"],
    "push": ["run=~/run", "repo=ada/head"],
    "simulate": ["run=~/run"],
    "serve-features": ["recipe=smoke", "features.folder=~/states"],
}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_without_a_home_names_the_variable(
    command: str, monkeypatch: pytest.MonkeyPatch, refusal: Any
):
    def no_entry(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert "HOME" in refusal(command, *NEEDS_HOME[command])


@pytest.mark.parametrize("encoding", ["cp437", "koi8-r", "iso8859-7", "shift_jis", "utf-16"])
@pytest.mark.parametrize("text", ["⟦answer⟧", "é ü ñ", "\udce9"])
def test_output_of_every_encoding_escapes_what_it_cannot_write(
    encoding: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    monkeypatch.setattr("specheads.commands._call.help_text", lambda _: text)
    call("train", ["--help"])
    sys.stdout.flush()
    assert output.getvalue()


def test_application_keeps_its_hydra(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("mine: 7\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        for command in ("chat", "push", "tune", "simulate", "export"):
            assert compose.settings_of(command, []).run == ""
        with pytest.raises(InputError, match="did you mean"):
            compose.settings_of("chat", ["sytem=x"])
        assert hydra.compose("config").mine == 7
        assert str(getbase()) == "1.2"


def test_threads_wait_for_each_other():
    def compose_seed(seed: int) -> int:
        return compose.settings_of("train", ["recipe=smoke", f"seed={seed}"]).seed

    with ThreadPoolExecutor(6) as threads:
        assert [*threads.map(compose_seed, range(6))] == [*range(6)]


@pytest.mark.parametrize(
    ("url", "is_direct"),
    [
        ("http://[::1]:8000/v1", True),
        ("http://127.8.9.10/v1", True),
        ("https://localhost.:8000/v1", True),
        ("http://node.localhost/v1", True),
        ("http://10.0.0.7:8000/v1", False),
        ("https://localhost.example.org/v1", False),
    ],
)
def test_only_this_machine_is_reached_without_a_proxy(
    url: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    assert proxy_note(url) == ""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert http_client(url, DefaultHttpxClient).trust_env is not is_direct
    assert ("ALL_PROXY" in proxy_note(url)) is not is_direct
    monkeypatch.setenv("ALL_PROXY", "gopher://127.0.0.1:9")
    if is_direct:
        http_client(url, DefaultHttpxClient)
    else:
        with pytest.raises(InputError, match="unset ALL_PROXY"):
            http_client(url, DefaultHttpxClient)


@pytest.mark.parametrize("command", ["train", "evaluate", "push", "simulate", "chat"])
@pytest.mark.parametrize("closed", [("stdout",), ("stdout", "stderr")])
def test_command_without_an_output_ends_as_with_one(
    command: str, closed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    call(command, ["--help"])
    with pytest.raises(SystemExit) as left:
        call(command, ["nothing.like.this=1"])
    assert left.value.code == 2
    for name in closed:
        getattr(sys, name).close()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_in_a_removed_folder_says_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Any
):
    folder = tmp_path / "gone"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        folder.rmdir()
        line = refusal(command, *NEEDS_HOME[command])
        patch.chdir(tmp_path)
    assert "change to another one" in line


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.json"), "ulimit -n"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE), "a.json"), "ulimit -n"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG), "model.safetensors"), "-f"),
        (RuntimeError("can't start new thread"), "pids.max"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "smaller base"),
        (RuntimeError("std::bad_alloc"), "smaller base"),
    ],
)
def test_limit_of_the_shell_is_named(
    error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch, refusal: Any
):
    def fail(_: str) -> str:
        raise error

    monkeypatch.setattr("specheads.commands._call.help_text", fail)
    line = refusal("train", "--help")
    assert remedy in line
    assert "its name" not in line


HEAD = str(data_dir("recipes") / "smollm2_long/head")
NEEDS_HUB = {
    "train": ["recipe=smoke"],
    "distill": ["recipe=smoke", "out=text"],
    "evaluate": [f"head={HEAD}", "out=report"],
    "compare": [f"heads=[{HEAD}]", "out=report"],
    "tune": [f"head_path={HEAD}"],
    "chat": [f"head={HEAD}"],
    "export": [f"head={HEAD}", "engine=vllm", "out=served"],
    "serve-features": ["recipe=smoke", "features.folder=states"],
}


@pytest.mark.parametrize("command", NEEDS_HUB)
def test_command_without_a_network_names_the_variable(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Any
):
    # all tests run with HF_HUB_OFFLINE=1
    monkeypatch.chdir(tmp_path)
    line = refusal(command, *NEEDS_HUB[command], "base=ada/base")
    assert "ada/base" in line
    assert "unset HF_HUB_OFFLINE" in line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["preview=1"]),
        ("train", []),
        ("train", ["dry_run=true", "schedule.phases.corpus.batch_size=auto"]),
        ("distill", ["out=text"]),
        ("distill", ["preview=1"]),
    ],
)
def test_cache_without_write_rights_names_its_variable(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Any
):
    def locked(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specheads.core.files.FileLock.acquire", locked)
    line = refusal(command, "recipe=smoke", "base=tiny_code", *words)
    assert str(tmp_path / "cache") in line
    assert "set SPECHEADS_CACHE" in line


WRITES = {
    "train": ["recipe=smoke", "run_dir={folder}/run"],
    "distill": ["recipe=smoke", "out={folder}/text"],
    "evaluate": [f"head={HEAD}", "base=tiny_code", "out={folder}/report"],
    "compare": [f"heads=[{HEAD}]", "base=tiny_code", "out={folder}/report"],
    "export": [f"head={HEAD}", "base=tiny_code", "engine=vllm", "out={folder}/served"],
}


@pytest.mark.parametrize("command", WRITES)
def test_command_without_write_rights_names_the_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Any
):
    folder, access, mkdir = tmp_path / "locked", os.access, os.mkdir
    folder.mkdir()

    def locked_access(path: Any, mode: int) -> bool:
        return access(path, mode) and not (mode & os.W_OK and folder.samefile(path))

    def locked_mkdir(path: Any, mode: int = 0o777) -> None:
        if folder in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, mode)

    # the rights of root, who may run this test, do not depend on the folder's mode
    monkeypatch.setattr(os, "access", locked_access)
    monkeypatch.setattr(os, "mkdir", locked_mkdir)
    line = refusal(command, *(word.format(folder=folder) for word in WRITES[command]))
    assert str(folder) in line
    assert "writable" in line
    assert not any(folder.iterdir())
