"""The installed wheel works in an empty folder, without the checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Return what a command prints; show what it said if it failed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, made from the source archive as `make wheel` makes it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a new environment that has this wheel."""
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--quiet", "--no-deps", "--no-index", wheel),
        folder=folder,
    )
    # the dependencies are those of this environment; its .pth files, an editable specheads
    # among them, are read for its own site-packages only
    site = Path(
        run(
            python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", folder=folder
        ).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_an_installed_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    python = installed(wheel, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(python, "-c", "import specheads; print(specheads.__file__)", folder=empty)
    assert Path(where.strip()).is_relative_to(tmp_path)
    run(python.with_name("specheads"), "train", "recipe=smoke", "name=smoke", folder=empty)
    assert (empty / "runs" / "smoke" / "head" / "model.safetensors").is_file()
    assert (empty / "runs" / "smoke" / "report" / "results.json").is_file()
