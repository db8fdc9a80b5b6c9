"""Joint training: frozen weights do not change, LoRA is trained, and exports equal the base."""

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.base.lora import WEIGHTS, Adapter, targets
from specheads.base.model import FrozenBase
from specheads.base.selfcheck import check
from specheads.commands._call import call
from specheads.config import data_dir
from specheads.config.training import JointSettings, Phase, Schedule
from specheads.core.drafter import Head
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base, load_head
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training import joint as joints
from specheads.training import step as steps
from specheads.training.joint import JointTraining
from specheads.training.objective import Objective, draft_labels
from specheads.training.schedule import ScheduledPhase
from specheads.training.step import MicroBatch, Teacher, compute_loss
from tests import tiny
from tests.slow import each_kind
from tests.training import test_trainer
from tests.training.test_trainer import assert_equal, power_cut

TEXT = torch.arange(24).view(2, 12) % 7


def fresh_base(architecture: str = "llama", dtype: torch.dtype = torch.float64) -> FrozenBase:
    """Return a new base, because merging changes it."""
    return FrozenBase(copy.deepcopy(tiny.base(architecture, dtype=dtype).model))


def phase(**changes: Any) -> Phase:
    return test_trainer.phase(**{"steps": 4, "warmup_share": 0.0} | changes)


def joint(**changes: Any) -> JointSettings:
    return JointSettings(**{"rank": 2, "learning_rate": 1e-2} | changes)


def run_training(
    folder: Path, base: FrozenBase, phases: dict[str, Phase], kind: str = "medusa", **choices: Any
) -> tuple[Head, RunDirectory]:
    schedule = Schedule(phases=phases)
    head = test_trainer.run_training(folder, schedule, kind=kind, base=base, log_every=1, **choices)
    return head, RunDirectory(folder)


def values(base: FrozenBase) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in base.model.state_dict().items()}


def said(base: FrozenBase) -> Tensor:
    return base.projection(base.read(TEXT).hidden)


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        *((architecture, "text") for architecture in tiny.ARCHITECTURES),
        ("llama", "base"),
        ("granite", "base"),
    ],
)
def test_joint_training_does_not_change_frozen_weights(architecture, target, tmp_path):
    base = fresh_base(architecture, torch.float32)
    before, spoken = values(base), said(base)
    _, run = run_training(tmp_path, base, {"joint": phase(joint=joint(target=target))})
    assert_equal(values(base), before)
    assert torch.equal(said(base), spoken)
    base.merge(run.adapter)
    merged = said(base)
    assert (merged - spoken).abs().max() > 1e-3
    # by whatever path it is named, it is added once
    for again in (run.adapter, run.path / "." / "adapter", f"{run.adapter}/"):
        assert base.has_merged(again)
        base.merge(again)
    assert torch.equal(said(base), merged)


def randomise(adapter: Adapter) -> None:
    for value in adapter.parameters:
        value.data.copy_(torch.randn_like(value) * 0.1)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_disabled_adapter_is_the_original_and_merged_one_the_adapted_base(architecture, tmp_path):
    base = fresh_base(architecture)
    spoken = said(base)
    adapter = Adapter(base.model, rank=2)
    assert torch.equal(said(base), spoken)
    randomise(adapter)
    adapted = said(base)
    assert (adapted - spoken).abs().max() > 1e-3
    hidden, token_ids = base.read(TEXT).hidden, torch.tensor([3, 5, 8])
    with torch.no_grad():
        torch.testing.assert_close(base.logits_of(hidden), adapted)
        model_logits = base.model(input_ids=TEXT, use_cache=False).logits
    # a head learns from these
    torch.testing.assert_close(adapted, model_logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        base.projection.rows(token_ids)(hidden), model_logits[..., token_ids]
    )
    if architecture == "llama":
        bound = hidden @ base.projection.scaled_weight.T
        torch.testing.assert_close(bound, model_logits, rtol=1e-12, atol=1e-12)
    with adapter.off():
        assert torch.equal(said(base), spoken)
    assert torch.equal(said(base), adapted)
    adapter.save(tmp_path)
    adapter.remove()
    assert torch.equal(said(base), spoken)
    base.merge(tmp_path)
    torch.testing.assert_close(said(base), adapted, rtol=1e-12, atol=1e-12)
    assert base.adapter == str(tmp_path)
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    # its other ways of reading the text agree with the merged weights too
    check(base.forwards)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_loads_the_saved_adapter(tmp_path: Path):
    base = fresh_base(dtype=torch.float32)
    plain = copy.deepcopy(base.model)
    _, run = run_training(tmp_path, base, {"joint": phase(joint=joint())})
    assert {file.name for file in run.adapter.iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    base.merge(run.adapter)
    peft_model = PeftModel.from_pretrained(plain, str(run.adapter)).eval()
    with torch.no_grad():
        logits = peft_model(input_ids=TEXT, use_cache=False).logits
    torch.testing.assert_close(logits, said(base), rtol=1e-5, atol=1e-5)


def tied_base() -> FrozenBase:
    model = copy.deepcopy(tiny.base("llama").model)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight  # pyright: ignore
    return FrozenBase(model)


def test_tied_projection_gets_no_adapter_and_stays_tied(tmp_path: Path):
    base = tied_base()
    assert "lm_head" in targets(fresh_base().model)
    assert "lm_head" not in targets(base.model)
    with pytest.raises(ValueError, match="tied to the embedding"):
        targets(base.model, ["q_proj", "lm_head"])
    embedding = base.embedding.clone()
    adapter = Adapter(base.model, rank=2)
    randomise(adapter)
    adapter.save(tmp_path)
    adapter.remove()
    base.merge(tmp_path)
    assert base.projection.weight is base.embedding
    assert torch.equal(base.embedding, embedding)


def test_log_has_head_weight_and_both_learning_rates(tmp_path: Path):
    settings = joint(ramp="sine", head_weight=0.3, learning_rate=5e-3)
    joint_phase = phase(steps=5, final_share=1.0, joint=settings)
    phases = {"heads": phase(), "joint": joint_phase}
    _, run = run_training(tmp_path, fresh_base(dtype=torch.float32), phases)
    rows = [row for row in read_metrics(run.metrics) if row["phase"] == "joint"]
    weights = [row["head_weight"] for row in rows]
    assert weights[::2] == pytest.approx([0.0, 0.3 * math.sqrt(0.5), 0.3])
    assert {row["learning_rate"] for row in rows} == {1e-2}
    assert {row["learning_rate/base"] for row in rows} == {5e-3}
    for row in rows:
        of_head = row["loss/depth_0"] + row["loss/depth_1"]
        total = row["loss/base"] + row["head_weight"] * of_head
        assert row["loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("kind", each_kind())
def test_all_parameters_of_an_adapter_are_trained(kind: str, tmp_path: Path):
    base = fresh_base(dtype=torch.float32)
    # A moves from the second step on: until then B is zero
    _, run = run_training(tmp_path, base, {"joint": phase(joint=joint())}, kind=kind)
    start = Adapter(base.model, rank=2).weights()
    snapshot = checkpoint.load_newest(run.checkpoints)
    assert snapshot is not None
    assert set(snapshot.adapter) == set(start)
    assert [
        name for name, value in start.items() if torch.equal(value, snapshot.adapter[name])
    ] == []


def test_phase_without_joint_does_not_change_the_adapter(tmp_path: Path):
    base = fresh_base(dtype=torch.float32)
    heads_only, joint_phase = phase(), phase(joint=joint())
    _, first = run_training(tmp_path / "first", base, {"heads": heads_only, "joint": joint_phase})
    run_training(tmp_path / "alone", base, {"heads": heads_only})
    head_weights, expected_weights = (
        load_head(folder, base).state_dict()
        for folder in (first.phases / "heads", tmp_path / "alone/phases/heads")
    )
    assert_equal(head_weights, expected_weights)
    _, last = run_training(tmp_path / "last", base, {"joint": joint_phase, "heads": heads_only})
    _, only = run_training(tmp_path / "only", base, {"joint": joint_phase})
    weights = [checkpoint.load_newest(run.checkpoints).adapter for run in (last, only)]  # pyright: ignore
    assert weights[0]
    assert_equal(*weights)


def test_gradients_of_head_and_adapter_are_clipped_together(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "CLIP_NORM", 0.0)
    base = fresh_base(dtype=torch.float32)
    _, run = run_training(tmp_path, base, {"joint": phase(joint=joint())})
    snapshot = checkpoint.load_newest(run.checkpoints)
    assert snapshot is not None
    assert_equal(snapshot.adapter, Adapter(base.model, rank=2).weights())


@pytest.mark.parametrize("target", ["text", "base"])
def test_resumed_training_equals_uninterrupted_training(target: str, tmp_path: Path):
    """Bitwise, with random dropout and label masks in each step."""
    base = fresh_base(dtype=torch.float32)
    phases = {
        "heads": phase(scored_share=0.7),
        "joint": phase(steps=5, scored_share=0.7, joint=joint(dropout=0.2, target=target)),
    }
    reference_head, undisturbed = run_training(tmp_path / "whole", base, phases)
    for crash_at in (3, 7):
        with power_cut(crash_at):
            run_training(tmp_path / "parts", base, phases, checkpoint_every=2)
    resumed_head, stopped = run_training(tmp_path / "parts", base, phases, checkpoint_every=2)
    assert_equal(reference_head.state_dict(), resumed_head.state_dict())
    file = "adapter_model.safetensors"
    assert (stopped.adapter / file).read_bytes() == (undisturbed.adapter / file).read_bytes()


def test_head_borrows_the_projection_of_the_current_adapter():
    base, settings = fresh_base(), phase(joint=joint(dropout=0.0))
    head = build_for_base({"kind": "mtp", "depth": 2}, base).to(base.dtype)
    teacher = Teacher(base, head, joint=joint(dropout=0.0))
    assert teacher.joint
    scheduled_phase = ScheduledPhase("joint", settings, 0)
    loss_mask = torch.ones_like(TEXT, dtype=torch.bool)
    teacher.begin(scheduled_phase)
    before = teacher.head.get_buffer("borrowed").clone()
    # as an optimizer step does
    randomise(teacher.joint.adapter)
    batch = TokenBatch(TEXT, loss_mask)
    labels = draft_labels(head, batch, loss_mask)
    micro_batch = MicroBatch(scheduled_phase, 1, 0, batch, labels, labels.count(batch))
    compute_loss(micro_batch, teacher, Objective(head))
    after = teacher.head.get_buffer("borrowed")
    assert torch.equal(after, base.projection.scaled_weight)
    assert not torch.equal(after, before)


def test_dropout_is_drawn_again_in_each_step():
    training = JointTraining(fresh_base(), joint(dropout=0.5))
    randomise(training.adapter)
    training.adapter.learn(True)
    batch = TokenBatch(TEXT, torch.ones_like(TEXT, dtype=torch.bool))
    loss, same_seed_loss, other_seed_loss = (
        training.read(batch, batch.loss_mask, joint(dropout=0.5), seed=seed)[1].item()
        for seed in (1, 1, 2)
    )
    assert loss == same_seed_loss != other_seed_loss


@pytest.mark.parametrize("architecture", ["llama", "granite", "gpt2"])
@pytest.mark.parametrize("chunk_rows", [4, 512])
def test_base_loss_equals_the_loss_of_all_logits(chunk_rows, architecture, monkeypatch):
    monkeypatch.setattr(joints, "CHUNK_ROWS", chunk_rows)
    base = fresh_base(architecture)
    training = JointTraining(base, joint(dropout=0.0))
    adapter = training.adapter
    loss_mask = torch.rand(TEXT.shape, generator=torch.manual_seed(3)) < 0.6
    for target in ("text", "base"):
        with adapter.off(), torch.no_grad():
            original = base.model(input_ids=TEXT, use_cache=False).logits[:, :-1][loss_mask[:, 1:]]
        randomise(adapter)
        adapter.learn(True)
        logits = base.model(input_ids=TEXT, use_cache=False).logits[:, :-1][loss_mask[:, 1:]]
        expected_loss = F.cross_entropy(logits, TEXT[:, 1:][loss_mask[:, 1:]], reduction="sum")
        if target == "base":
            adapted_log_probs, original_log_probs = logits.log_softmax(-1), original.log_softmax(-1)
            expected_loss = (
                original_log_probs.exp() * (original_log_probs - adapted_log_probs)
            ).sum()
        loss = training.read(TokenBatch(TEXT, loss_mask), loss_mask, joint(target=target))[1]
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
        expected_gradients = torch.autograd.grad(expected_loss, adapter.parameters)
        gradients = torch.autograd.grad(loss, adapter.parameters)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-12)


STEPS = [
    f"schedule.phases.{name}.{setting}"
    for name in ("heads", "joint")
    for setting in ("steps=2", "batch_size=1", "sequence_length=64")
]
BRIEF = [
    "tree=chain", "evaluation.mode=offline", "evaluation.num_prompts=1",
    "evaluation.max_new_tokens=6",
]  # fmt: skip


def specheads(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["specheads", *arguments])
    call(command, arguments)


def small_corpus(folder: Path, num_texts: int = 300, num_lines: int = 80) -> Path:
    """Write texts, which are read faster than the standard library; 300 are in every split."""
    texts = (f"def add_{i}(x):\n    return x + {i}\n" * num_lines for i in range(num_texts))
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.mark.slow
def test_command_trains_both_and_measures_base_quality(tmp_path, monkeypatch, capsys):
    """Evaluation of the run equals that of its head with base and adapter."""
    run = RunDirectory(tmp_path / "run")
    left_over = ["~schedule.phases.corpus", "~schedule.phases.distilled"]
    specheads(
        monkeypatch, "train", "recipe=smoke", "head=medusa", "schedule=medusa2", *left_over, *STEPS,
        "data=jsonl", f"data.path={small_corpus(tmp_path)}", "data.max_documents=0",
        *BRIEF, "schedule.phases.joint.joint.learning_rate=0.05", f"run_dir={run.path}",
    )  # fmt: skip
    first = json.loads((run.report / "results.json").read_text())
    quality = first["base_quality"]
    low, high = quality["change"]["cross_entropy_interval"]
    assert low <= quality["change"]["cross_entropy"] <= high
    assert quality["before"]["cross_entropy"] != quality["after"]["cross_entropy"]
    assert "nats per token, base + adapter" in (run.report / "report.html").read_text()
    # the base is tied: its embedding is no part of the adapter
    assert not any("lm_head" in name for name in load_file(run.adapter / WEIGHTS))
    specheads(monkeypatch, "evaluate", f"run={run.path}", "tree=chain", f"out={tmp_path / 'again'}")
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    specheads(
        monkeypatch, "evaluate", f"head={run.head}", f"base={data_dir('recipes')}/tiny_code/base",
        f"base.adapter={run.adapter}", *BRIEF, "evaluation.prompt_tokens=32",
        f"out={tmp_path / 'third'}",
    )  # fmt: skip
    third = json.loads((tmp_path / "third" / "results.json").read_text())
    assert again["base_quality"] == quality
    for results in (again, third):
        assert results["base"]["fingerprint"] == first["base"]["fingerprint"]
        assert results["offline"]["per_depth"] == first["offline"]["per_depth"]
    capsys.readouterr()


def test_quantised_base_is_refused():
    model = fresh_base().model
    model.config.quantization_config = {"quant_method": "gptq"}  # pyright: ignore
    with pytest.raises(ValueError, match="load an unquantised base"):
        targets(model)
