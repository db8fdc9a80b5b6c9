"""Feature cache: the same training bit for bit without the base; damaged files are recomputed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.config.training import FeatureSettings, JointSettings, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.training.features import FeatureCache, feature_cache
from specheads.training.log import ValidationSet
from tests import tiny
from tests.packed import packed, texts
from tests.training.in_processes import untimed_rows
from tests.training.test_trainer import phase, run_training

BASE = tiny.base("llama", dtype=torch.float32)
AUX = {"eagle3": (0, 1, 2)}


def trained(folder: Path, cache: FeatureCache | None, kind: str = "mlp_speculator") -> Head:
    schedule = Schedule(phases={"corpus": phase(scored_share=0.6)})
    held_out = ValidationSet([packed(texts())], every=3)
    return run_training(folder, schedule, kind=kind, held_out=held_out, source=cache)


def cached(folder: Path, kind: str = "mlp_speculator") -> tuple[FeatureCache, list[str]]:
    lines: list[str] = []
    return FeatureCache(folder, BASE, AUX.get(kind, ()), lines.append), lines


def assert_same_run(expected: tuple[Path, Head], run: tuple[Path, Head]) -> None:
    for name, value in expected[1].state_dict().items():
        assert torch.equal(value, run[1].state_dict()[name]), name
    assert untimed_rows(run[0]) == untimed_rows(expected[0])


@pytest.mark.parametrize("kind", ["mlp_speculator", "eagle3"])
def test_cached_training_is_bitwise_equal_without_base_forwards(kind, tmp_path, monkeypatch):
    plain = tmp_path / "plain", trained(tmp_path / "plain", None, kind)
    cache, _ = cached(tmp_path / "features", kind)
    first = tmp_path / "first", trained(tmp_path / "first", cache, kind)
    # six training batches and one validation batch
    assert len(list(cache.folder.iterdir())) == 7

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the base read text")

    monkeypatch.setattr(FrozenBase, "read", refuse)
    second = tmp_path / "second", trained(tmp_path / "second", cache, kind)
    assert_same_run(plain, first)
    assert_same_run(plain, second)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_cache_file_is_recomputed(damage: str, tmp_path: Path):
    cache, lines = cached(tmp_path / "features")
    first = tmp_path / "first", trained(tmp_path / "first", cache)
    file = sorted(cache.folder.iterdir())[2]
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    file.write_bytes({"cut": content[:-9], "flipped": bytes(flipped), "empty": b""}[damage])
    second = tmp_path / "second", trained(tmp_path / "second", cache)
    assert_same_run(first, second)
    assert lines == [f"{file} is damaged and will be recomputed"]
    assert file.read_bytes() == content


def test_other_weights_layers_and_dtypes_have_separate_folders(tmp_path: Path):
    folders = {
        FeatureCache(tmp_path, base, layers, print).folder
        for base, layers in (
            (BASE, ()),
            (BASE, (1,)),
            (tiny.base("gpt2", dtype=torch.float32), ()),
            (tiny.base("llama"), ()),
            (tiny.base("llama", "eager", torch.float32), ()),
        )
    }
    assert len(folders) == 5


def opened(folder: Path, max_gib: float, **changes: Any) -> FeatureCache:
    settings = compose.settings_of("train", ["recipe=smoke", "validation.rows=16"])
    settings.schedule.phases = {"corpus": phase(steps=1000, sequence_length=128, **changes)}
    settings.features = FeatureSettings(source="cache", max_gib=max_gib, folder=str(folder))
    return feature_cache(settings, BASE, (1, 2, 3), print)


def test_too_large_cache_is_refused_with_its_size(tmp_path: Path):
    #  (1000 steps x 2 rows + 16 rows held out) x 128 x (1 + 3) x 32 x 4 bytes
    size = (1000 * 2 + 16) * 128 * 4 * 32 * 4 / 2**30
    assert f"{size:.2f}" == "0.12"
    with pytest.raises(InputError, match=r"takes up to 0\.12 GiB, but features\.max_gib=0\.1;"):
        opened(tmp_path, 0.1)
    opened(tmp_path, 0.13)
    assert not list(tmp_path.iterdir())


def test_joint_training_with_cache_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="phase 'corpus' trains the base; set features=local"):
        opened(tmp_path, 9.0, joint=JointSettings())
