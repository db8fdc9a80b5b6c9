"""config.yaml: hostile files are refused, and our own files are read back."""

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from specheads.commands._call import read_run_settings
from specheads.config import compose
from specheads.config.commands import Train
from specheads.config.shared import (
    FixesDivergence,
    Ordered,
    Remeasured,
    Resumable,
    SameText,
    settings_with,
)
from specheads.config.training import DistillSettings
from specheads.config.validation import differences, parse_settings, read_settings
from specheads.core.errors import InputError

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
HOSTILE = {
    "a variable of the environment": ("name: ${oc.env:SECRET}\n", "interpolations are refused"),
    "one in a list": ("head: {sizes: [1, 'a${oc.env:SECRET}']}\n", "interpolations are refused"),
    "one in a name": ("${oc.env:SECRET}: 1\n", "interpolations are refused"),
    "an alias bomb": (BOMB, "line 1 has one"),
    "an anchor": ("name: &a x\nrun_dir: *a\n", "line 1 has one"),
    "a tag": ("name: x\nseed: !!python/object/apply:os.system [id]\n", "line 2 has one"),
    "a tag of its own": ("name: !env SECRET\n", "line 1 has one"),
    "depth": ("a: " + "[" * 500_000, "at most 20 levels deep"),
    "depth by indents": ("".join(f"{' ' * n}a:\n" for n in range(300)), "at most 20 levels deep"),
    "a list": ("- name\n", "must be a mapping of names, got a list"),
    "nothing": ("", "must be a mapping of names, got a NoneType"),
    "names that are numbers": ("1: 2\n", "must be a mapping of names"),
    "one behind an escape": ('name: "\\x24{oc.env:SECRET}"\n', "interpolations are refused"),
    "names that are lists": ("? [a]\n: 2\n", "is not a run's settings"),
    "two documents": ("name: x\n---\nname: y\n", "is not a run's settings"),
    "no YAML": ("name: [x\n", "is not a run's settings"),
    "a number of 100,000 digits": ("seed: " + "9" * 100_000, "is not a run's settings"),
    "too much": ("# " + "x" * 2**20, "at most 1048576 bytes"),
    "bytes": ("name: \x00\n", "is not a run's settings"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_config_is_refused_in_one_line(attack, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    text, message = HOSTILE[attack]
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        read_run_settings(tmp_path / "config.yaml", Train)
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert str(tmp_path / "config.yaml") in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_missing_undecodable_and_linked_files_are_refused(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(InputError, match=r"needs a config\.yaml"):
        read_settings(run / "config.yaml")
    (run / "config.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(InputError, match="is not a run's settings"):
        read_settings(run / "config.yaml")
    (run / "config.yaml").unlink()
    (tmp_path / "secret").write_text("password: hunter2\n")
    (run / "config.yaml").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="in its own folder") as refused:
        read_settings(run / "config.yaml")
    assert "hunter2" not in str(refused.value)


STRANGE = (
    "yes", "no", "null", "~", "1e3", "1e-3", "0o17", "0x1f", "1_000", "1:20", "2020-01-01", "=",
    "<<", "", " ", "'", '"', "a: b", "a #b", "- a", "[a", "{a", "&a", "*a", "!a", "%a", "@a", "`a",
    "a\nb", "a\n", "\n", "\t", "é", "名", "\U0001f600", "\ufeff", "\x07", ".nan", ".inf", "...",
    "---", "?", "? a", "|", ">", "$", "{}", "[]",
)  # fmt: skip


@dataclass
class Small:
    """Settings of each form."""

    name: str
    head: dict[str, Any]
    rates: list[float] = field(default_factory=lambda: [0.9, 1e-5])


@pytest.mark.parametrize("name", STRANGE)
def test_written_settings_are_read_back(name: str):
    settings = Small(name, {"kind": name, "list": [name, 1e-5, 3, None, True, {"deep": name}]})
    assert parse_settings(compose.as_yaml(settings)) == asdict(settings)


def test_settings_of_a_run_are_read_back_typed(tmp_path: Path):
    smoke = compose.settings_of("train", ["recipe=smoke"])
    (tmp_path / "config.yaml").write_text(compose.as_yaml(smoke), encoding="utf-8")
    assert read_run_settings(tmp_path / "config.yaml", Train) == smoke


RESUMABLE = """
    name run_dir tree tracker evaluation evaluate_after log_every checkpoint_every validation
    base.device base.compile base.exact dry_run features.source features.url features.folder
    features.transport features.master features.protocol features.concurrency
    features.timeout_seconds features.patience_seconds features.max_gib
    schedule.phases.*.accumulation_steps schedule.phases.*.distill.folder
    schedule.phases.*.distill.engine schedule.phases.*.distill.batch_size
    schedule.phases.*.distill.use_head schedule.phases.*.distill.url
    schedule.phases.*.distill.served_as schedule.phases.*.distill.timeout_seconds
    schedule.phases.*.distill.tensor_parallel schedule.phases.*.distill.gpu_memory_utilization
"""
FACTS = {
    Resumable: (Train, RESUMABLE),
    FixesDivergence: (
        Train,
        "base.dtype schedule.muon_learning_rate schedule.phases.*.learning_rate "
        "schedule.phases.*.joint.learning_rate",
    ),
    Ordered: (Train, "data.sources schedule.phases"),
    Remeasured: (Train, "base.compile base.exact base.device base.dtype"),
    SameText: (
        DistillSettings,
        "folder num_samples engine batch_size use_head url served_as timeout_seconds "
        "tensor_parallel gpu_memory_utilization",
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_facts_of_settings(fact: type):
    """A setting that gets or loses a fact changes what resumes and which text is reused."""
    group, names = FACTS[fact]
    assert {name for name, _ in settings_with(fact, group)} == {*names.split()}


def test_only_sources_with_equal_features_may_change_on_resume():
    before = {"features": {"source": "local", "max_gib": 4}}
    cached = {"features": {"source": "cache", "max_gib": 9}}
    assert list(differences(before, cached)) == []
    served = {"features": {"source": "vllm"}}
    assert list(differences(cached, served)) == [("features.source", "cache", "vllm")]


@pytest.mark.parametrize("gib", [0.0, 2.5])
def test_run_with_the_former_feature_cache_is_read(gib: float, tmp_path: Path):
    smoke = compose.settings_of("train", ["recipe=smoke"])
    former = yaml.safe_load(compose.as_yaml(smoke)) | {"feature_cache": {"gib": gib, "folder": "f"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(former))
    features = read_run_settings(tmp_path / "config.yaml", Train).features
    cached = ("cache", 2.5, "f") if gib else ("local", 4.0, "")
    assert (features.source, features.max_gib, features.folder) == cached


def test_other_text_is_refused_on_resume():
    before = {"schedule": {"phases": {"a": {"distill": {"timeout_seconds": 5, "new_tokens": 8}}}}}
    after = {"schedule": {"phases": {"a": {"distill": {"timeout_seconds": 9, "new_tokens": 9}}}}}
    assert list(differences(before, after)) == [("schedule.phases.a.distill.new_tokens", 8, 9)]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("a: 1\nevaluation: {prompts: x}\nname: m\nbase: {device: cpu, dtype: auto}\n", None),
        ("a: 2\nevaluation: {}\nname: n\nbase: {dtype: auto}\n", ("a", 1, 2)),
        ("a: 1\nname: n\nbase: {dtype: float32}\n", ("base.dtype", "auto", "float32")),
        ("a: 1\nname: n\nbase: {dtype: auto}\nb: {c: 3}\n", ("b", None, {"c": 3})),
        ("name: n\nbase: {dtype: auto}\n", ("a", 1, None)),
        ("a: [1]\nname: n\nbase: {dtype: auto}\n", ("a", 1, [1])),
    ],
)
def test_differences_are_settings_that_change_training(after: str, expected: object):
    before = parse_settings(
        "a: 1\nevaluation: {prompts: y}\nname: n\nbase: {device: cuda, dtype: auto}\n"
    )
    assert next(differences(before, parse_settings(after)), None) == expected


@pytest.mark.parametrize("group", ["schedule.phases", "data.sources"])
@pytest.mark.parametrize("names", ["ba", "a", "abc", "b"])
def test_phases_and_sources_resume_in_their_order(group: str, names: str):
    outer, inner = group.split(".")
    before, after = ({outer: {inner: {name: {"x": 1} for name in keys}}} for keys in ("ab", names))
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [(group, ["a", "b"], [*names])]


def test_older_run_on_questions_about_the_standard_library_reads_their_file(tmp_path: Path):
    former: dict = {"source": "stdlib_instructions", "path": "", "max_documents": 9}
    for data in (former, {"source": "mixture", "path": "", "sources": {"library": former}}):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}), encoding="utf-8")
        settings = read_settings(tmp_path / "config.yaml")["data"]
        settings = settings.get("sources", {}).get("library", settings)
        assert settings["source"] == "chat"
        assert settings["max_documents"] == 9
        assert Path(settings["path"]).is_file()


@pytest.mark.parametrize("weighting", ["geometric", "first_error"])
def test_run_with_a_removed_setting_that_counts_is_measured_and_not_resumed(
    weighting: str, tmp_path: Path
):
    phase = {"lk_eta": 3.0, "weighting": weighting, "depth_weights": []}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"schedule": {"phases": {"a": phase}}}), encoding="utf-8")
    today = {"schedule": {"phases": {"a": {"lk_eta": 3.0}}}}
    changes = [] if weighting == "geometric" else [("schedule.phases.a.weighting", weighting, None)]
    assert read_settings(file) == today
    assert list(differences(read_settings(file, resumes=True), today)) == changes


def test_a_run_that_is_older_than_a_setting_resumes_with_its_default_only():
    today = asdict(compose.settings_of("train", ["recipe=tiny_code"]))
    older = deepcopy(today)
    del older["schedule"]["phases"]["corpus"]["lk_eta"]
    assert list(differences(older, today)) == []
    today["schedule"]["phases"]["corpus"]["lk_eta"] = 1.0
    assert list(differences(older, today)) == [("schedule.phases.corpus.lk_eta", None, 1.0)]
