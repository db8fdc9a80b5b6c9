"""`specheads distill`: generated text in a folder, for a distilled phase."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

import specheads
from specheads.config import data_dir
from specheads.heads.load import build_for_base
from tests import tiny
from tests.training.distill.fake_engine import shards

SMALL = ["recipe=smoke", "num_samples=6", "new_tokens=8", "batch_size=3"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        text = "".join(f"def add_{number}_{line}(a, b):\n    return a + b\n" for line in range(40))
        (folder / f"{number}.py").write_text(text)
    return ["data=files", f"data.path={folder}"]


def test_text_is_written_with_a_report_and_resumed(
    base: specheads.FrozenBase, corpus: list[str], tmp_path: Path
):
    first = specheads.distill(
        overrides=[*SMALL, *corpus, "shard_size=2"], base=base, out=tmp_path / "text"
    )
    assert first is not None
    assert (first["requested"], first["kept"], first["tokens"]) == (6, 6, 48)
    assert first["tokens_per_second"] > 0
    page = (tmp_path / "text" / "report.md").read_text()
    assert "- kept: 6\n" in page
    assert page.count("\nText ") == 5
    before = shards(tmp_path / "text")
    overrides = [*SMALL, *corpus, "shard_size=2", "num_samples=8", "batch_size=1"]
    second = specheads.distill(overrides=overrides, base=base, out=tmp_path / "text")
    assert second is not None
    assert second["requested"] == 8
    assert shards(tmp_path / "text").items() > before.items()


def test_text_in_an_object_store_is_resumed_and_trained_on(
    base: specheads.FrozenBase,
    corpus: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    address, store = "memory://texts/distilled", fsspec.filesystem("memory")
    words = [*SMALL, *corpus, "shard_size=2", "drop=[]"]
    assert specheads.distill(overrides=[*words, "num_samples=2"], base=base, out=address)
    before = store.find(address)
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "elsewhere"))
    second = specheads.distill(overrides=words, base=base, out=address)
    assert second is not None
    assert second["requested"] == 6
    assert set(before) < set(store.find(address))
    phase = "schedule.phases.distilled"
    settings = ["num_samples=6", "new_tokens=8", "shard_size=2", "drop=[]", f"folder={address}"]
    overrides = [
        *("recipe=smoke", "~schedule.phases.corpus", *corpus, "evaluate_after=false"),
        *(f"run_dir={tmp_path}/run", "validation.rows=0", "validation.prompts=0"),
        *(f"{phase}.steps=1", f"{phase}.batch_size=2", "head.inner_dim=16"),
        *(f"{phase}.distill.{setting}" for setting in settings),
    ]
    run = specheads.train(overrides=overrides, base=base)
    assert run.head.is_dir()
    assert not list((run.path / "text").glob("*.parquet"))
    store.store.clear()


def test_head_generates_the_same_text(
    base: specheads.FrozenBase, corpus: list[str], tmp_path: Path
):
    head = build_for_base({"kind": "mlp_speculator", "depth": 2, "inner_dim": 16}, base)
    head.save_pretrained(tmp_path / "head")
    words = [*SMALL, *corpus]
    specheads.distill(overrides=words, base=base, out=tmp_path / "alone")
    words.append(f"head={tmp_path / 'head'}")
    specheads.distill(overrides=words, base=base, out=tmp_path / "drafted")
    assert shards(tmp_path / "drafted") == shards(tmp_path / "alone")


def test_draft_tokens_are_counted_on_answers_if_there_are_only_prompts(tmp_path: Path):
    base = specheads.FrozenBase.load(data_dir("recipes") / "tiny_code" / "base", device="cpu")
    assert base.tokenizer is not None
    base.tokenizer.chat_template = tiny.CHAT
    talks = [{"messages": [{"role": "user", "content": f"Add {n} to it."}]} for n in range(60)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    phase = "schedule.phases.distilled"
    overrides = [
        *("recipe=smoke", "~schedule.phases.corpus", "data=chat", "evaluate_after=false"),
        *(f"data.path={tmp_path}/talks.jsonl", f"run_dir={tmp_path}/run", "head.draft_tokens=60"),
        *("validation.rows=0", "validation.prompts=0", f"{phase}.steps=1", f"{phase}.batch_size=2"),
        *(f"{phase}.distill.num_samples=6", f"{phase}.distill.new_tokens=8"),
        f"{phase}.distill.drop=[]",
    ]
    run = specheads.train(overrides=overrides, base=base)
    text = shards(run.path / "text")
    assert text
    rows = [row for file in text for row in pq.read_table(run.path / "text" / file).to_pylist()]
    generated_tokens = {
        token
        for row in rows
        for token, is_label in zip(row["tokens"], row["loss_mask"], strict=True)
        if is_label
    }
    head = specheads.load_head(run.head, base)
    assert head.draft_ids is not None
    assert generated_tokens <= set(head.draft_ids.tolist())
    provenance = json.loads((run.path / "provenance.json").read_text())
    assert provenance["draft_vocabulary"] == {"size": 60, "coverage": 1.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "an output folder is needed, got none; add out=FOLDER"),
        (["out=text", "engine=pen"], "must be one of local, vllm, openai"),
        (["out=file/text"], "a folder to write to is needed"),
        (["out=text", "schedule=corpus_only", "~schedule.phases.distilled"], "a distilled phase"),
        (["out=text", "head=there", "engine=vllm"], "a head can draft with engine=local only"),
        (["out=text", "head=nowhere/head"], "nowhere/head"),
        (["out=text", "data=jsonl", "data.path=nothing.jsonl"], "nothing.jsonl"),
        (["out=text", "drop=[boring]"], "each one of loop, empty, truncated"),
    ],
)
def test_mistake_gets_one_line_and_leaves_nothing(
    overrides: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Any,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert message in refusal("distill", "recipe=smoke", *overrides)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
