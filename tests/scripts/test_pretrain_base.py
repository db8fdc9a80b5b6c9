import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.commands._call import call

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


@pytest.mark.slow
def test_a_head_drafts_well_for_a_base_with_recurrent_layers(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train"])
    settings = {
        **{"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    }
    choices = ["--architecture", "qwen3_5_text", "--settings", json.dumps(settings)]
    choices += ["--vocab-size", "1024", "--layers", "4", "--width", "96", "--heads", "4"]
    choices += ["--kv-heads", "2", "--mlp-width", "192", "--context", "512", "--steps", "200"]
    choices += ["--batch-size", "8", "--sequence-length", "128"]
    assert pretrain(script, "python_stdlib", Path("base"), *choices) == 0
    corpus = "schedule.phases.corpus"
    words = ["recipe=smoke", "base=base", "base.dtype=float32", "head=redrafter"]
    words += ["data=python_stdlib", f"{corpus}.steps=100", f"{corpus}.batch_size=4"]
    words += [f"{corpus}.learning_rate=5e-3", "evaluation.num_prompts=8"]
    call("train", [*words, "evaluation.max_new_tokens=32"])
    results = json.loads(Path("runs/smoke/report/results.json").read_text())
    assert results["lossless"]["verdict"] == "identical"
    assert results["offline"]["per_depth"] == results["online"]["per_depth"]
    assert results["online"]["tokens_per_forward"] > 1.2


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
