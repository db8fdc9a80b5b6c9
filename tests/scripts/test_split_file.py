"""Files in pieces: a joined file equals the one that was split, or the old one stays."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scripts.loading import load_script

CONTENT = bytes(range(256)) * 10


@pytest.fixture
def pieces(script: ModuleType, tmp_path: Path) -> Path:
    """Return a folder with a file of 2,560 bytes in pieces of 1,000."""
    file = tmp_path / "model.gguf"
    file.write_bytes(CONTENT)
    assert script.main(["split", str(file), "--size", "1K", "--out", str(tmp_path / "pieces")]) == 0
    return tmp_path / "pieces"


def test_joined_pieces_equal_the_file(
    script: ModuleType, pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sizes = [path.stat().st_size for path in sorted(pieces.glob("*.piece"))]
    assert sizes == [1000, 1000, 560]
    joined = tmp_path / "new" / "model.gguf"
    assert script.main(["join", str(pieces), "--out", str(joined)]) == 0
    assert joined.read_bytes() == CONTENT
    assert [path.name for path in joined.parent.iterdir()] == ["model.gguf"]
    assert "2,560 bytes from 3 pieces" in capsys.readouterr().out


@given(content=st.binary(max_size=40), size=st.integers(1, 45), buffer=st.integers(1, 50))
def test_every_content_and_size_survives_a_split_and_join(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, size: int, buffer: int
):
    script = load_script("split_file")
    script.__dict__["BUFFER_BYTES"] = buffer
    folder = tmp_path_factory.mktemp("split")
    (folder / "file").write_bytes(content)
    script.split(folder / "file", str(size), folder / "pieces")
    assert len(list((folder / "pieces").glob("*.piece"))) == -(-len(content) // size)
    script.join(folder / "pieces", folder / "joined")
    assert (folder / "joined").read_bytes() == content


def refused(script: ModuleType, capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return the one line that a command prints when it fails with exit code 2."""
    capsys.readouterr()
    assert script.main([str(word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def change(folder: Path, **values: Any) -> None:
    """Change values of a manifest."""
    path = folder / "pieces.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "001.piece").unlink(), "001.piece must have 1,000 bytes"),
        (lambda folder: (folder / "002.piece").write_bytes(b"short"), "it has 5 bytes"),
        (lambda folder: (folder / "000.piece").write_bytes(bytes(1000)), "the SHA-256"),
        (lambda folder: change(folder, bytes=10**30), "002.piece must have 1,000 bytes"),
        (lambda folder: (folder / "pieces.json").unlink(), "must hold pieces.json"),
        (lambda folder: (folder / "pieces.json").write_text("[" * 9999), "split it again"),
        (lambda folder: (folder / "pieces.json").write_text("[]"), "split it again"),
    ],
)
def test_damaged_pieces_leave_the_old_file(
    script: ModuleType,
    pieces: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Any,
    expected: str,
):
    damage(pieces)
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    out.write_text("old")
    assert expected in refused(script, capsys, "join", pieces, "--out", out)
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    "changed", [{"bytes": -1}, {"bytes": True}, {"piece_bytes": 0}, {"sha256": 5}]
)
def test_an_invalid_manifest_is_refused(
    script: ModuleType,
    pieces: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
):
    change(pieces, **changed)
    line = refused(script, capsys, "join", pieces, "--out", tmp_path / "out")
    assert "must have bytes, piece_bytes and sha256" in line
    assert not (tmp_path / "out").exists()


def test_join_into_a_folder_is_refused(
    script: ModuleType, pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert "--out must be a file" in refused(script, capsys, "join", pieces, "--out", tmp_path)


@pytest.mark.parametrize("size", ["0", "0M", "-1", "4.5M", "45m", "45MB", "", "٤"])
def test_an_invalid_size_is_refused_before_anything_is_written(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
):
    (tmp_path / "file").write_bytes(CONTENT)
    out = tmp_path / "pieces"
    line = refused(script, capsys, "split", tmp_path / "file", f"--size={size}", "--out", out)
    assert "--size must be a positive number" in line
    assert not out.exists()


def test_split_into_a_folder_with_files_is_refused(
    script: ModuleType, pieces: Path, capsys: pytest.CaptureFixture[str]
):
    file = pieces.parent / "model.gguf"
    line = refused(script, capsys, "split", file, "--size", "1K", "--out", pieces)
    assert "--out must be a new or empty folder" in line


def test_split_of_a_missing_file_is_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, out = tmp_path / "missing", tmp_path / "pieces"
    line = refused(script, capsys, "split", file, "--size", "1K", "--out", out)
    assert "FILE must be an existing file" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "expected"), [("7", 7), ("45M", 45_000_000), ("45Mi", 47_185_920), ("2Gi", 2**31)]
)
def test_units_of_a_size(script: ModuleType, text: str, expected: int):
    assert script.parse_size(text) == expected
