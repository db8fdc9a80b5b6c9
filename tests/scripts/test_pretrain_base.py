import json
import math
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHAPE = ["--vocab-size", "280", "--layers", "1", "--width", "32", "--heads", "2"]
SHAPE += ["--kv-heads", "1", "--mlp-width", "64", "--context", "64"]
SIZES = ["--batch-size", "4", "--sequence-length", "32", "--warmup-steps", "2"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    draw = random.Random(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(40):
        words = draw.choices(["if", "else", "return", "value", "total"], k=60)
        (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    return str(folder)


def pretrain(script: ModuleType, data: str, out: Path, *arguments: str) -> int:
    return script.main(["--data", data, "--out", str(out), *SIZES, *arguments])


def test_a_folder_of_text_becomes_a_base_that_loads_and_has_learnt(script, data, tmp_path):
    out = tmp_path / "base"
    assert pretrain(script, data, out, "--steps", "40", *SHAPE) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "return total if value else"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token_id, model.config.eos_token_id) == (0, 0)
    ids = torch.tensor([tokenizer((Path(data) / "0.txt").read_text())["input_ids"][:60]])
    assert model(input_ids=ids, labels=ids).loss < 0.7 * math.log(len(tokenizer))
    measured = json.loads((out / "pretraining.json").read_text())
    assert measured["tokens"] == 40 * 4 * 32
    assert not out.with_name("base.partial").exists()


def test_an_interrupted_run_goes_on_to_the_same_bits(script, data, tmp_path, monkeypatch):
    first, second = tmp_path / "one", tmp_path / "two"
    choices = ["--steps", "9", "--checkpoint-every", "3", *SHAPE]
    assert pretrain(script, data, first, *choices) == 0

    class Interrupted(script.Trainer):
        def training_step(self, *arguments, **keywords):
            if self.state.global_step == 5:
                raise KeyboardInterrupt
            return super().training_step(*arguments, **keywords)

    monkeypatch.setattr(script, "Trainer", Interrupted)
    assert pretrain(script, data, second, *choices) == 130
    assert not second.exists()
    monkeypatch.undo()
    torch.manual_seed(99)
    assert pretrain(script, data, second, *choices) == 0
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30", *SHAPE[:4]], "--width must be a multiple of twice --heads"),
        (["--sequence-length", "999999", *SHAPE], "4 x 999999 tokens, it fills 0 rows"),
        (["--data", "nowhere"], "--data must be a file, a folder of text"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    script, data, tmp_path, capsys, arguments, message
):
    assert pretrain(script, data, tmp_path / "out", *arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
