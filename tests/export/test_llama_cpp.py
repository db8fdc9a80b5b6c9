"""Real llama.cpp serves tiny_code with each kind of head it knows: `make llama_cpp`."""

import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specheads.core.drafter import Head
from specheads.decoding.trees import policies
from specheads.export.layouts.llama_cpp import ALONE
from specheads.export.write import export_head
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import guess_ranks
from specheads.measure.replay import replay
from tests.export.llama_cpp_engine import convert, serve
from tests.export.trained import (
    BASE,
    DEPTH,
    DFLASH,
    DSPARK,
    LLAMA3_ROPE,
    NEW_TOKENS,
    ORIGINAL,
    base,
    prompts,
    prompts_and_texts,
    said,
    trained,
)

pytestmark = pytest.mark.llama_cpp

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_tokens": 512},
    # layer 0 is the embedding; of the default layers, 1, 3 and 5, its old rule had two
    "eagle3_low": {
        "kind": "eagle3",
        "aux_layers": [0, 2, 4],
        "norm_before_fc": True,
        "own_embedding": True,
        "rope_scaling": LLAMA3_ROPE,
    },
    "eagle3_yarn": {
        "kind": "eagle3",
        "norm_before_residual": True,
        "attention_heads": 8,
        "key_value_heads": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, ORIGINAL: 64},
    },
    "eagle3_linear": {
        "kind": "eagle3",
        "draft_tokens": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "dflash": DFLASH,
    "dflash_anchor": {"kind": "dflash", "num_layers": 2, "sample_from_anchor": True},
    "dspark": DSPARK,
    "dspark_masks": {
        "kind": "dspark",
        "num_layers": 2,
        "markov_rank": 32,
        "mask_token": 1,
        "aux_layers": [0, 3],
        "sample_from_anchor": False,
    },
}
BLOCKS = tuple(name for name in SETTINGS if name.startswith("d"))


@cache
def head(name: str) -> Head:
    """A head that has seen half of the texts a few times."""
    return trained({"kind": name, **SETTINGS[name]}, 150 if name in BLOCKS else 60)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The base in GGUF."""
    return convert([str(BASE), "--outfile", str(tmp_path_factory.mktemp("target") / "base.gguf")])


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Callable[[str], list[str]]:
    """Export a trained head and convert it, once; return what serves it, as the export says."""

    @cache
    def exported(name: str) -> list[str]:
        out = tmp_path_factory.mktemp("exports") / name
        lines, _ = export_head(head(name), base(), "llama_cpp", out, prompts_and_texts())
        conversion, serving = (shlex.split(line) for line in lines)
        convert(conversion[2:])
        return serving[1:]

    return exported


@pytest.fixture
def ask(target, export, tmp_path) -> Callable[..., dict[str, Any]]:
    """Ask a server of its own, with a head if one is named."""

    def asked(
        name: str = "", *, num_tokens: int = DEPTH, parallel: int = 1, without: str = ""
    ) -> dict[str, Any]:
        arguments = export(name) if name else ["-m", "BASE.gguf"]
        changed = {"BASE.gguf": str(target)}
        if num_tokens != DEPTH:
            changed[str(DEPTH)] = str(num_tokens)
        arguments = [changed.get(one, one) for one in arguments if one != without]
        arguments += ["--parallel", str(parallel), "--ctx-size", str(256 * parallel)]
        return serve(arguments, prompts(), NEW_TOKENS, tmp_path / "server.log")

    return asked


def engine_counts(name: str, depth: int = DEPTH) -> dict[str, list[int]]:
    """Return what our replay of a chain has as llama.cpp counts it.

    llama.cpp leaves the last of a request's tokens to the base: it drafts one less than there is
    room for, and nothing for the last token.
    """
    counts, lengths = [], []
    for prompt, text in zip(prompts(), said(), strict=True):
        ranks = guess_ranks(base(), head(name), prompt, text[:NEW_TOKENS], width=1)
        counts.append(replay(ranks, policies.chain(depth)))
        anchor = 0
        while (drafted := min(depth, len(ranks) - anchor - 1)) > 0:
            lengths.append(drafted)
            anchor += int((ranks[anchor, :drafted] == 0).cumprod(0).sum()) + 1
    total = DepthCounts.total(counts, depth)
    return {
        "spec_decode_num_draft_tokens_total": [sum(lengths)],
        "spec_decode_num_accepted_tokens_total": [sum(total.accepted)],
        "spec_decode_num_drafts_total": [len(lengths)],
        "spec_decode_num_accepted_tokens_per_pos_total": total.accepted,
    }


def check(answer: dict[str, Any], name: str) -> None:
    """Text as the base's own, and counts as ours."""
    assert answer["tokens"] == [text[:NEW_TOKENS] for text in said()]
    wanted = engine_counts(name)
    assert {one: answer["counters"][one] for one in wanted} == wanted
    for timings, total in (("draft_n", "draft_tokens"), ("draft_n_accepted", "accepted_tokens")):
        (count,) = wanted[f"spec_decode_num_{total}_total"]
        assert sum(one[timings] for one in answer["timings"]) == count


def test_llama_cpp_alone_says_what_the_base_says(ask):
    assert ask()["tokens"] == [text[:NEW_TOKENS] for text in said()]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_heads_of_these_tests_are_right_and_wrong_at_every_depth(name):
    counts = engine_counts(name)
    per_depth = counts["spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_depth[-1] > 0
    assert per_depth[0] < counts["spec_decode_num_drafts_total"][0]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_head_is_lossless_and_counts_as_replayed(name, ask):
    check(ask(name), name)


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_requests_served_together_count_as_replayed(name, ask):
    check(ask(name, parallel=3), name)


def test_chains_drafted_together_on_the_backend_accept_less(ask):
    """So exports turn that off; where this fails llama.cpp was mended, and they need not."""
    answer, wanted = ask("eagle3", parallel=3, without=ALONE), engine_counts("eagle3")
    assert answer["tokens"] == [text[:NEW_TOKENS] for text in said()]
    total = "spec_decode_num_accepted_tokens_total"
    assert 0 < answer["counters"][total][0] < wanted[total][0]


def test_a_chain_may_be_shorter_than_the_head(ask):
    counters = ask("eagle3", num_tokens=DEPTH - 1)["counters"]
    wanted = engine_counts("eagle3", DEPTH - 1)
    assert {one: counters[one] for one in wanted} == wanted


def test_a_shorter_block_is_another_network(ask):
    """Slots that are not asked for are not there for others to see: so exports ask for all."""
    answer, wanted = ask("dspark", num_tokens=DEPTH - 1), engine_counts("dspark", DEPTH - 1)
    assert answer["tokens"] == [text[:NEW_TOKENS] for text in said()]
    assert {one: answer["counters"][one] for one in wanted} != wanted
