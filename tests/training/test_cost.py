"""Costs on GPUs that are not here: from shapes, with datasheets that simulate uses too."""

import re
import sys
from importlib import import_module
from math import ceil
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from specheads.commands._call import call
from specheads.config import compose, data_dir
from specheads.training import cost
from specheads.training.cost import GPUS, SHARE, CostModel, Gpu, cost_lines

ROOT = Path(__file__).parents[2]
PHASE = "schedule.phases.distilled"


@pytest.fixture
def settings(tmp_path: Path):
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    words = [f"base.model={tmp_path}", "data.path=talks.jsonl", "base.device=cuda"]
    words += ["head.depth=2", "head.draft_tokens=128", f"{PHASE}.sequence_length=256"]
    words += [f"{PHASE}.batch_size=8", f"{PHASE}.distill.new_tokens=128"]
    return compose.settings_of("train", ["recipe=chat_8b", *words])


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_datasheets_are_those_of_simulate(gpu: Gpu):
    file = data_dir("configs") / "hardware" / f"{gpu.name.lower()}.yaml"
    hardware = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert (gpu.name, gpu.bandwidth) == (hardware["name"], float(hardware["bandwidth"]))
    assert gpu.flops == float(hardware["flops"])


def test_more_gpus_take_less_time_and_the_first_way_that_fits_is_named(settings):
    model = CostModel(settings)
    one, eight = (model.cost(GPUS[3], count) for count in (1, 8))
    assert (one.way, eight.way) == ("ddp", "ddp")
    assert eight.train_hours == pytest.approx(one.train_hours / 8)
    assert eight.text_hours == pytest.approx(one.text_hours / 8)
    assert eight.tokens_per_second == pytest.approx(8 * one.tokens_per_second)
    assert model.cost(GPUS[3], 16).train_hours == eight.train_hours, "a step has 8 rows"
    least = model.cost(Gpu("small", one.peak_bytes / 0.9 - 1, 1e12, 1e15), 1)
    # rows are split
    assert least.way == "ddp"
    assert least.peak_bytes < one.peak_bytes
    none = model.cost(Gpu("tiny", 1e3, 1e12, 1e15), 8)
    assert str(none).startswith("does not fit")
    assert settings.schedule.phases["distilled"].accumulation_steps == "auto"


def test_more_gpus_than_texts_generate_no_faster(settings):
    settings.schedule.phases["distilled"].distill.num_samples = 4
    model = CostModel(settings)
    four, eight = (model.cost(GPUS[3], count).text_hours for count in (4, 8))
    # each step still reads all weights, and the cache of less than one text
    assert four / 2 < eight <= four


def test_each_gpu_has_a_line(settings, monkeypatch):
    monkeypatch.setattr(cost, "GPUS", GPUS[:2])
    lines = cost_lines(settings, 2)
    assert [line.partition(":")[0] for line in lines] == [f"2 x {gpu.name}" for gpu in GPUS[:2]]


SERVED = re.compile(
    r"# 1 x (\w+): features=vllm from (\d+) x (\d) GPUs, text 0.0 h, training ([\d.]+) h, "
    r"([\d,]+) tokens/s, peak (\d+) GB, ([\d.]+) GB/s, ([\d.]+) GB in the (\w+)"
)


@pytest.mark.parametrize("transport", ["mooncake", pytest.param("folder", marks=pytest.mark.slow)])
def test_dry_run_names_the_servers_of_a_base_of_70_billion(transport, tmp_path, capsys):
    LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    ).save_pretrained(tmp_path)  # fmt: skip
    phase, steps, rows, length = "schedule.phases.corpus", 10_000, 8, 4096
    words = [f"base.model={tmp_path}", "base.device=cuda", "head=eagle3", "head.draft_tokens=32000"]
    words += ["schedule=corpus_only", "~schedule.phases.distilled", f"{phase}.steps={steps}"]
    words += [f"{phase}.batch_size={rows}", f"{phase}.sequence_length={length}", "features=vllm"]
    words += [f"features.transport={transport}", "dry_run=true"]
    call("train", ["recipe=tiny_code", *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# 1 x")]
    # a part of an L4's memory has neither an eighth of the weights nor the head
    assert lines[0] == "# 1 x L4: a server does not fit"
    assert len(lines) == len(GPUS)
    found = SERVED.fullmatch(lines[-1])
    assert found, lines
    gpu, *numbers, place = found.groups()
    servers, gpus, hours, speed, peak, rate, pool = (
        float(word.replace(",", "")) for word in numbers
    )
    assert (gpu, place) == ("H200", "store" if transport == "mooncake" else "folder")
    # 141 GB of weights
    assert gpus == 2
    tokens = steps * rows * length
    assert speed == pytest.approx(tokens / hours / 3600, rel=0.02)
    assert rate == pytest.approx(speed * (5 * 8192 * 2 + 8) / 1e9, abs=0.01)
    # servers read each token once, by two operations for each weight of 80 layers, and attention
    layers_seconds = 2 * 68.5e9 * 1.08 * tokens / (SHARE * 989e12)
    assert servers == ceil(layers_seconds / gpus / hours / 3600)
    assert pool == pytest.approx(4 * 2**30 / 1e9, abs=0.1)
    assert peak == 92


@pytest.mark.slow
def test_the_table_of_the_page_is_current(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sys.modules.pop("cost_table", None)
    assert import_module("cost_table").main(["--check"]) == 0
