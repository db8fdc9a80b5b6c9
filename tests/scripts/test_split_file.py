"""Files in pieces: a joined file equals the one that was split, or the old one stays."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "split_file.sh"
CONTENT = bytes(range(256)) * 10

pytestmark = pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs GNU coreutils")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """Return a folder with a file of 2,560 bytes in pieces of 1,000."""
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    assert run("split", tmp_path / "model.gguf", "1KB", tmp_path / "pieces").returncode == 0
    return tmp_path / "pieces"


def test_joined_pieces_equal_the_file(pieces: Path, tmp_path: Path):
    sizes = [path.stat().st_size for path in sorted(pieces.glob("*.piece"))]
    assert sizes == [1000, 1000, 560]
    joined = tmp_path / "new" / "model.gguf"
    assert run("join", pieces, joined).returncode == 0
    assert joined.read_bytes() == CONTENT
    assert [path.name for path in joined.parent.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "001.piece").unlink(),
        lambda folder: (folder / "000.piece").write_bytes(bytes(1000)),
        lambda folder: (folder / "SHA256SUMS").unlink(),
    ],
    ids=["missing", "changed", "no sums"],
)
def test_damaged_pieces_leave_the_old_file(
    pieces: Path, tmp_path: Path, damage: Callable[[Path], object]
):
    damage(pieces)
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    out.write_text("old")
    ended = run("join", pieces, out)
    assert ended.returncode == 2
    assert "split_file.sh: " in ended.stderr.splitlines()[-1]
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]
