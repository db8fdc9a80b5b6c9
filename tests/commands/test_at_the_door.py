"""Common mistakes: one line each, exit code 2, and no file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specheads.commands._call import call
from specheads.config import data_dir
from tests.commands import broken

CONFIGS = data_dir("configs")
LONG = "x" * 300
PHASES = "schedule.phases"

SETTINGS = (
    f"{PHASES}.distilled.distill.top_k=-1", f"{PHASES}.distilled.distill.temperature=nan",
    f"{PHASES}.distilled.distill.temperature=-1", f"{PHASES}.distilled.distill.batch_size=0",
    f"{PHASES}.distilled.distill.num_samples=0", f"{PHASES}.distilled.distill.new_tokens=0",
    f"{PHASES}.corpus.batch_size=-4", f"{PHASES}.corpus.learning_rate=-1",
    f"{PHASES}.corpus.learning_rate=nan", f"{PHASES}.corpus.sequence_length=1",
    f"{PHASES}.corpus.warmup_share=-1", f"{PHASES}.corpus.final_share=nan",
    f"{PHASES}.distilled.sequence_length=8", "schedule.weight_decay=nan",
    "schedule.muon_learning_rate=-1", "evaluation.repeats=0", "evaluation.batch_size=-4",
    "evaluation.temperature=nan", "evaluation.top_k=-1", "evaluation.speed_prompts=0",
    "evaluation.repeats=-1", "evaluation.max_new_tokens=0", "evaluation.num_prompts=-3",
    "evaluation.top_p=2", "data.max_documents=-1", "log_every=0", "log_every=-1",
    "checkpoint_every=-5", "seed=-1", "seed=99999999999999999999", "head.depth=three",
    "head.depth=0", "head.inner_dim=-4", "head.tie_weights=3", "tree.kind=static",
    "tree.num_nodes=-1", "tree.confidence=nan", "name=a/../b", f"name={LONG}", f"run_dir={LONG}",
    "base.device=gpu", "base.device=cuda:99", "base.dtype=int8", f"base.model={LONG}",
    "tracker.kind=mlflow", f"data=jsonl data.path={LONG}", "data=jsonl",
    "data=files data.path=. data.patterns=[/etc/*]", "data=mixture",
    "data=mixture data.sources={a:{source:web,path:x}}",
    "data=mixture data.sources={a:{source:python_stdlib,weight:-1}}", "evaluation.mode=fast",
    "evaluation.temperature=0.5 evaluation.acceptance=rejection evaluation.mode=offline",
    f"evaluation.prompts={LONG}.jsonl", "evaluation.max_new_tokens=2",
    "evaluation.mode=offline evaluation.max_new_tokens=1",
)  # fmt: skip

TREES = (
    "tree.kind=product tree.branches=[1000,1000,1000]", "tree.kind=sampled tree.branches=[99,99]",
    "tree.kind=best_first tree.num_nodes=1000000", "tree.kind=beam tree.beam=1000000",
    "tree.kind=static tree.paths=[[1000000]]", "tree.kind=chain tree.depth=1000000",
)  # fmt: skip

CORPORA = [
    *(f"data=jsonl data.path={{at}}/{name}" for name in broken.FILES if ".jsonl" in name),
    *(f"data=parquet data.path={{at}}/{name}" for name in broken.FILES if ".parquet" in name),
    "data=jsonl data.path={at}/folder.jsonl", "data=files data.path={at}/nothing",
    "data=files data.path={at}/empty.jsonl", "data=jsonl data.path=~nobody/x.jsonl",
]  # fmt: skip

PROMPTS = [
    *(f"evaluation.prompts={{at}}/{name}" for name in broken.FILES if ".jsonl" in name),
    "evaluation.prompts={at}/folder.jsonl", "evaluation.prompts={at}/missing.jsonl",
]  # fmt: skip


MISTAKES = [
    ("evaluation.rule=typical", "rule is now acceptance"),
    ("head=eagle3 head.taps=[1,2]", "taps is now aux_layers"),
    ("stepz=3", "must be one that --help lists, got 'stepz'; correct its name or leave it out"),
    (f"{PHASES}.corpus.stepz=3", "got 'schedule.phases.corpus.stepz'; correct its name"),
    ("evaluation.quality_windows=8", "got 'evaluation.quality_windows'; correct its name or leave"),
    ("+stepz=3", "got 'stepz'; correct its name"),
    ("seed=abc", "seed"),
    ("head.kind=os.system", "head kind must be one of"),
    ("head=medusa +head.inner_dim=3", "inner_dim"),
    ("base.model=no/such/folder", "no/such/folder"),
    ("data=jsonl data.path=no.jsonl", "no.jsonl"),
    (f"{PHASES}.corpus.batch_size=99999", "lower the batch"),
    (f"{PHASES}.corpus.sequence_length=4096", "2048"),
    (f"{PHASES}.corpus.loss=hinge", "'hinge'"),
    ("validation.prompts=0 validation.keep=best", "got validation.prompts=0"),
    ("validation.prompt_tokens=4000 validation.keep=best", "lower validation.prompt_tokens"),
    ("tree.kind=oak", "'oak'"),
    ("evaluation.prompts=nope", "nope"),
]


@pytest.fixture
def refused(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return a function that trains with overrides and returns the error line."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def train(*overrides: str) -> str:
        said = refusal("train", "recipe=smoke", *overrides)
        assert list(work.iterdir()) == []
        return said

    return train


@pytest.mark.parametrize(("overrides", "told"), MISTAKES)
def test_mistake_gets_one_line_and_leaves_nothing(overrides: str, told: str, refused: Any):
    assert told in refused(*overrides.split())


@pytest.mark.parametrize(
    ("words", "rule"),
    [([], "name a recipe, as in"), (["recipe=nope"], "there is no recipe 'nope'")],
)
def test_missing_recipe_lists_the_recipes(words: list[str], rule: str, capsys: Any):
    with pytest.raises(SystemExit):
        call("train", words)
    said = capsys.readouterr().err
    assert said.startswith(rule)
    assert all(f"  {name} " in said for name in ("smoke", "tiny_code", "granite_code"))


@pytest.mark.parametrize("overrides", [*SETTINGS, *TREES])
def test_invalid_setting_is_refused_by_name(overrides: str, refused: Any):
    said = refused(*overrides.split())
    name = overrides.split()[-1].partition("=")[0]
    assert name.rpartition(".")[2] in said or "'static'" in said or "paths" in said


def test_multirun_is_refused(refused: Any):
    for asked in ("-m", "++hydra.mode=MULTIRUN", "--cfg"):
        assert f"a call takes settings and --help, got {asked}; " in refused(asked, "seed=1,2")
    said = refused("seed=1,2")
    assert "got seed=1,2; call the command once for each" in said
    assert "multirun" not in said


@pytest.mark.parametrize("group", ["base", "data", "head", "schedule", "tracker", "tree"])
@pytest.mark.parametrize("value", ["oak", "no/such/folder"])
def test_unknown_choice_lists_valid_choices(group: str, value: str, refused: Any):
    there = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
    assert there
    said = refused(f"{group}={value}")
    rule = f"{group} must be one of {', '.join(there)}"
    assert said == f"error: {rule}, got '{group}/{value}'\n"


@pytest.mark.parametrize("command", ["train", "distill"])
@pytest.mark.parametrize(
    ("content", "told"),
    [("", "is not there"), ('{"text": 3}\n', "must hold text"), ("no json\n", "line 1 of")],
)
def test_unreadable_first_row_is_refused_before_the_base_is_loaded(
    command: str, content: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    refusal: Callable[..., str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content:
        Path("mine.jsonl").write_text(content)
    asked = [
        # this base does not exist either
        "recipe=smoke", "base.model=no/such/folder", "data=mixture", "data.max_documents=0",
        "data.sources={a:{source:python_stdlib},b:{source:jsonl,path:mine.jsonl}}",
        *(["out=text"] if command == "distill" else []),
    ]  # fmt: skip
    said = refusal(command, *asked)
    assert told in said
    assert "mine.jsonl" in said


# slow: each case loads the base first; the readers have fast tests of their own
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [*CORPORA, *PROMPTS])
def test_broken_file_is_refused_by_name(overrides: str, refused: Any, tmp_path: Path):
    broken.files(tmp_path)
    said = refused(*overrides.format(at=tmp_path).split())
    assert Path(overrides.rpartition("=")[2]).name in said


@pytest.mark.slow
@pytest.mark.parametrize("damage", broken.BASES)
def test_damaged_base_is_refused(damage: str, refused: Any, tmp_path: Path):
    said = refused(f"base.model={broken.base(tmp_path, damage)}")
    assert broken.BASES[damage][1] in said
