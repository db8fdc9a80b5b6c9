"""bench_serve.py without vLLM: its jobs, the order of turns, and the numbers of a row.

tests/export/test_vllm.py runs it with vLLM itself.
"""

import json
import shlex
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.trees import policies
from specheads.heads.load import build_for, load_head
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import GenerationSettings, decode_prompts, write_alone
from specheads.measure.results import read
from tests.export.trained import taught

ROOT = Path(__file__).parents[2]
BASE = ROOT / "recipes" / "tiny_code" / "base"
SAID = ("import os\n\n\ndef walk(", "class Tree:\n    def", "for name in", "def test_that(")


def prompts_file(folder: Path) -> Path:
    file = folder / "said.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SAID))
    return file


def trained(base: FrozenBase) -> Head:
    """A head that has seen what the base says after half of the prompts."""
    tokenizer: Any = base.tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in SAID]
    texts = write_alone(base, prompts, GenerationSettings(max_new_tokens=24, stop_at_eos=False))
    counts = torch.bincount(torch.tensor([*chain.from_iterable(texts)]), minlength=base.vocab_size)
    torch.manual_seed(0)
    head = build_for(
        {"kind": "mlp_speculator", "depth": 3, "inner_dim": 64, "draft_tokens": 32}, base, counts
    )
    tokens = torch.tensor([one[-3:] + text for one, text in zip(prompts, texts, strict=True)][::2])
    return taught(head, base, tokens, 12, learning_rate=3e-3)


class Ours:
    """In place of vLLM's process: our own loop, which answers as vLLM does."""

    base: FrozenBase

    def __init__(self, *told: Any) -> None:
        _, self.arguments, _, _, environment = told
        self.asked: list[dict[str, Any]] = []
        self.versions = {"vllm": "none", "torch": torch.__version__}
        speculative = self.arguments.get("speculative_config", {})
        self.depth = speculative.get("num_speculative_tokens", 0)
        self.head = load_head(environment["SPECHEADS_HEAD"], self.base) if self.depth else None
        self.counts = DepthCounts.zeros(self.depth)
        engines.append(self)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        order.append(self.depth)
        self.asked.append(job)
        how = GenerationSettings(
            max_new_tokens=job["sampling"]["max_tokens"],
            tree=policies.chain(self.depth) if self.depth else None,
            batch_size=len(job["prompts"]),
        )
        made = decode_prompts(self.base, self.head, job["prompts"], how)
        counters = {}
        if self.depth:
            self.counts = DepthCounts.total(
                [self.counts, *(one.counts for one in made)], self.depth
            )
            counters = {
                "drafts": self.counts.forwards,
                "draft_tokens": self.counts.forwards * self.depth,
                "accepted_tokens": sum(self.counts.accepted),
                "accepted_tokens_per_pos": self.counts.accepted,
            }
        # each arm is as fast as it is deep
        tokens = [one.tokens for one in made]
        seconds = sum(map(len, tokens)) / (1 + self.depth)
        return {"seconds": seconds, "tokens": tokens, "counters": counters}

    def close(self) -> None:
        pass


engines: list[Ours] = []
order: list[int] = []


@pytest.mark.slow
def test_a_run_asks_counts_replays_and_writes(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "VllmEngine", Ours)
    engines.clear()
    order.clear()
    Ours.base = FrozenBase.load(BASE, dtype="float32", device="cpu")
    trained(Ours.base).save_pretrained(tmp_path / "head")
    out = tmp_path / "serve.json"
    words = f"--base {BASE} --head {tmp_path / 'head'} --sets said={prompts_file(tmp_path)} "
    words += f"--out {out} --limit 4 --new-tokens 12 --batch 1,3 --depths 1,3 --dtype float32 "
    words += "--threads 1"
    assert script.main(shlex.split(words)) == 0
    served: Any = read(script.Served, out)
    assert [(row.prompts, row.batch, row.depth, row.count) for row in served.rows] == [
        ("said", 1, 1, 4),
        ("said", 1, 3, 4),
        # the fourth prompt fills no batch of three
        ("said", 3, 1, 3),
        ("said", 3, 3, 3),
    ]
    for row in served.rows:
        assert row.identical == row.count
        assert (row.served.forwards, row.served.accepted) == (
            row.replay.forwards,
            row.replay.accepted,
        )
        assert row.served.tokens_per_forward == pytest.approx(row.replay.tokens_per_forward)
        assert row.speedup.ratio == pytest.approx(1 + row.depth)
        assert row.speedup.interval == pytest.approx((1 + row.depth, 1 + row.depth))
        assert row.forward_overhead == pytest.approx(
            row.served.tokens_per_forward / row.speedup.ratio
        )
    assert served.rows[1].served.accepted[1] > 0
    assert served.engine == {"vllm": "none", "torch": torch.__version__}
    assert (served.kind, served.prompts["said"].count) == ("mlp_speculator", 4)
    assert served.provenance.hardware.machine
    assert len(capsys.readouterr().out.splitlines()) == len(served.rows)
    # one warm-up each, then four prompts and each arm first in turn
    assert order[:12] == [0, 1, 3, 0, 1, 3, 1, 3, 0, 3, 0, 1]
    jobs = [[job["prompts"] for job in engine.asked] for engine in engines]
    assert jobs[0] == jobs[1] == jobs[2]
    assert {tuple(engine.arguments) for engine in engines[1:]} == {
        (*engines[0].arguments, "speculative_config")
    }


def test_an_export_s_own_command_line_says_how_its_head_is_served(script):
    said = 'vllm serve base --speculative-config \'{"method": "eagle3", "model": "/a b/served"}\''
    native, environment = script.served_by(said)
    assert native == {"method": "eagle3", "model": "/a b/served"}
    assert "SPECHEADS_HEAD" not in environment
    _, environment = script.served_by(f"SPECHEADS_HEAD='/a b/served' {said}")
    assert environment["SPECHEADS_HEAD"] == "/a b/served"


def test_llama_cpp_serves_the_base_alone_and_each_chain_of_the_converted_head(
    script, tmp_path, monkeypatch
):
    converted, started = [], []

    def server(arguments: list[str], log: Path, built: Path) -> SimpleNamespace:
        started.append((arguments, log, built))
        return SimpleNamespace(versions={"llama.cpp": "b1"})

    monkeypatch.setattr(script, "convert", lambda *told, **more: converted.append((told, more)))
    monkeypatch.setattr(script, "LlamaServer", server)
    lines = (
        "python convert_hf_to_gguf.py '/a b' --target-model-dir base --outfile /h.gguf",
        "llama-server -m BASE.gguf -md /h.gguf --spec-type eagle --spec-draft-n-max 3 --last",
    )
    options = script._parse(
        shlex.split(
            "--head x --sets a --engine llama_cpp --gguf /base.gguf --llama-cpp /built "
            f"--depths 1,3 --batch 1,2 --threads 2 --out {tmp_path / 'serve.json'}"
        )
    )
    engines = script._llama_cpp(None, lines, 100, options)
    asked = ["/a b", "--target-model-dir", "base", "--outfile", "/h.gguf"]
    assert converted == [((asked, "f16"), {"built": Path("/built")})]
    shared = shlex.split("--threads 2 --threads-batch 2 --cache-ram 0 --parallel 2 --ctx-size 200")
    drafts = "-md /h.gguf --spec-type eagle --spec-draft-n-max {} --last"
    told = {0: [], 1: shlex.split(drafts.format(1)), 3: shlex.split(drafts.format(3))}
    assert started == [
        (["-m", "/base.gguf", *said, *shared], tmp_path / f"serve.{depth}.log", Path("/built"))
        for depth, said in told.items()
    ]
    assert [*engines] == [0, 1, 3]
    assert engines[3].versions == {"llama.cpp": "b1", "base": "base.gguf", "head": "f16"}


def test_llama_cpp_serves_the_file_that_the_base_s_name_stands_for(script, tmp_path):
    asked = ["--head", "x", "--sets", "a", "--engine", "llama_cpp", "--base"]
    file = tmp_path / "base.gguf"
    file.touch()
    assert script._parse([*asked, str(file)]).gguf == file
    with pytest.raises(SystemExit, match=r"llama.cpp serves GGUF files, .* name --gguf"):
        script._parse([*asked, str(BASE)])


def test_plain_prompts_are_said_by_a_user_and_mt_bench_is_eight_categories(script, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    base, options = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace(limit=5, batch=[1])
    rows = [
        {"question": "how many?", "category": "math"},
        {"turns": ["say it", "and again"], "category": "writing"},
        {"turns": ["translate"], "category": "translation"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = script.first_turns(base, "mt_bench", str(file), options)
    assert [prompt.text for prompt in found.prompts] == [
        "<user>how many?<assistant>",
        "<user>say it<assistant>",
    ]
    assert len(script.first_turns(base, "other", str(file), options).prompts) == 3
    assert tokenizer.chat_template


def test_every_arm_is_first_equally_often(script):
    firsts = Counter(script.order([0, 1, 2], number)[0] for number in range(6))
    assert firsts == {0: 2, 1: 2, 2: 2}


def test_counters_are_those_of_the_turn_and_drafts_beyond_the_end_do_not_count(script):
    before = {"drafts": 10, "accepted_tokens_per_pos": [5, 2]}
    now = {"drafts": 12, "accepted_tokens_per_pos": [7, 3]}
    answer = {"seconds": 1.0, "tokens": [[1, 2, 3, 4]], "counters": now}
    turn = script.turn(answer, before)
    assert (turn.forwards, turn.accepted) == (2, [2, 1])
    # three tokens after the first one; vLLM accepted a fourth, which was cut off
    assert script._counted([turn]).tokens_per_forward == 1.5


def test_forwards_are_those_of_an_engine_that_counts_them(script):
    before = {"drafts": 10, "forwards": 12, "accepted_tokens_per_pos": [5]}
    now = {"drafts": 12, "forwards": 15, "accepted_tokens_per_pos": [7]}
    assert script.turn({"seconds": 1.0, "tokens": [[1]], "counters": now}, before).forwards == 3


def test_speed_is_paired_and_for_as_many_tokens(script):
    alone = [script.Turn(1.0, [[0] * 10]), script.Turn(9.0, [[0] * 30])]
    # half as long a text in a quarter of the time is twice as fast
    drafted = [script.Turn(0.25, [[0] * 5]), script.Turn(4.5, [[0] * 30])]
    gain = script.speedup(alone, drafted)
    assert gain.ratio == 2
    assert gain.interval == (2, 2)


def test_a_set_that_fills_no_batch_is_refused(script, tmp_path):
    base = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(BASE))
    options = SimpleNamespace(limit=3, batch=[1, 8])
    with pytest.raises(SystemExit, match="said must fill a batch of 8, got 3"):
        script.first_turns(base, "said", str(prompts_file(tmp_path)), options)
