"""Common mistakes: one line each, exit code 2, and no file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specheads.config import data_dir

pytestmark = pytest.mark.usefixtures("one_base")

CONFIGS = data_dir("configs")
LONG = "x" * 300
PHASES = "schedule.phases"

SETTINGS = (
    f"{PHASES}.distilled.distill.temperature=nan", f"{PHASES}.distilled.distill.batch_size=0",
    f"{PHASES}.corpus.batch_size=-4", f"{PHASES}.corpus.learning_rate=nan",
    f"{PHASES}.distilled.sequence_length=8", "schedule.muon_learning_rate=-1",
    "evaluation.repeats=0", "evaluation.top_k=-1", "evaluation.num_prompts=-3",
    "evaluation.top_p=2", "log_every=-1", "checkpoint_every=-5", "seed=99999999999999999999",
    "seed=1,2", "head.depth=three", "head.depth=0", "head.tie_weights=3", "tree.kind=static",
    "tree.confidence=nan", "name=a/../b", f"name={LONG}", f"run_dir={LONG}", "base.device=gpu",
    "base.device=cuda:99", "base.dtype=int8", f"base.model={LONG}", "tracker.kind=mlflow",
    f"data=jsonl data.path={LONG}", "data=jsonl data.path=~nobody/x.jsonl", "data=jsonl",
    "data=files data.path=. data.patterns=[/etc/*]", "data=mixture",
    "data=mixture data.sources={a:{source:web,path:x}}",
    "data=mixture data.sources={a:{source:python_stdlib,weight:-1}}",
    "evaluation.temperature=0.5 evaluation.acceptance=rejection evaluation.mode=offline",
    f"evaluation.prompts={LONG}.jsonl", "evaluation.max_new_tokens=2",
    "evaluation.mode=offline evaluation.contexts=[64]",
    "tree.kind=product tree.branches=[1000,1000,1000]", "tree.kind=sampled tree.branches=[99,99]",
    "tree.kind=best_first tree.num_nodes=1000000", "tree.kind=static tree.paths=[[1000000]]",
    "tree.kind=chain tree.depth=1000000", "-m", "--cfg", "++hydra.mode=MULTIRUN",
)  # fmt: skip

UNKNOWN = "must be one that --help lists, got '{}'; {}\n"
STEPS = f"did you mean {PHASES}.corpus.steps or {PHASES}.distilled.steps?"
MISTAKES = [
    ("stepz=3", UNKNOWN.format("stepz", STEPS)),
    ("+stepz=3", UNKNOWN.format("stepz", STEPS)),
    ("--steps=3", UNKNOWN.format("--steps", STEPS)),
    ("~steps", UNKNOWN.format("steps", STEPS)),
    (f"{PHASES}.corpus.stepz=3", f"did you mean {PHASES}.corpus.steps?\n"),
    ("data.paths=x", "did you mean data.path?\n"),
    ("head=medusa num-layers=3", "did you mean head.num_layers?\n"),
    ("nothing.like.this=3", "correct its name or leave it out\n"),
    ("head.kind=os.system", "head kind must be one of"),
    ("head=medusa +head.inner_dim=3", "inner_dim"),
    ("base.model=no/such/folder", "no/such/folder"),
    (f"{PHASES}.corpus.batch_size=99999", "lower the batch"),
    (f"{PHASES}.corpus.sequence_length=4096", "2048"),
    (f"{PHASES}.corpus.loss=hinge", "'hinge'"),
    ("validation.prompts=0 validation.keep=best", "needs validation.prompts above 0, got 0"),
    ("validation.prompt_tokens=4000 validation.keep=best", "lower validation.prompt_tokens"),
    ("tree.kind=oak", "'oak'"),
    ("evaluation.prompts=nope", "nope"),
    ("evaluation.contexts=[4096]", "contexts can be at most 2036"),
    ("evaluation.prompts=missing.jsonl", "missing.jsonl"),
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
        line = refusal("train", "recipe=smoke", *overrides)
        assert list(work.iterdir()) == []
        return line

    return train


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_mistake_gets_one_line_and_leaves_nothing(overrides: str, message: str, refused: Any):
    assert message in refused(*overrides.split())


@pytest.mark.parametrize("overrides", SETTINGS)
def test_invalid_setting_is_refused_by_name(overrides: str, refused: Any):
    line = refused(*overrides.split())
    name = overrides.split()[-1].partition("=")[0]
    assert name.rpartition(".")[2] in line or "static" in line or "paths" in line


def test_unknown_setting_of_a_command_suggests_its_short_name(refusal: Any):
    assert "did you mean num_prompts?\n" in refusal("evaluate", "run=x", "numprompts=3")


# base= takes a path or a Hub id too
@pytest.mark.parametrize("group", ["data", "features", "head", "schedule", "tracker", "tree"])
def test_unknown_choice_lists_valid_choices(group: str, refused: Any):
    choices = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
    assert f"{group} must be one of {', '.join(choices)}, got 'no/oak';" in refused(
        f"{group}=no/oak"
    )


@pytest.mark.parametrize("words", [[], ["recipe=nope"]])
def test_missing_recipe_lists_the_recipes(words: list[str], refusal: Any):
    line = refusal("train", *words)
    assert line.startswith("error: recipe must be one of chat_8b, conversations, ")
    assert ("'nope'" if words else "none;") in line


@pytest.mark.parametrize("command", ["train", "distill"])
@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is not there"), ('{"text": 3}\n', "must hold text"), ("no json\n", "line 1 of")],
)
def test_unreadable_first_row_is_refused_before_the_base_is_loaded(
    command: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    refusal: Callable[..., str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content:
        Path("mine.jsonl").write_text(content)
    overrides = [
        # this base does not exist either
        "recipe=smoke", "base.model=no/such/folder", "data=mixture", "data.max_documents=0",
        "data.sources={a:{source:python_stdlib},b:{source:jsonl,path:mine.jsonl}}",
        *(["out=text"] if command == "distill" else []),
    ]  # fmt: skip
    line = refusal(command, *overrides)
    assert message in line
    assert "mine.jsonl" in line
