"""Every recipe composes, builds its head, and has a card."""

from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from specheads import config
from specheads.config import compose
from specheads.core.errors import InputError
from specheads.heads.load import build
from specheads.training.optimizers import BETAS
from specheads.training.schedule import refuse_misfit
from specheads.training.step import CLIP_NORM

RECIPES = compose.recipes()
HEADINGS = ["What", "Command", "Cost", "Results", "Not measured", "Changes"]


@pytest.fixture(autouse=True)
def _registered() -> None:
    compose.register()


def composed(command: str, *overrides: str) -> Any:
    folder = str(config.data_dir("configs"))
    with hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
        return OmegaConf.to_object(hydra.compose(command, list(overrides)))


def test_recipes_of_the_first_release_exist():
    assert {"smoke", "tiny_code", "granite_code"} <= set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_composes_and_builds_its_head(name: str):
    settings = composed("train", f"recipe={name}")
    assert isinstance(settings, config.Train)
    assert settings.name == name
    if settings.data.source == "chat":
        # the recipe leaves the path to the user
        settings.data.path = "mine.jsonl"
    config.check(settings)
    with torch.device("meta"):
        head = build(settings.head, width=64, vocab_size=65536)
    for phase_name, phase in settings.schedule.phases.items():
        refuse_misfit(phase_name, phase, context=8192, depth=head.depth)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_has_a_card_with_the_fixed_headings(name: str):
    card = RECIPES[name].with_name("README.md").read_text(encoding="utf-8")
    found = [line.removeprefix("## ") for line in card.splitlines() if line.startswith("## ")]
    assert found == HEADINGS


@pytest.mark.parametrize("group", ["base", "head", "data", "schedule", "tree", "tracker"])
def test_every_part_composes_alone(group: str):
    parts = sorted(config.data_dir("configs").joinpath(group).glob("*.yaml"))
    assert parts
    needed = {"path": "data.path=x", "paths": "tree.paths=[[0]]"}
    for part in parts:
        # give the settings that a part requires
        asked = [
            override
            for key, override in needed.items()
            if f"{key}: ???" in part.read_text(encoding="utf-8")
        ]
        settings = composed("train", "recipe=smoke", f"{group}={part.stem}", *asked)
        assert isinstance(settings, config.Train), part


GPUS = 8
"""GPUs of IBM's script, whose batch sizes are per GPU."""


def test_granite_code_has_the_numbers_of_ibm_s_script():
    """fms-fsdp 5a296af, scripts/train_speculator.sh and fms_fsdp/config/training.py."""
    schedule = composed("train", "recipe=granite_code").schedule
    corpus, distilled = schedule.phases["corpus"], schedule.phases["distilled"]
    assert corpus.steps == 15000
    assert corpus.steps + distilled.steps == 21000
    assert [corpus.learning_rate, distilled.learning_rate] == [1e-3, 1e-4]
    assert [corpus.loss, distilled.loss] == ["cross_entropy"] * 2
    assert corpus.batch_size * corpus.sequence_length == GPUS * 8 * 4096
    assert distilled.batch_size == GPUS * 96
    written = distilled.distill
    assert written.num_samples == distilled.steps * distilled.batch_size
    assert [written.prompt_tokens, written.new_tokens] == [64, 256]
    assert [written.temperature, written.top_k] == [1.0, 10]
    assert (BETAS, schedule.weight_decay, CLIP_NORM) == ((0.9, 0.95), 0.1, 1.0)


def test_the_command_line_beats_the_recipe():
    settings = composed("train", "recipe=smoke", "head=medusa", "schedule.phases.corpus.steps=7")
    assert settings.head["kind"] == "medusa"
    assert settings.schedule.phases["corpus"].steps == 7


def test_phase_accepts_settings_of_an_optional_group():
    corpus = "schedule.phases.corpus"
    words = [f"{corpus}.joint.rank=8", f"{corpus}.joint={{alpha: 3}}", "run_dir=~/a b"]
    settings = compose.settings_of("train", ["recipe=smoke", *words])
    joint: Any = settings.schedule.phases["corpus"].joint
    assert (joint.rank, joint.alpha, joint.dropout) == (8, 3.0, 0.05)
    assert settings.run_dir == str(Path.home() / "a b")


def test_mistakes_raise_in_python():
    with pytest.raises(InputError, match=r"^seed must be a whole number"):
        compose.settings_of("train", ["recipe=smoke", "seed=-1"])


@pytest.mark.parametrize(
    ("command", "given", "full"),
    [
        ("evaluate", "head=~/x", "head_path=HOME/x"),
        ("evaluate", "~evaluation.prompts", "~evaluation.prompts"),
        ("evaluate", "run=a~/b", "run=a~/b"),
        ("compare", "heads=[~/x,~/y]", "heads=[HOME/x,HOME/y]"),
        ("compare", "base=b", "base.model=b"),
        ("compare", "base=tiny_code", "base=tiny_code"),
    ],
)
def test_short_names_and_the_home_folder_are_written_out(command: str, given: str, full: str):
    assert compose.lengthen(command, [given]) == [full.replace("HOME", str(Path.home()))]


def test_recipes_are_found_in_specheads_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text(
        "# My own.\ndefaults:\n  - override /head: medusa\nname: mine\n"
    )
    monkeypatch.setenv("SPECHEADS_RECIPES", str(tmp_path))
    compose.register()
    settings = composed("train", "recipe=mine")
    assert (settings.name, settings.head["kind"]) == ("mine", "medusa")
    assert "  mine           My own." in compose.list_recipes()


@pytest.mark.parametrize(
    ("written", "is_one"), [(b"", True), (b"a: [", False), (b"a: \xe9", False)]
)
def test_unreadable_recipe_is_refused_by_path(
    written: bytes, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_bytes(written)
    monkeypatch.setenv("SPECHEADS_RECIPES", str(tmp_path))
    if is_one:
        compose.register()
        assert "  mine" in compose.list_recipes()
    else:
        with pytest.raises(InputError, match=r"a YAML file, and .*mine.recipe\.yaml is not"):
            compose.register()


@pytest.mark.parametrize(
    "texts",
    [
        ("run=1-step=2.jsonl", "#1.jsonl", "a (copy).jsonl", "[a].jsonl"),
        ("{a}.jsonl", "it's", "a,b", '"a'),
        ("a\\", "a\\'b", "a|b", "<a>"),
        ("a`b", "a*?", "1_0", "0e0"),
        ("-0", "False", "null", "~a"),
    ],
)
def test_paths_and_names_are_read_as_the_shell_gives_them(texts: tuple[str, ...]):
    names = "data.path", "name", "evaluation.prompts", "base.adapter"
    given = [f"{name}={text}" for name, text in zip(names, texts, strict=True)]
    found = compose.settings_of("train", ["recipe=conversations", *given])
    assert (found.data.path, found.name, found.evaluation.prompts, found.base.adapter) == texts


def test_text_in_quotes_and_references_are_hydras():
    given = ["name='\"a,b\"'", "data.column=${name}", "data.path='a=b.jsonl'", "seed=3"]
    found = compose.settings_of("train", ["recipe=conversations", *given])
    assert (found.name, found.data.column) == ('"a,b"', '"a,b"')
    assert (found.data.path, found.seed) == ("a=b.jsonl", 3)
