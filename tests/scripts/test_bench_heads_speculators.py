"""The bench of speculators' EAGLE-3: what needs none of it, and in its environment training itself.

`make speculators` makes that. There their training must be, label for label, what our own head of
the same weights learns: so documents are shifted, masked and placed alike, and the same streams of
the base are read.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.config import compose
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.heads.load import load_head
from specheads.runs.progress import progress_display
from specheads.training.objective import Objective, draft_labels
from tests import tiny


def with_speculators(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs it; its libraries warn where they are imported."""
    return pytest.mark.speculators(pytest.mark.filterwarnings("ignore")(test))


def begun(folder: Path, *overrides: str, architecture: str = "llama") -> Path:
    """Return a run yet to train: two steps on code in whole rows, others on answers, by twos."""
    base = tiny.saved(folder / "base", architecture, num_hidden_layers=8)
    tensors = load_file(base / "model.safetensors")
    # as it was made its weights are ones, and to norm twice is to norm once
    tensors["model.norm.weight"].uniform_(0.2, 2.0)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    words = [
        *("recipe=smoke", f"base.model={base}", "base.dtype=float32", "head=eagle3"),
        *("head.depth=3", "schedule.phases.corpus.steps=2", "data.max_documents=20"),
        *("schedule.phases.distilled.sequence_length=150", "log_every=4", *overrides),
    ]
    (folder / "run").mkdir()
    settings = compose.settings_of("train", words)
    (folder / "run" / "config.yaml").write_text(compose.as_yaml(settings))
    return folder / "run"


def last_of(script: ModuleType, source: Any) -> tuple[Any, Tensor]:
    """Return what the last step of a run reads, and which labels it counts."""
    with progress_display(shown=False) as bar:
        *_, last = script.lessons(source, bar)
    return last


def randomised(model: Any, folder: Path, base: Any) -> Head:
    """Give a model of theirs weights that none could do without; return it as a head of ours."""
    for value in model.parameters():
        value.data += 0.1 * torch.randn_like(value) * value.requires_grad
    model.save_pretrained(folder)
    return load_head(folder, base)


@with_speculators
@pytest.mark.parametrize("draft_tokens", [0, 300])
def test_it_trains_the_logits_that_our_head_of_the_same_weights_trains(
    script: ModuleType, tmp_path: Path, draft_tokens: int
):
    source = script.opened(begun(tmp_path, f"head.draft_tokens={draft_tokens}"))
    base, trainer = source.base, script.made(source, [])[0]
    head = randomised(trainer.model, tmp_path / "theirs", base)
    assert (head.kind, head.depth, head.aux_layers) == ("eagle3", 3, (2, 4, 5))
    assert head.drafted_size == (draft_tokens or base.vocab_size)
    batch, labels = last_of(script, source)
    # documents are next to each other; the loss covers answers
    assert 0 < int(labels.sum()) <= int(batch.loss_mask.sum()) < batch.tokens.numel() // 2
    assert int(batch.document_ids.max()) == 2

    level_logits: list[Tensor] = []
    target_logits: list[Tensor] = []
    trainer.model.lm_head.register_forward_hook(lambda *called: level_logits.append(called[2][0]))
    trainer.model.verifier_lm_head.register_forward_hook(lambda *c: target_logits.append(c[2][0]))
    drafted, targets = [], []
    with torch.no_grad():
        for row in script.collated(source, batch, labels):
            row.pop("error_records")
            trainer.model(**row, **trainer.config.train_call_kwargs)
            positions = row["loss_mask"][0].nonzero()[:, 0]
            drafted.append(
                torch.stack([level_logits[level][positions - level] for level in range(3)])
            )
            targets.append(target_logits[0][positions])
            level_logits.clear()
            target_logits.clear()
        features = base.read(batch.tokens, head.aux_layers, batch.document_ids)
        rows, positions = labels.nonzero(as_tuple=True)
        states = enumerate(head.states(features, batch.tokens))
        our_logits = [
            head.logits(state[rows, positions - 2 - level], level) for level, state in states
        ]
        base_logits = base.projection.rows(head.draft_ids)(features.hidden[rows, positions - 1])
    torch.testing.assert_close(torch.cat(drafted, 1), torch.stack(our_logits), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat(targets), base_logits, rtol=0, atol=1e-4)


@with_speculators
def test_a_step_descends_the_loss_that_ours_has_of_the_same_labels(
    script: ModuleType, tmp_path: Path
):
    source = script.opened(begun(tmp_path))
    trainer, chosen = script.made(source, [])
    head = randomised(trainer.model, tmp_path / "theirs", source.base).train()
    batch, labels = last_of(script, source)
    features = source.base.read(batch.tokens, head.aux_layers, batch.document_ids)
    phase = replace(source.settings.schedule.phases["distilled"], decay=1.0)
    logits_of = source.base.projection
    our_loss = Objective(head)(features, batch, draft_labels(head, batch, labels), logits_of, phase)
    # theirs is the KL divergence: less by the entropy of the base
    rows, positions = labels.nonzero(as_tuple=True)
    log_probs = logits_of(features.hidden[rows, positions - 1]).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    logged = script.step(trainer, script.collated(source, batch, labels), int(labels.sum()))
    assert chosen["loss"]["loss_fn"] == "kl_div"
    assert logged["loss"] == pytest.approx(float(our_loss.total - 3 * entropy), rel=1e-4)
    by_depth = [logged[f"loss_{level}"] for level in range(3)]
    assert by_depth == pytest.approx((our_loss.by_depth - entropy).tolist(), rel=1e-4)


@with_speculators
def test_it_trains_on_a_run_s_own_text_and_its_folder_drafts_here(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, out = begun(tmp_path, "schedule.phases.distilled.steps=38"), tmp_path / "theirs"
    assert script.main(["--speculators", str(run), "--out", str(out), "--set", "lr=3e-3"]) == 0
    assert f"wrote {out} after 40 steps" in capsys.readouterr().out
    assert len(list((run / "text").glob("shard-*.parquet"))) == 1
    record = json.loads((out / "training.json").read_text())
    assert (record["steps"], record["tokens"]) == (40, 2 * 2 * 128 + 38 * 4 * 150)
    assert sum(record["losses"][-4:]) < 0.9 * sum(record["losses"][4:8])
    their_settings = record["speculators"]
    assert (their_settings["version"], their_settings["optimizer"]["optimizer"]) == (
        "0.9.0",
        "muon",
    )
    assert their_settings["optimizer"]["muon_lr"] == 3e-3
    source = script.opened(run)
    head = load_head(out, source.base)
    prompts = [[5, 6, 7, 8], [40, 3, 9]]
    alone = generate(source.base, None, prompts, max_new_tokens=12, stop_at_eos=False)
    drafted = generate(source.base, head, prompts, max_new_tokens=12, stop_at_eos=False)
    assert drafted.tokens == alone.tokens


@with_speculators
@pytest.mark.slow
def test_a_file_of_variants_compares_it_too(script: ModuleType, tmp_path: Path):
    plan = {
        "recipe": "smoke",
        "train": [
            f"base.model={Path(__file__).parents[2] / 'recipes' / 'tiny_code' / 'base'}",
            "~schedule.phases.corpus",
            "schedule.phases.distilled.distill.folder={text}",
            "schedule.phases.distilled.steps=4",
        ],
        "variants": {"mine": ["head=medusa"]},
        "speculators": "mine",
        "compare": {"chain": ["tree=chain", "temperatures=[0]"]},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    short = ("num_prompts=2", "max_new_tokens=8", "speed_prompts=1")
    words = [str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), "--measure"]
    assert script.main([*words, *(f"evaluation.{setting}" for setting in short)]) == 0
    table = json.loads((tmp_path / "out" / "plan.json").read_text())
    (condition,) = table["chain"]["conditions"]
    assert [*condition["drafters"]] == ["mine", "speculators"]
    record = json.loads((tmp_path / "out" / "speculators" / "training.json").read_text())
    assert record["tokens"] == table["training"]["mine"]["tokens"]


@with_speculators
def test_a_base_that_scales_its_logits_is_refused(script: ModuleType, tmp_path: Path):
    source = script.opened(begun(tmp_path, architecture="granite"))
    trainer, _ = script.made(source, [])
    batch, _ = last_of(script, source)
    with pytest.raises(InputError, match="nats; choose a base that does not scale"):
        script.refuse_misread(source, trainer.model, batch)
