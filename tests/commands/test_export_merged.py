"""Export after joint training writes the merged base too."""

import json
from pathlib import Path

import pytest

import specheads
from specheads.config import data_dir
from specheads.export.write import RECORD
from tests.commands.test_library import SMALL

PHASE = "schedule.phases.joint"
JOINT = [
    "head=medusa",
    "schedule=medusa2",
    *(f"~schedule.phases.{name}" for name in ("heads", "corpus", "distilled")),
    *(f"{PHASE}.{one}" for one in ("steps=2", "batch_size=2", "sequence_length=32")),
    *(f"{PHASE}.joint.{one}" for one in ("rank=2", "learning_rate=0.05")),
]


@pytest.mark.slow
def test_export_after_joint_training_has_the_merged_base(tmp_path: Path):
    place = data_dir("recipes") / "tiny_code" / "base"
    words = [*JOINT, *SMALL, f"run_dir={tmp_path / 'run'}", "tree=chain"]
    made = specheads.train("smoke", words)
    out = tmp_path / "served"
    exported = specheads.export(made.path, "vllm", out)
    # the serving command names the merged base
    assert f"vllm serve {out / 'base'} " in exported.serve[0]
    merged = specheads.FrozenBase.load(out / "base", device="cpu")
    adapted = specheads.FrozenBase.load(place, adapter=made.adapter, device="cpu")
    plain = specheads.FrozenBase.load(place, device="cpu")
    assert merged.fingerprint == adapted.fingerprint != plain.fingerprint
    assert json.loads((out / RECORD).read_text())["base"]["fingerprint"] == merged.fingerprint
    prompts = [[11, 300, 42], [5, 6]]
    head = specheads.load_head(out, merged)
    said = specheads.generate(merged, head, prompts, max_new_tokens=12)
    assert said.tokens == specheads.generate(adapted, None, prompts, max_new_tokens=12).tokens
    # export again into the same folder, with names only
    again = [f"head_path={made.head}", f"base.model={place}", f"base.adapter={made.adapter}"]
    lines = specheads.export("", "vllm", out, again).serve
    assert lines == exported.serve
    assert (out / "base" / "tokenizer.json").is_file()
