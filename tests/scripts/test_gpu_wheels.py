"""The wheels for a GPU: what pip is asked for, and the limit on their size. pip is replaced."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PIP = """#!/bin/bash
echo "$@" >> "$ASKED"
while [ $# -gt 0 ]; do
    case $1 in
        --dest | --wheel-dir) folder=$2; shift ;;
        *==*) head --bytes "$SIZE" /dev/zero > "$folder/${1/==/-}-py3-none-any.whl" ;;
    esac
    shift
done
"""


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Return the file that lists the calls of pip, which is replaced."""
    pip = tmp_path / "python"
    pip.write_text(PIP)
    pip.chmod(0o755)
    return tmp_path / "asked"


def download(asked: Path, folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    """Run the script with a pip that makes wheels of `size` bytes."""
    replaced = {"PYTHON": str(asked.parent / "python"), "ASKED": str(asked), "SIZE": str(size)}
    return subprocess.run(
        [ROOT / "scripts" / "gpu_wheels.sh", folder],
        env=os.environ | replaced,
        capture_output=True,
        text=True,
    )


def test_pinned_wheels_replace_older_ones(asked: Path, tmp_path: Path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "datasets-1.0-py3-none-any.whl").touch()
    done = download(asked, folder, 1000)
    assert done.returncode == 0, done.stderr
    names = {path.name.removesuffix("-py3-none-any.whl") for path in folder.iterdir()}
    pins = {
        line.replace("==", "-", 1)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names <= pins
    for needed in ("hydra-core", "antlr4-python3-runtime", "datasets", "gguf", "pydantic_core"):
        assert any(name.startswith(f"{needed}-") for name in names)
    assert done.stdout == f"{len(names)} wheels, {len(names) / 1000:.1f} MB, in {folder}\n"
    fetched, built = asked.read_text().splitlines()
    assert "--only-binary=:all:" in fetched
    assert "antlr4-python3-runtime==" in built
