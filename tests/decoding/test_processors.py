"""Requests with biases, bad words, penalties and constraints: each node by its own prefix."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.tree import TokenTree
from specheads.decoding import noise
from specheads.decoding.engine import Engine
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.processors import build_processors
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling, SamplingState, expand_sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from tests.decoding import test_accept
from tests.decoding.markov import Markov
from tests.decoding.test_sampling import VOCAB, toy
from tests.slow import slow_except

EOS, PROMPTS, NEW = 3, [[2, 0], [1, 4, 4, 0], [0, 2, 1]], 7


class Grammar:
    """Allow tokens by the sum of the answer; fail after a prefix that the base cannot reach."""

    def __init__(self, eos: int = EOS) -> None:
        self.eos = eos
        self.calls: list[tuple[int, int]] = []

    def __call__(self, index: int, tokens: Tensor) -> list[int]:
        self.calls.append((index, len(tokens)))
        prompt = PROMPTS[index]
        text = tokens.tolist()
        assert text[: len(prompt)] == prompt
        for end in range(len(prompt), len(text)):
            assert text[end] in self.allowed(text[len(prompt) : end])
            assert text[end] != self.eos
        return self.allowed(text[len(prompt) :])

    @staticmethod
    def allowed(answer: list[int]) -> list[int]:
        return [token for token in range(VOCAB) if (sum(answer) + len(answer) + token) % 3 != 1]


REQUESTS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {1: 2.5, (2,): -1.5, (0, 3): -math.inf, (4, 1, 0): 6.0}},
    "bad words": {"bad_words": [[4], [1, 2], (0, 0, 1)]},
    "smallest length": {"min_new_tokens": 4},
    "penalties": {"presence_penalty": 1.3, "frequency_penalty": 0.8, "repetition_penalty": 1.4},
    "constraint": {"prefix_allowed_tokens_fn": Grammar()},
    "nothing": {},
}
REQUESTS["everything"] = {key: value for given in REQUESTS.values() for key, value in given.items()}
REQUESTS["everything"]["bad_words"] = [[1, 2], [0, 0, 1]]


def expected_scores(
    given: dict[str, Any], text: list[int], length: int, logits: Tensor
) -> list[float]:
    """Return the scores after a text whose prompt has this length, rule by rule, token by token."""
    scores, answer = logits.tolist(), text[length:]
    for token in range(VOCAB):
        for key, bias in given.get("logit_bias", {}).items():
            sequence = list(key) if isinstance(key, tuple) else [key]
            if [*text, token][-len(sequence) :] == sequence:
                scores[token] += bias
        if token in text:
            penalty = given.get("repetition_penalty", 1.0)
            scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        scores[token] -= given.get("presence_penalty", 0.0) * (token in answer)
        scores[token] -= given.get("frequency_penalty", 0.0) * answer.count(token)
        if any([*text, token][-len(word) :] == list(word) for word in given.get("bad_words", [])):
            scores[token] = -math.inf
        if token == EOS and len(answer) < given.get("min_new_tokens", 0):
            scores[token] = -math.inf
        if "prefix_allowed_tokens_fn" in given and token not in Grammar.allowed(answer):
            scores[token] = -math.inf
    return scores


def base_logits(text: list[int]) -> Tensor:
    return toy().model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].double()


def expected_answer(given: dict[str, Any], prompt: list[int], temperature: float, seed: int) -> Any:
    """Return the answer of whole forwards over every text."""
    text = list(prompt)
    while len(text) < len(prompt) + NEW and EOS not in text[len(prompt) :]:
        scores = torch.tensor(expected_scores(given, text, len(prompt), base_logits(text)))
        if temperature:
            keys = noise.bits(torch.tensor(seed), torch.tensor(len(text)), noise.TOKEN)
            scores = scores / temperature + noise.gumbel(keys, VOCAB, torch.float32)
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


def markov(depth: int = 4, seed: int = 2) -> Markov:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return Markov(2 * table, depth)


class FewTokens(Markov):
    """A drafter that knows two tokens, which constraints may forbid."""

    def __init__(self) -> None:
        super().__init__(markov().table[:, :2], 4)

    def to_tokens(self, drafted: Tensor) -> Tensor:
        return drafted + 3


TREES: dict[str, Callable[[], tuple[policies.TreePolicy, Markov | None, str]]] = {
    "alone": lambda: (policies.NOTHING, None, "match"),
    "chain": lambda: (policies.chain(4), markov(), "match"),
    "stopping chain": lambda: (policies.chain(4, confidence=0.3), markov(), "match"),
    "static": lambda: (policies.Static([(0,), (1,), (0, 0), (1, 1), (0, 0, 2)]), markov(), "match"),
    "best first": lambda: (policies.BestFirst(9, 3, 2, 2), markov(), "match"),
    "few tokens": lambda: (policies.BestFirst(9, 3, 2, 2), FewTokens(), "match"),
    "product": lambda: (policies.Product((2, 2), 6), markov(), "match"),
    "sampled": lambda: (policies.Sampled((3, 2)), markov(), "match"),
    "rejection": lambda: (policies.Sampled((2, 1)), markov(), "rejection"),
    "copied": lambda: (HybridTree(policies.chain(3), 3), markov(), "match"),
}


def decode(name: str, samplings: Sequence[Sampling], coupled: bool, paged: bool) -> Decoding:
    policy, drafter, acceptance = TREES[name]()
    pool = toy().pool(60, block_size=4) if paged else None
    return generate(
        toy(), drafter, PROMPTS * 2, max_new_tokens=NEW, sampling=samplings, tree=policy,
        acceptance=acceptance, coupled=coupled, eos_ids=(EOS,), pool=pool,
    )  # fmt: skip


# above temperature zero rejection emits another draw: its law is integrated below
CASES = [*itertools.product(TREES, (0.0, 1.0))]
CASES.remove(("rejection", 1.0))


@pytest.mark.parametrize(
    ("name", "temperature"),
    slow_except([("rejection", 0.0), *(case for case in CASES if case[1])], CASES),
)
def test_drafts_do_not_change_the_answer_of_a_request(name, temperature):
    kinds = [*REQUESTS]
    for turn in range(len(kinds)):
        # six requests at once, and half of them greedy
        given = [REQUESTS[kinds[(turn + row) % len(kinds)]] for row in range(6)]
        temperatures = [temperature * (row % 2 == 0) for row in range(6)]
        samplings = [
            Sampling(**settings, temperature=chosen, seed=row)
            for row, (settings, chosen) in enumerate(zip(given, temperatures, strict=True))
        ]
        # the grammar knows three prompts
        samplings = expand_sampling(samplings[:3], 3) + expand_sampling(samplings[3:], 3)
        decoding = decode(name, samplings, coupled=turn % 3 > 0, paged=turn % 2 > 0)
        rows = zip(given, PROMPTS * 2, temperatures, range(6), strict=True)
        assert decoding.tokens == [expected_answer(*row) for row in rows]


# --- laws ----------------------------------------------------------------------------------------


def complete_tree(depth: int) -> tuple[TokenTree, list[tuple[int, ...]]]:
    """Return the tree of every text below the root of the first prompt, and these texts."""
    prefixes = [
        text for size in range(depth + 1) for text in itertools.product(range(VOCAB), repeat=size)
    ]
    nodes = {prefix: node for node, prefix in enumerate(prefixes)}
    tokens = [prefix[-1] if prefix else PROMPTS[0][-1] for prefix in prefixes]
    parents = [nodes[prefix[:-1]] if prefix else -1 for prefix in prefixes]
    return TokenTree(torch.tensor([tokens]), torch.tensor([parents])), prefixes


def sampling_state(settings: Sampling) -> SamplingState:
    prompt = PROMPTS[0]
    processors = build_processors(settings, len(prompt), [EOS], torch.device("cpu"))
    lengths, text = torch.tensor([len(prompt) - 1]), torch.tensor([[*prompt, *[0] * NEW]])
    return SamplingState([settings], lengths, text, VOCAB, torch.float64, processors=[processors])


def is_reached(given: dict[str, Any], prefix: tuple[int, ...]) -> bool:
    return all(
        math.isfinite(
            expected_scores(given, [*PROMPTS[0], *prefix[:end]], 2, torch.zeros(VOCAB))[prefix[end]]
        )
        for end in range(len(prefix))
    )


def node_laws(given: dict[str, Any], depth: int, table: Callable[[list[int]], Tensor]) -> Any:
    """Return the law after each text, from the processors at the nodes of one tree."""
    tree, prefixes = complete_tree(depth)
    logits = torch.stack([table([*PROMPTS[0], *prefix]) for prefix in prefixes])[None]
    law = sampling_state(Sampling(**given, temperature=0.9)).tree_probs(
        tree, logits, tree.ancestors()
    )
    return dict(zip(prefixes, law[0], strict=True))


@pytest.mark.parametrize("name", REQUESTS)
def test_law_of_every_text_is_that_of_its_own_prefix(name):
    given = REQUESTS[name]
    laws = node_laws(given, 3, base_logits)
    for prefix, law in laws.items():
        text = [*PROMPTS[0], *prefix]
        if EOS in prefix or not is_reached(given, prefix):
            continue
        scores = torch.tensor(expected_scores(given, text, 2, base_logits(text)), dtype=law.dtype)
        torch.testing.assert_close(law, (scores / 0.9).softmax(-1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("branches", [(1, 1), (2, 1)])
@pytest.mark.parametrize("judge", ["rejection", "match, drawn children", "match, best children"])
def test_rules_have_the_law_of_constrained_requests(judge, branches, request):
    # no end of text: after it a step may emit anything
    given = REQUESTS["everything"] | {"logit_bias": {1: 1.5, (0, 2): -math.inf, EOS: -math.inf}}
    table = markov(seed=5).table.double()
    base = node_laws(given, 2, base_logits)
    draft = node_laws(given, 2, lambda text: table[text[-1]])
    # transformers' biases are float32, and fail if that is not the default
    request.getfixturevalue("in_float64")
    by_rule, children = test_accept.EXACT[judge]
    law = test_accept.emitted(
        by_rule, test_accept.draft_outcomes(draft, branches, children), base, 2
    )
    expected = torch.zeros(VOCAB, VOCAB)
    for text in itertools.product(range(VOCAB), repeat=2):
        if is_reached(given, text):
            chances = [
                (
                    torch.tensor(expected_scores(given, prefix, 2, base_logits(prefix))) / 0.9
                ).softmax(-1)[text[size]]
                for size in range(2)
                for prefix in [[*PROMPTS[0], *text[:size]]]
            ]
            expected[text] = math.prod(map(float, chances))
    assert (law - expected).abs().max() < 1e-6


def test_planted_prefix_of_a_sibling_is_caught(monkeypatch: pytest.MonkeyPatch):
    right = SamplingState._paths

    def wrong_paths(state: SamplingState, tree: TokenTree, ancestors: Tensor) -> Any:
        paths, lengths = right(state, tree, ancestors)
        return paths.roll(1, dims=1), lengths

    monkeypatch.setattr(SamplingState, "_paths", wrong_paths)
    with pytest.raises(AssertionError):
        test_law_of_every_text_is_that_of_its_own_prefix("penalties")


# --- drafts and refusals -------------------------------------------------------------------------


def test_constraint_reaches_drafts_and_is_called_once_for_a_prefix():
    grammar = Grammar(eos=-1)
    settings = Sampling(prefix_allowed_tokens_fn=grammar)
    forwards = {}
    for coupled in (True, False):
        # a drafter that knows the base's logits after one token, and nothing of the grammar
        drafter = Markov(torch.stack([base_logits([token]) for token in range(VOCAB)]), 4)
        decoding = generate(
            toy(), drafter, PROMPTS, max_new_tokens=40, sampling=settings, eos_ids=(),
            tree=policies.chain(4), coupled=coupled,
        )  # fmt: skip
        forwards[coupled] = sum(decoding.forwards)
    assert forwards[True] < forwards[False]
    grammar.calls.clear()
    generate(
        toy(), markov(), PROMPTS[:1], max_new_tokens=12, sampling=settings, tree=policies.chain(4)
    )
    steps = len(grammar.calls)
    assert steps <= 5 * 13


def in_32_bits(tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def as_mask(tokens: list[int]) -> Tensor:
    return torch.isin(torch.arange(VOCAB), torch.tensor(tokens))


@pytest.mark.parametrize("collect", [set, torch.tensor, in_32_bits, as_mask])
def test_allowed_tokens_may_be_a_set_a_tensor_or_a_mask(collect):
    def answer(form: Callable[[list[int]], Any]) -> list[list[int]]:
        settings = Sampling(prefix_allowed_tokens_fn=lambda _, text: form([1, len(text) % 5]))
        return generate(
            toy(), markov(), PROMPTS[:1], max_new_tokens=6, eos_ids=(), sampling=settings,
            tree=policies.chain(2),
        ).tokens  # fmt: skip

    assert answer(collect) == answer(list)


def test_engine_answers_constrained_requests_next_to_plain_ones():
    engine = Engine(toy(), markov(), tree=policies.BestFirst(9, 3, 2, 2), max_batch=2)
    requests = [REQUESTS[name] for name in ("bias", "nothing", "penalties", "bad words")]
    streams = [
        engine.submit(Request(
            prompt=PROMPTS[0], max_new_tokens=NEW, eos_ids=(EOS,), sampling=Sampling(**given)
        ))
        for given in requests
    ]  # fmt: skip
    engine.run()
    expected = [expected_answer(given, PROMPTS[0], 0.0, 0) for given in requests]
    assert [stream.tokens for stream in streams] == expected


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"logit_bias": {1: math.inf}}, "logit_bias must be token ids"),
        ({"logit_bias": [1]}, "logit_bias must be token ids"),
        ({"bad_words": [[]]}, "bad_words must be lists of token ids"),
        ({"bad_words": ["no"]}, "bad_words must be lists of token ids"),
        ({"min_new_tokens": -1}, "min_new_tokens must be a whole number, at least 0"),
        ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn must be a function"),
        ({"bad_words": [[VOCAB]]}, "tokens of logit_bias and bad_words must be below"),
        ({"prefix_allowed_tokens_fn": lambda *_: []}, "must allow at least one token, got none"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1, -1]}, "token ids from 0 to 4, got -1; use"),
        ({"prefix_allowed_tokens_fn": lambda *_: [VOCAB]}, "token ids from 0 to 4, got 5; use"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings, rule):
    with pytest.raises(InputError, match=rule):
        generate(toy(), None, [[2, 0]], max_new_tokens=1, sampling=Sampling(**settings))
