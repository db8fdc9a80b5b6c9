"""Real llama.cpp serves tiny_code with each kind of head that it supports: `make llama_cpp`."""

import json
import shlex
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from specheads.core.drafter import Head
from specheads.decoding.trees import policies
from specheads.export.layouts.llama_cpp import NO_BACKEND_SAMPLING
from specheads.export.write import export_head
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import guess_ranks, replay
from tests.export.trained import (
    BASE,
    DEPTH,
    DFLASH,
    DSPARK,
    LLAMA3_ROPE,
    NEW_TOKENS,
    ORIGINAL,
    base,
    check_texts,
    continuations,
    prompts,
    trained,
)
from tests.scripts.loading import load_script

pytestmark = pytest.mark.llama_cpp

engine = load_script("bench_serve")

# reproducible: one thread, no half precision, no prompt cache
EXACT = (
    *("--threads", "1", "--threads-batch", "1", "--flash-attn", "off", "--cache-ram", "0"),
    *("--cache-type-k", "f32", "--cache-type-v", "f32"),
    *("--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_tokens": 512},
    # layer 0 is the embedding
    "eagle3_low": {
        "kind": "eagle3", "aux_layers": [0, 2, 4], "norm_before_fc": True, "own_embedding": True,
        "rope_scaling": LLAMA3_ROPE,
    },
    "eagle3_yarn": {
        "kind": "eagle3", "norm_before_residual": True, "attention_heads": 8, "key_value_heads": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, ORIGINAL: 64},
    },
    "eagle3_linear": {
        "kind": "eagle3", "draft_tokens": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "dflash": DFLASH,
    "dflash_anchor": {"kind": "dflash", "num_layers": 2, "sample_from_anchor": True},
    "dspark": DSPARK,
    "dspark_masks": {
        "kind": "dspark", "num_layers": 2, "markov_rank": 32, "mask_token": 1, "aux_layers": [0, 3],
        "sample_from_anchor": False,
    },
}  # fmt: skip
BLOCKS = tuple(name for name in SETTINGS if name.startswith("d"))


@cache
def head(name: str) -> Head:
    """Return a head that was trained on half of the texts."""
    return trained({"kind": name, **SETTINGS[name]}, 150 if name in BLOCKS else 60)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Return the base in GGUF."""
    return convert([str(BASE), "--outfile", str(tmp_path_factory.mktemp("target") / "base.gguf")])


def convert(arguments: list[str]) -> Path:
    """Convert to the last argument; tiny_code's tokenizer splits text as Llama 3's does."""
    engine.convert(arguments, "f32", pre_tokenizer="llama-bpe")
    return Path(arguments[-1])


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Callable[[str], list[str]]:
    """Return a function that exports and converts a head once and returns the serving command."""

    @cache
    def exported(name: str) -> list[str]:
        out = tmp_path_factory.mktemp("exports") / name
        lines, _ = export_head(head(name), base(), "llama_cpp", out, check_texts())
        conversion, serving = (shlex.split(line) for line in lines)
        convert(conversion[2:])
        return serving[1:]

    return exported


@pytest.fixture
def ask(target, export, tmp_path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the prompts on a new server, with a head if one is named."""

    def asked(
        name: str = "", *, num_tokens: int = DEPTH, parallel: int = 1, without: str = ""
    ) -> dict[str, Any]:
        arguments = export(name) if name else ["-m", "BASE.gguf"]
        changed = {"BASE.gguf": str(target)}
        if num_tokens != DEPTH:
            changed[str(DEPTH)] = str(num_tokens)
        arguments = [
            changed.get(argument, argument) for argument in arguments if argument != without
        ]
        arguments += ["--parallel", str(parallel), "--ctx-size", str(256 * parallel), *EXACT]
        command = [str(engine.BUILT / engine.LLAMA_SERVER), *arguments, "--metrics"]
        server = engine.LlamaServer(command, tmp_path / "server.log")
        try:
            return server.ask(prompts(), NEW_TOKENS, ignore_eos=True)
        finally:
            server.close()

    return asked


def engine_counts(name: str, depth: int = DEPTH) -> dict[str, Any]:
    """Return the counters of our own replay of a chain, as llama.cpp counts them.

    llama.cpp never drafts the last token of a request.
    """
    counts, lengths = [], []
    for prompt, text in zip(prompts(), continuations(), strict=True):
        ranks = guess_ranks(base(), head(name), prompt, text[:NEW_TOKENS], width=1)
        counts.append(replay(ranks, policies.chain(depth)))
        anchor = 0
        while (drafted := min(depth, len(ranks) - anchor - 1)) > 0:
            lengths.append(drafted)
            anchor += int((ranks[anchor, :drafted] == 0).cumprod(0).sum()) + 1
    total = DepthCounts.total(counts, depth)
    return {
        "draft_tokens": sum(lengths),
        "accepted_tokens": sum(total.accepted),
        "drafts": len(lengths),
        "accepted_tokens_per_pos": total.accepted,
        "forwards": total.forwards,
    }


def check(answer: dict[str, Any], name: str) -> None:
    """Require the text of the base and the counters of our replay."""
    assert answer["tokens"] == [text[:NEW_TOKENS] for text in continuations()]
    counts = engine_counts(name)
    # some are accepted at every depth, and some are rejected
    per_depth = counts["accepted_tokens_per_pos"]
    assert per_depth[-1] > 0
    assert per_depth[0] < counts["drafts"]
    assert {name: answer["counters"][name] for name in counts} == counts


def test_llama_cpp_without_a_head_generates_the_text_of_the_base(ask):
    assert ask()["tokens"] == [text[:NEW_TOKENS] for text in continuations()]


@pytest.mark.parametrize("name", SETTINGS)
def test_head_is_lossless_and_counters_equal_the_replay(name, ask):
    check(ask(name), name)


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_counters_of_parallel_requests_equal_the_replay(name, ask):
    check(ask(name, parallel=3), name)


def test_backend_sampling_accepts_less_for_parallel_requests(ask):
    """Exports turn it off. If this test fails, llama.cpp was fixed and the flag can go."""
    answer, counts = ask("eagle3", parallel=3, without=NO_BACKEND_SAMPLING), engine_counts("eagle3")
    assert answer["tokens"] == [text[:NEW_TOKENS] for text in continuations()]
    total = "accepted_tokens"
    assert 0 < answer["counters"][total] < counts[total]


def test_serving_benchmark_counts_equal_its_replay(target, tmp_path, monkeypatch):
    script = load_script("bench_serve")
    convert = partial(script.convert, pre_tokenizer="llama-bpe")
    monkeypatch.setattr(script, "convert", convert)
    head("eagle3").save_pretrained(tmp_path / "head")
    file = tmp_path / "continuations.jsonl"
    texts = ("import os\n\n\ndef walk(", "class Tree:\n    def", "for name in")
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    out = tmp_path / "serve.json"
    words = f"--engine llama_cpp --gguf {target} --outtype f32 --base {BASE} --dtype float32 "
    words += (
        f"--head {tmp_path / 'head'} --sets texts={file} --out {out} --limit 3 --new-tokens 24 "
    )
    words += f"--batch 1,3 --depths 1,{DEPTH} --threads 1"
    assert script.main(shlex.split(words)) == 0
    served = json.loads(out.read_text())
    assert [(row["batch"], row["depth"], row["count"]) for row in served["rows"]] == [
        (batch, depth, 3) for batch in (1, 3) for depth in (1, DEPTH)
    ]
    for row in served["rows"]:
        assert row["identical"] == row["count"]
        assert row["served"]["forwards"] == row["replay"]["forwards"]
        assert row["served"]["tokens_per_forward"] == row["replay"]["tokens_per_forward"] > 1
        assert row["speedup"]["ratio"] > 0
    assert served["engine"].keys() == {"llama.cpp"}
