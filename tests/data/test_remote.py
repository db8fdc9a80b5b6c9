"""Text in object stores: fsspec's in memory, moto's S3 and an emulator of Google's."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
from fsspec.config import conf

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data.remote import local_copy, output_folder
from specheads.data.sources import open_source, read_source
from tests.servers import free_port, served

SERVERS: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "s3": (
        ["-m", "moto.server", "-p", "PORT"],
        "/moto-api/",
        {
            "AWS_ENDPOINT_URL": "URL", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
        },
    ),
    "gs": (
        [
            *("-c", "from gcp_storage_emulator.__main__ import main; main()"),
            *("start", "--port=PORT", "--in-memory", "--default-bucket=bucket"),
        ],
        "/storage/v1/b/bucket",
        # gcsfs would look for the kind of the bucket by gRPC
        {"STORAGE_EMULATOR_HOST": "URL", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"},
    ),
}  # fmt: skip
"""Arguments of Python, a path that answers, and the environment of a client."""


@pytest.fixture(
    params=["memory", *(pytest.param(name, marks=pytest.mark.object_store) for name in SERVERS)],
    scope="module",
)
def store(request: Any, tmp_path_factory: Any) -> Iterator[str]:
    """Return the address of an empty bucket."""
    if request.param == "memory":
        yield "memory://bucket"
        fsspec.filesystem("memory").store.clear()
        return
    words, path, variables = SERVERS[request.param]
    url = f"http://127.0.0.1:{free_port()}"
    port = url.rpartition(":")[2]
    command = [sys.executable, *(word.replace("PORT", port) for word in words)]
    log = tmp_path_factory.mktemp("store") / "log"
    with pytest.MonkeyPatch.context() as patch, served(command, f"{url}{path}", log):
        for name, value in variables.items():
            patch.setenv(name, value.replace("URL", url))
        patch.setitem(conf, "gs", {"token": "anon"})
        if request.param == "s3":
            fsspec.filesystem("s3").mkdir("bucket")
        yield f"{request.param}://bucket"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(address: str, *texts: str) -> None:
    with cast(Any, fsspec.open(address, "w")) as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts))


def texts(path: str, **changes: Any) -> list[str]:
    settings = DataSettings(source="jsonl", path=path, **changes)
    return [document["text"] for _, _, document in read_source(settings)]


def test_file_folder_and_glob_of_a_store_are_read(store: str):
    put(f"{store}/read/a.jsonl", "one", "two")
    put(f"{store}/read/inner/b.jsonl", "three")
    put(f"{store}/read/notes.txt", "no")
    assert texts(f"{store}/read/a.jsonl") == ["one", "two"]
    assert texts(f"{store}/read") == ["one", "two", "three"]
    assert texts(f"{store}/read", patterns=["inner/*"]) == ["three"]
    assert texts(f"{store}/read/inner/*.jsonl") == ["three"]


def test_source_is_copied_once_and_again_when_it_changes(store: str, cache: Path):
    settings = DataSettings(source="jsonl", path=f"{store}/changed/a.jsonl")
    put(settings.path, "one")
    first = open_source(settings).identity(0)
    copies = set((cache / "stores").glob("*/*"))
    assert texts(settings.path) == ["one"]
    assert set((cache / "stores").glob("*/*")) == copies
    put(settings.path, "another")
    assert texts(settings.path) == ["another"]
    assert open_source(settings).identity(0) != first


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("memory://none/a.jsonl", "got 'memory://none/a.jsonl': no such file is there; check it"),
        ("nothing://bucket/a", "got 'nothing://bucket/a': Protocol not known: nothing; check"),
    ],
)
def test_address_that_cannot_be_read_is_one_line(path: str, line: str):
    with pytest.raises(InputError, match=line):
        local_copy(path)


def test_output_is_uploaded_while_it_is_written_and_resumes_elsewhere(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = f"{store}/out"
    with output_folder(address, True) as (folder, upload):
        (folder / "block-0.parquet").write_bytes(b"first")
        (folder / ".lock-0").write_bytes(b"")
        upload()
        assert fsspec.filesystem(store.partition(":")[0]).find(address)
        (folder / "report.md").write_text("report")
    # another machine
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "elsewhere"))
    with output_folder(address, True) as (folder, upload):
        assert sorted(file.name for file in folder.iterdir()) == ["block-0.parquet", "report.md"]
        assert (folder / "block-0.parquet").read_bytes() == b"first"
