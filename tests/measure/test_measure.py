"""Replay gives the loop's integers, and the report shows the counts."""

import functools
import itertools
import json
from dataclasses import make_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head, Projection, States
from specheads.core.errors import InputError
from specheads.core.files import to_json
from specheads.data.prompts import Prompt, PromptSet
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.measure import offline, online, report, speed, summary
from specheads.measure.counts import DepthCounts
from specheads.measure.evaluation import measure_contexts
from specheads.measure.generation import (
    BaseTexts,
    GenerationSettings,
    continue_prompts,
    decode_prompts,
)
from specheads.measure.offline import replay
from specheads.measure.results import (
    Degenerate,
    Gain,
    Lossless,
    Online,
    PhaseRate,
    Results,
    read_results,
)
from tests import tiny
from tests.results import bare

DEPTH = 4
TREE = policies.Static([(0,), (1,), (2,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)])


class Habit(Head):
    """Drafts the most frequent next token of the base's own text, plus noise.

    The noise comes from the base's hidden state and differs by level, so features of a wrong
    position, or a wrong level, change the drafts.
    """

    def __init__(self, noise: float = 0.0, depth: int = DEPTH) -> None:
        width = tiny.base().width
        super().__init__(make_dataclass("Config", [("depth", int)])(depth), width, tiny.VOCAB)
        generator = torch.Generator().manual_seed(5)
        draw = torch.randn(depth, tiny.VOCAB, width, generator=generator, dtype=torch.float64)
        self.noise = noise * draw / width
        self.habits = _habits()

    def states(self, features: Features, tokens: Tensor, anchors: Tensor | None = None) -> States:
        del anchors
        for level in range(self.depth):
            last = tokens.roll(-1 - level, dims=1)
            yield self.habits[last] + features.hidden @ self.noise[level].T

    def projection(self, level: int) -> Projection:
        del level
        return Projection(torch.eye(tiny.VOCAB, dtype=torch.float64))

    def begin(self, committed, memory):
        del memory
        hidden = committed.last_hidden()
        return self.habits[committed.root()] + hidden @ self.noise[0].T, (hidden, 1)

    def extend(self, state, tokens, parents):
        del parents
        hidden, level = state
        return self.habits[tokens] + hidden @ self.noise[level].T, (hidden, level + 1)


@functools.cache
def _habits() -> Tensor:
    counts = torch.zeros(tiny.VOCAB, tiny.VOCAB, dtype=torch.float64)
    for text in tiny.continuations():
        for token, after in itertools.pairwise(text):
            counts[token, after] += 1
    # equally frequent tokens are ordered by id, so that topk has no ties
    return counts - torch.arange(tiny.VOCAB) / 1e3


def base_texts(max_new_tokens: int = tiny.NEW_TOKENS) -> list[list[int]]:
    return [text[:max_new_tokens] for text in tiny.continuations()]


def prompts_and_texts(max_new_tokens: int = tiny.NEW_TOKENS) -> BaseTexts:
    return BaseTexts(tiny.prompts(), base_texts(max_new_tokens))


def online_counts(
    head: Head,
    policy: policies.TreePolicy | None = None,
    max_new_tokens: int = tiny.NEW_TOKENS,
    batch_size: int = 3,
) -> list[DepthCounts]:
    decoded = decode_prompts(
        tiny.base(),
        head,
        tiny.prompts(),
        GenerationSettings(tree=policy, max_new_tokens=max_new_tokens, batch_size=batch_size),
    )
    return [text.counts for text in decoded]


def replay_texts(head: Head, policy: policies.Static, texts: list[list[int]]) -> list[DepthCounts]:
    return [
        replay(offline.guess_ranks(tiny.base(), head, prompt, text, width=3), policy)
        for prompt, text in zip(tiny.prompts(), texts, strict=True)
    ]


# --- counting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [policies.chain(DEPTH), TREE], ids=["chain", "tree"])
def test_replay_and_loop_agree_at_end_of_text(policy, monkeypatch):
    ends = base_texts()[0][17], base_texts()[2][9]
    monkeypatch.setattr(FrozenBase, "eos_ids", ends)
    generation = GenerationSettings(max_new_tokens=tiny.NEW_TOKENS, batch_size=3)
    texts = continue_prompts(tiny.base(), tiny.prompts(), generation)
    assert min(map(len, texts)) < tiny.NEW_TOKENS
    head = Habit(0.5)
    assert replay_texts(head, policy, texts) == online_counts(head, policy)


def test_tree_offers_a_depth_only_below_the_accepted_path():
    # the second-best guess is a leaf: after it, depth 1 is not offered
    ranks = torch.tensor([[1, 0], [0, 0], [0, 0], [0, 0], [5, 0], [0, 0], [0, 0]])
    counts = replay(ranks, policies.Static([(0,), (1,), (0, 0)]))
    # anchors 0 (rank path 1, leaf), 2 (both accepted), 5 (the text ends after one draft)
    assert counts == DepthCounts(forwards=3, offered=[3, 2], accepted=[3, 1])


# --- online ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [policies.chain(DEPTH), TREE], ids=["chain", "static"])
def test_names_of_vllm_follow_its_formulas(tree):
    generation = GenerationSettings(max_new_tokens=tiny.NEW_TOKENS, batch_size=3, tree=tree)
    section, *_ = online.measure_online(tiny.base(), Habit(0.5), prompts_and_texts(), generation)
    accepted = sum(depth.accepted for depth in section.per_depth)
    assert (section.count, section.num_drafts) == (3, section.forwards)
    assert section.num_draft_tokens == (tree.num_nodes - 1) * section.forwards
    assert section.mean_acceptance_length == section.tokens_per_forward
    assert section.draft_acceptance_rate == accepted / section.num_draft_tokens
    shares = section.per_position_acceptance_rates
    assert 1 + sum(shares) == pytest.approx(section.mean_acceptance_length)
    assert shares[0] == section.conditional_acceptance[0].rate


def test_groups_are_ordered_by_length_and_each_prompt_is_in_one_subset():
    lengths, kinds = ["16k", "8k", "8k"], ["a", "a", "b"]
    generation = GenerationSettings(max_new_tokens=tiny.NEW_TOKENS)
    groups = {"input_length": lengths, "category": kinds, "thinking": [""] * 3}
    texts = replace(prompts_and_texts(), groups=groups)
    section, *_ = online.measure_online(tiny.base(), Habit(0.5), texts, generation)
    assert [(name, rate.count) for name, rate in section.by_input_length.items()] == [
        ("8k", 2), ("16k", 1),
    ]  # fmt: skip
    assert section.by_thinking == {}
    counts = online_counts(Habit(0.5))
    assert section.by_category["b"].tokens_per_forward == counts[2].tokens_per_forward
    names = [(labels["input_length"], labels["category"]) for labels, _ in section.subsets]
    assert names == [("8k", "a"), ("8k", "b"), ("16k", "a")]
    rows = report.acceptance_csv("set", section).splitlines()
    assert rows[0].startswith("subset,input_length,category,thinking,prompts,tokens_per_forward,")
    assert [row.split(",")[0] for row in rows[1:]] == ["set/8k/a", "set/8k/b", "set/16k/a"]


def test_looping_texts_are_flagged_and_left_out_of_the_second_rate():
    counts = [DepthCounts(10, [10], [9]), DepthCounts(10, [10], [2]), DepthCounts(10, [10], [4])]
    texts = [[7, 8] * 30, list(range(60)), list(range(60))]
    section = online.count_loops(counts, texts)
    assert section.flagged == 1
    assert section.without is not None
    assert section.without.tokens_per_forward == 1.3
    assert online.count_loops(counts[:1], texts[:1]).without is None


def test_contexts_equal_a_replay_at_each_length_and_are_paired():
    head, generation = Habit(0.5), GenerationSettings(max_new_tokens=16, tree=TREE)
    rows = results().contexts
    for row, prompts in zip(rows, longer(), strict=True):
        tokens = [prompt.tokens for prompt in prompts.prompts]
        texts = BaseTexts(tokens, continue_prompts(tiny.base(), tokens, generation))
        alone = offline.measure_offline(tiny.base(), head, texts, generation)
        assert (row.context, row.interval) == (len(tokens[0]), alone.interval)
        assert row.tokens_per_forward == alone.tokens_per_forward
        assert row.over_first.ratio == row.tokens_per_forward / rows[0].tokens_per_forward
        assert row.speed is not None
    assert rows[0].over_first.interval == (1.0, 1.0)
    assert rows[0].tokens_per_forward != rows[1].tokens_per_forward


# --- speed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [policies.chain(2), policies.NOTHING], ids=["head", "no head"])
def test_speed_tells_head_and_prompt_lookup_apart(inner, monkeypatch):
    def fake(base, drafter, unit, generation):
        del base, unit
        seconds = 0.5 if isinstance(generation.tree, HybridTree) else 1.25
        seconds = seconds if drafter else 2.0
        return speed.Timing(seconds, seconds, 10, 10, 11)

    monkeypatch.setattr(speed, "time_generate", fake)
    generation = GenerationSettings(max_new_tokens=9, tree=HybridTree(inner, 3))
    section = speed.measure_speed(tiny.base(), Habit(), tiny.prompts(), generation)
    assert section.speedup == 4.0
    if inner is policies.NOTHING:
        assert section.head_alone is None
    else:
        assert section.head_alone == Gain(ratio=1.6, interval=(1.6, 1.6))
        verdict = summary.verdict(replace(results(), speed=section))
        assert "; head alone 1.60x (1.60 to 1.60), with prompt lookup 4.00x; " in verdict
    chain = replace(generation, tree=policies.chain(2))
    assert speed.measure_speed(tiny.base(), Habit(), tiny.prompts(), chain).head_alone is None


def test_steps_are_timed_from_the_end_of_the_first_one():
    generation = GenerationSettings(max_new_tokens=9)
    timing = speed.time_generate(tiny.base(), None, tiny.prompts()[:1], generation)
    assert (timing.new_tokens, timing.forwards, timing.num_steps) == (9, 8, 7)


def test_repetitions_alternate_the_order_and_warm_up_is_not_timed(monkeypatch):
    calls = []

    def fake(base, drafter, unit, generation):
        del base, generation
        calls.append((drafter is not None, len(unit)))
        # the base alone writes half as many tokens in the same time
        seconds = 50.0 if len(calls) <= 2 else 1.0
        factor = 1 if drafter else 2
        return speed.Timing(seconds, factor * seconds, 10, 10 * len(unit) // factor, 11)

    monkeypatch.setattr(speed, "time_generate", fake)
    generation = GenerationSettings(max_new_tokens=9, batch_size=2)
    generation = replace(generation, repeats=3)
    section = speed.measure_speed(tiny.base(), Habit(), tiny.prompts(), generation)
    is_drafted = [drafted for drafted, _ in calls[2:]]
    assert is_drafted == [False, True] * 2 + [True, False] * 2 + [False, True] * 2
    assert [size for _, size in calls[2:6]] == [2, 2, 1, 1]
    assert section.speedup == 2.0
    assert section.step_overhead == 0.5
    assert section.base_tokens_per_second == 30 / 4


# --- report ------------------------------------------------------------------------------------

CONTRACT = {
    "schema": None,
    "head": {"kind", "depth", "parameters"},
    "base": {"name", "revision", "fingerprint", "parameters"},
    "prompts": {"name", "version", "count"},
    "settings": {
        *("temperature", "max_new_tokens", "tree", "num_nodes"),
        *("batch_size", "dtype", "device", "seed"),
    },
    "offline": {"tokens_per_forward", "interval", "per_depth", "top_k_accuracy"},
    "online": {
        *("tokens_per_forward", "interval", "per_depth", "by_category"),
        "tokens_per_forward_without_bonus",
    },
    "speed": {
        *("base_tokens_per_second", "tokens_per_second", "speedup", "interval", "step_overhead")
    },
    "lossless": {"compared", "identical", "first_divergence_logit_gap"},
    "degenerate": {"flagged", "without"},
    "provenance": set(),
}
HISTORY = [
    {"step": step, "phase": "corpus" if step < 30 else "distilled", "loss": 9 - step / 10}
    | {"loss/depth_0": 8 - step / 10, "loss/depth_1": 10 - step / 10}
    for step in range(0, 60, 5)
]


@functools.cache
def longer() -> list[PromptSet]:
    """Return the prompts after other tokens, at two lengths."""
    rows = [[*range(1, 50), *prompt] for prompt in tiny.prompts()]
    return [
        PromptSet.of("longer", [Prompt(row[-length:], "", "") for row in rows])
        for length in (24, 48)
    ]


def sections(tree: policies.TreePolicy) -> dict[str, Any]:
    """Return the sections of a measured head."""
    head, texts = Habit(0.5), prompts_and_texts(16)
    generation = GenerationSettings(max_new_tokens=16, tree=tree, repeats=1, speed_prompts=1)
    names = "online", "lossless", "degenerate"
    measured = zip(names, online.measure_online(tiny.base(), head, texts, generation), strict=True)
    return dict(measured) | {
        "offline": offline.measure_offline(tiny.base(), head, texts, generation),
        "speed": speed.measure_speed(tiny.base(), head, texts.prompts, generation),
        "contexts": measure_contexts(tiny.base(), head, longer(), generation),
    }


@functools.cache
def results() -> Results:
    return replace(
        bare(head={"kind": "<habit>", "depth": DEPTH, "parameters": 0}),
        **sections(TREE),
        phases=[PhaseRate(phase="corpus", tokens_per_forward=1.25, interval=(1.0, 1.5))],
    )


def with_speed(speedup: float, low: float, high: float) -> Results:
    timed = results().speed
    assert timed is not None
    changed = replace(timed, speedup=speedup, interval=(low, high), step_overhead=1.9)
    return replace(results(), speed=changed)


def test_sections_have_every_key_of_the_contract():
    stored = to_json(results())
    assert {*CONTRACT} <= {*stored}
    assert all(keys <= {*stored[section]} for section, keys in CONTRACT.items() if keys)


def test_report_folder_is_complete_and_has_no_stale_files(tmp_path):
    (tmp_path / "report").mkdir()
    for name in ("texts.json", "acceptance.csv", "learning.png", "compare.json"):
        (tmp_path / "report" / name).touch()
    page = report.write_report(tmp_path / "report", results(), HISTORY)
    # stale files of an earlier report are removed, other files are kept
    (page.parent / "compare.json").unlink()
    names = {path.name for path in page.parent.iterdir()}
    assert names == {
        *("report.html", "results.json", "acceptance.csv"),
        *(f"{plot}.png" for plot in ("acceptance", "contexts", "loss")),
    }
    assert '<figure id="plot-contexts">' in page.read_text()
    assert '<section id="by-context-length">' in page.read_text()
    assert json.loads((page.parent / "results.json").read_text()) == to_json(results())
    assert read_results(Results, page.parent / "results.json") == results()
    for path in page.parent.glob("*.png"):
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000


@pytest.mark.parametrize(
    "files",
    [
        {"loss.png": "mine"},
        {"results.json": "mine"},
        {"results.json": '{"accuracy": 1}'},
        {"results.json": "[]", "report.html": "mine"},
        {"texts.json": "mine"},
        {"acceptance.csv": "mine", "results.json": '{"schema": 1}'},
    ],
)
def test_report_replaces_no_files_of_others(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="which no report wrote; name another folder"):
        report.refuse_other_files(tmp_path)


def test_report_replaces_an_earlier_one_next_to_other_files(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    report.refuse_other_files(tmp_path)
    report.write_report(tmp_path, results(), HISTORY)
    report.refuse_other_files(tmp_path)
    assert (tmp_path / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("speedup", "low", "high", "word"),
    [(0.93, 0.9, 0.97, "does not pay"), (1.04, 0.98, 1.1, "may pay"), (1.4, 1.3, 1.5, "pays")],
)
def test_verdict_states_whether_speculation_pays(speedup, low, high, word):
    sentence = summary.verdict(with_speed(speedup, low, high))
    assert f"Speculation {word} on this machine" in sentence
    measured = results().online
    assert measured is not None
    figures = f"{speedup:.2f}x", f"{measured.tokens_per_forward:.2f} tokens", "1.90 times"
    assert all(figure in sentence for figure in figures)
    assert summary.is_worthwhile(with_speed(speedup, low, high)) == (speedup > 1)


def test_wrong_decoding_comes_first_in_the_verdict():
    parted = Lossless(compared=3, identical=1, first_divergence_logit_gap=3.2, verdict="wrong")
    wrong = replace(with_speed(1.4, 1.3, 1.5), lossless=parted)
    assert summary.verdict(wrong).startswith("Decoding is wrong: ")
    assert not summary.is_worthwhile(wrong)
    assert 'class="verdict no"' in report.render(wrong, {})


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 11])
def test_replay_and_loop_agree_at_every_token_limit(limit):
    head = Habit(0.5)
    replay = replay_texts(head, policies.chain(DEPTH), base_texts(limit))
    assert replay == online_counts(head, max_new_tokens=limit)
    assert [one.new_tokens for one in replay] == [limit - 1] * 3


def test_only_matched_samples_are_compared_with_the_base_alone():
    def sample(seed: int, acceptance: str) -> tuple[Online, Lossless, Degenerate]:
        generation = GenerationSettings(
            max_new_tokens=16, batch_size=2, sampling=Sampling(temperature=1.0, seed=seed)
        )
        continuations = continue_prompts(tiny.base(), tiny.prompts(), generation)
        generation = replace(generation, tree=TREE, acceptance=acceptance)
        texts = BaseTexts(tiny.prompts(), continuations)
        return online.measure_online(tiny.base(), Habit(0.5), texts, generation)

    section, lossless, _ = sample(3, "match")
    assert lossless.compared == lossless.identical == 3
    assert section.new_tokens == 3 * 15
    assert section == sample(3, "match")[0]
    assert section != sample(4, "match")[0]
    assert sample(3, "rejection")[1].compared == 0
