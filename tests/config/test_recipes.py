"""Every recipe and choice composes, and overrides are read as a user writes them."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads import config
from specheads.config import compose
from specheads.core.errors import InputError
from specheads.core.ranges import AUTO
from specheads.heads.load import build_head
from specheads.training.schedule import BETAS, refuse_misfit
from specheads.training.step import CLIP_NORM

RECIPES = compose.recipes()
HEADINGS = ["What", "Command", "Cost", "Results", "Changes"]
HOME = str(Path.home())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipe_composes_builds_its_head_and_has_a_card(name: str):
    mine = ["data.path=mine.jsonl"] if name in ("conversations", "chat_8b") else []
    settings = compose.settings_of("train", [f"recipe={name}", *mine])
    assert settings.name == name
    with torch.device("meta"):
        head = build_head(settings.head, width=64, vocab_size=65536)
    for phase in settings.schedule.phases.values():
        phase.accumulation_steps = (
            1 if phase.accumulation_steps == AUTO else phase.accumulation_steps
        )
    refuse_misfit(settings.schedule.phases, context=8192, depth=head.depth)
    card = RECIPES[name].with_name("README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert [heading for heading in headings if heading != "Not measured"] == HEADINGS


def test_every_choice_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each composition takes another choice of every group that has one left."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "recipe.yaml").write_text("name: none\n")
    monkeypatch.setenv("SPECHEADS_RECIPES", str(tmp_path))
    groups = ["base", "head", "data", "features", "schedule", "tree", "tracker"]
    groups_of_files = [
        sorted(config.data_dir("configs").joinpath(group).glob("*.yaml")) for group in groups
    ]
    assert all(groups_of_files)
    needed = {"path": "data.path=x", "paths": "tree.paths=[[0]]"}
    for chosen in itertools.zip_longest(*groups_of_files):
        words = ["recipe=none"]
        for file in filter(None, chosen):
            text = file.read_text(encoding="utf-8")
            words.append(f"{file.parent.name}={file.stem}")
            words += [word for key, word in needed.items() if f"{key}: ???" in text]
            if file.stem == "mixture":
                words.append("data.sources={a:{source:python_stdlib}}")
        compose.settings_of("train", words)


def test_granite_code_has_the_numbers_of_ibm_s_script():
    """fms-fsdp 5a296af, scripts/train_speculator.sh and fms_fsdp/config/training.py.

    The batch sizes of the script are those of one of eight GPUs.
    """
    schedule = compose.settings_of("train", ["recipe=granite_code"]).schedule
    corpus, distilled = schedule.phases["corpus"], schedule.phases["distilled"]
    assert (corpus.steps, corpus.steps + distilled.steps) == (15000, 21000)
    assert [corpus.learning_rate, distilled.learning_rate] == [1e-3, 1e-4]
    assert [corpus.loss, distilled.loss] == ["cross_entropy"] * 2
    assert corpus.batch_size * corpus.sequence_length == 8 * 8 * 4096
    assert distilled.batch_size == 8 * 96
    distill_settings = distilled.distill
    assert distill_settings.num_samples == distilled.steps * distilled.batch_size
    assert [distill_settings.prompt_tokens, distill_settings.new_tokens] == [64, 256]
    assert [distill_settings.temperature, distill_settings.top_k] == [1.0, 10]
    assert (BETAS, schedule.weight_decay, CLIP_NORM) == ((0.9, 0.95), 0.1, 1.0)


def test_command_line_beats_the_recipe_and_creates_an_optional_group():
    corpus = "schedule.phases.corpus"
    words = ["head=medusa", f"{corpus}.steps=7", f"{corpus}.joint.rank=8"]
    words += [f"{corpus}.joint={{alpha: 3}}", "run_dir=~/a b"]
    settings = compose.settings_of("train", ["recipe=smoke", *words])
    phase: Any = settings.schedule.phases["corpus"]
    assert (settings.head["kind"], phase.steps, settings.run_dir) == ("medusa", 7, f"{HOME}/a b")
    assert (phase.joint.rank, phase.joint.alpha, phase.joint.dropout) == (8, 3.0, 0.05)


@pytest.mark.parametrize(
    ("command", "word", "full"),
    [
        ("evaluate", "head=~/x", f"head_path={HOME}/x"),
        ("evaluate", "~evaluation.prompts", "~evaluation.prompts"),
        ("compare", "heads=[~/x,~/y]", f"heads=[{HOME}/x,{HOME}/y]"),
        ("compare", "base=b", "base.model=b"),
        ("compare", "base=tiny_code", "base=tiny_code"),
        ("compare", "out=a=b", "out='a=b'"),
    ],
)
def test_short_names_homes_and_quotes_are_written_out(command: str, word: str, full: str):
    assert compose.expand_overrides(command, [word]) == [full]


@pytest.mark.parametrize(
    "texts",
    [
        ("run=1-step=2.jsonl", "#1.jsonl", "a (copy).jsonl", "2024_11_26"),
        ("it's", "a,b", '"a', "ä"),
        ("a\\", "a\\'b", "a|b", "<a>"),
        ("a`b", "a*?", "1_0", "~a"),
        ("1e5", "1.50", "+5", "true"),
        ("-.5", "+inf", "a\\\\b", "[x].jsonl"),
        ("a ", "nan ", "a\\ b", "{x}"),
    ],
)
def test_paths_and_names_are_read_as_the_shell_gives_them(texts: tuple[str, ...]):
    names = "data.path", "name", "evaluation.prompts", "base.adapter"
    words = [f"{name}={text}" for name, text in zip(names, texts, strict=True)]
    settings = compose.settings_of("train", ["recipe=conversations", *words])
    assert (
        settings.data.path,
        settings.name,
        settings.evaluation.prompts,
        settings.base.adapter,
    ) == texts


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("[epoch=*.jsonl]", ["epoch=*.jsonl"]),
        ("[a b.jsonl, c(1).jsonl]", ["a b.jsonl", "c(1).jsonl"]),
        ("[1e5,true,2024_11_26]", ["1e5", "true", "2024_11_26"]),
        ("*.jsonl", ["*.jsonl"]),
        ("[[0-9].jsonl]", ["[0-9].jsonl"]),
        ("['a,b=c.jsonl','#d']", ["a,b=c.jsonl", "#d"]),
        ("[${name}/*]", ["conversations/*"]),
        ("[]", []),
    ],
)
def test_lists_of_texts_are_read_as_the_shell_gives_them(word: str, expected: list[str]):
    names = ["recipe=conversations", "data.path=x", f"data.patterns={word}"]
    assert compose.settings_of("train", names).data.patterns == expected


@pytest.mark.parametrize(("word", "expected"), [("8", [8]), ("1,8", [1, 8]), ("[1,8]", [1, 8])])
def test_lists_of_numbers_need_no_brackets(word: str, expected: list[int]):
    names = ["run=runs/mine", f"batch_sizes={word}"]
    assert compose.settings_of("tune", names).batch_sizes == expected


@pytest.mark.parametrize("word", ["{a:{source:jsonl,path:a=b.jsonl}}", "{a", "[", "(x"])
def test_override_that_hydra_cannot_read_is_named(word: str):
    with pytest.raises(InputError, match=r"must be NAME=VALUE.*path:'a=b\.jsonl', got ") as caught:
        compose.settings_of("train", ["recipe=smoke", "data=mixture", f"data.sources={word}"])
    assert f"data.sources={word}" in str(caught.value)


@pytest.mark.parametrize(
    "word", ["evaluation=x", "validation=100", "validation=[1]", "schedule.phases=3"]
)
def test_value_for_a_group_of_settings_is_refused_by_its_name(word: str):
    name, _, value = word.partition("=")
    message = re.escape(f"{name} is a group of settings, got '{value}'; set one by its name")
    with pytest.raises(InputError, match=message):
        compose.settings_of("train", ["recipe=smoke", word])


def test_word_without_a_value_is_not_told_about_quotes():
    with pytest.raises(InputError, match=r"must be NAME=VALUE, got 'preview'; --help lists"):
        compose.settings_of("train", ["recipe=smoke", "preview", "3"])


def test_text_in_quotes_and_references_are_hydras():
    words = ["name='\"a,b\"'", "data.column=${name}", "data.path='a=b.jsonl'", "seed=3"]
    settings = compose.settings_of("train", ["recipe=conversations", *words])
    assert (settings.name, settings.data.column) == ('"a,b"', '"a,b"')
    assert (settings.data.path, settings.seed) == ("a=b.jsonl", 3)


def test_recipes_of_specheads_recipes_are_used_or_refused_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine").mkdir()
    recipe = tmp_path / "mine" / "recipe.yaml"
    recipe.write_text("# My own.\ndefaults:\n  - override /head: medusa\nname: mine\n")
    monkeypatch.setenv("SPECHEADS_RECIPES", str(tmp_path))
    settings = compose.settings_of("train", ["recipe=mine"])
    assert (settings.name, settings.head["kind"]) == ("mine", "medusa")
    for content in (b"a: [", b"a: \xe9"):
        recipe.write_bytes(content)
        with pytest.raises(InputError, match=r"a YAML file, and .*mine.recipe\.yaml is not"):
            compose.settings_of("train", ["recipe=mine"])
