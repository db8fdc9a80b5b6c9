"""A setting that is not honoured stops a command with one line that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specheads.config import data_dir
from tests.base.test_loading import adapter_files

GOLDEN = Path(__file__).parents[1] / "golden"
SHIPPED = data_dir("recipes") / "tiny_code" / "base"


@pytest.mark.parametrize(
    ("part", "file", "setting"),
    [
        ("head", "config.json", {"sliding_window": 2048}),
        ("base", "config.json", {"logit_scale": 0.5}),
        ("base", "tokenizer_config.json", {"add_prefix_space": True}),
        ("adapter", "adapter_config.json", {"planted_setting": 3}),
    ],
)
def test_evaluate_refuses_a_setting_that_is_not_honoured(
    part: str, file: str, setting: dict, refusal: Callable[..., str], tmp_path: Path
):
    shutil.copytree(SHIPPED, tmp_path / "base")
    shutil.copytree(GOLDEN / "eagle3_chain", tmp_path / "head")
    (tmp_path / "adapter").mkdir()
    for name, content in adapter_files().items():
        (tmp_path / "adapter" / name).write_bytes(content)
    changed = tmp_path / part / file
    changed.write_text(json.dumps(json.loads(changed.read_text()) | setting))
    folders = [f"{name}={tmp_path / name}" for name in ("head", "base", "out")]
    if part == "adapter":
        folders.append(f"base.adapter={tmp_path / 'adapter'}")
    name, value = next(iter(setting.items()))
    assert f"does not support {name}={value}" in refusal("evaluate", *folders, "num_prompts=1")
