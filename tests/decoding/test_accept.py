"""Acceptance rules, proven by integrating them over the random numbers they are given."""

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from specheads.core.tree import BranchSampling, TokenTree, chain
from specheads.decoding import accept, noise
from specheads.decoding.accept import Verdict, draw, match, rejection, typical
from specheads.decoding.trees.policies import Static
from tests.slow import slow_except

pytestmark = pytest.mark.usefixtures("in_float64")

GOLDEN = Path(__file__).parents[1] / "golden"
MEDUSA_TREES = ("medusa_tree_mc_sim_7b_63", "medusa_tree_vicuna_7b_stage2")


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """Go down from the root while some child carries the token the base chose."""
    path = [0]
    while True:
        hits = [
            node
            for node, parent in enumerate(parents)
            if parent == path[-1] and tokens[node] == chosen[path[-1]]
        ]
        if not hits:
            return path, chosen[path[-1]]
        path.append(hits[0])


@st.composite
def judged_trees(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows of (tokens, parents, the base's token after each node) with three tokens."""
    num_nodes = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        tokens, parents = [0], [-1]
        while len(tokens) < num_nodes:
            free = [
                (parent, token)
                for parent in range(len(tokens))
                for token in range(3)
                if (parent, token) not in zip(parents, tokens, strict=True)
            ]
            parent, token = draw(st.sampled_from(free))
            parents.append(parent)
            tokens.append(token)
        chosen = draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes))
        rows.append((tokens, parents, chosen))
    return rows


@given(judged_trees())
def test_the_verdict_is_that_of_a_walk_from_the_root(rows):
    tokens, parents, chosen = zip(*rows, strict=True)
    tree = TokenTree(torch.tensor(tokens), torch.tensor(parents))
    verdict = match(tree, torch.tensor(chosen))
    for row, judged in enumerate(rows):
        count = int(verdict.count[row])
        decision = (verdict.path[row, :count].tolist(), int(verdict.bonus[row]))
        assert decision == walk(*judged)


def medusa_tree(case: str, tokens: torch.Tensor) -> TokenTree:
    policy = Static(json.loads((GOLDEN / case / "config.json").read_text())["choices"])
    parents, *_ = policy.shape(tokens.device)
    return TokenTree(tokens, parents.expand(len(tokens), -1))


def assert_accepted(tree: TokenTree, verdict: Verdict, stored: dict, name: str) -> None:
    assert (verdict.count - 1).tolist() == stored[f"out.{name}.accept_length"].tolist()
    accepted = tree.tokens.gather(1, verdict.path)
    for row, count in enumerate(verdict.count.tolist()):
        expected = stored[f"out.{name}.accepted_tokens"][row]
        assert accepted[row, :count].tolist() == expected[expected >= 0].tolist()


@pytest.mark.parametrize("case", MEDUSA_TREES)
def test_medusas_own_code_accepts_the_same_tokens(case):
    io = load_file(GOLDEN / case / "io.safetensors")
    stored = load_file(GOLDEN / case / "typical.safetensors")
    tree, logits = medusa_tree(case, io["out.tree_candidates"]), io["in.tree_logits"]
    assert_accepted(tree, match(tree, logits.argmax(-1)), io, "greedy")
    for name, temperature in (("typical_t07", 0.7), ("typical_t1", 1.0)):
        verdict = typical(tree, (logits.double() / temperature).softmax(-1))
        assert_accepted(tree, verdict, stored, name)


# --- exactness: rules integrated over their random numbers ---------------------------------------

Prefix = tuple[int, ...]
Laws = dict[Prefix, torch.Tensor]
Children = Callable[[torch.Tensor, int], list[tuple[Prefix, float]]]
"""From a draft law and a number of children to the choices of children and their probabilities."""


def laws(vocab: int, depth: int, seed: int, zeros: float = 0.0) -> Laws:
    """Return a random law after every text of up to `depth` tokens, some tokens impossible."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            weights = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
            impossible = torch.rand(vocab, generator=generator) < zeros
            impossible[length % vocab] = False
            weights = weights.masked_fill(impossible, 0.0)
            table[prefix] = weights / weights.sum()
    return table


def sampled_children(law: torch.Tensor, width: int) -> list[tuple[Prefix, float]]:
    """Every way to sample without replacement; without tokens left, all are equally likely."""
    ways = []
    for tokens in itertools.permutations(range(len(law)), width):
        weights, probability = law.clone(), 1.0
        for index, token in enumerate(tokens):
            if weights.sum() == 0:
                weights = torch.ones_like(law)
                weights[[*tokens[:index]]] = 0.0
            probability *= float(weights[token] / weights.sum())
            weights[token] = 0.0
        if probability:
            ways.append((tokens, probability))
    return ways


def best_children(law: torch.Tensor, width: int) -> list[tuple[Prefix, float]]:
    return [(tuple(law.topk(width).indices.tolist()), 1.0)]


@dataclass
class DraftOutcome:
    """One outcome of drafting, a batch of one, with the probability of it."""

    weight: float
    tree: TokenTree
    prefixes: list[Prefix]

    def base_probs(self, base: Laws) -> torch.Tensor:
        return torch.stack([base[prefix] for prefix in self.prefixes])[None]


def draft_outcomes(
    draft: Laws,
    branches: Prefix,
    children: Children = sampled_children,
    stops: Callable[[float], bool] = lambda _: False,
) -> Iterator[DraftOutcome]:
    """Yield every tree a drafter with these laws can grow; nothing grows below a doubted token."""
    root: tuple[float, list[Prefix], list[int], list[bool]] = (1.0, [()], [-1], [False])
    outcomes, first, size = [root], 0, 1
    for width in branches:
        next_outcomes = []
        for weight, prefixes, parents, stopped in outcomes:
            nodes = range(first, first + size)
            ways = [children(draft[prefixes[node]], width) for node in nodes]
            for chosen in itertools.product(*ways):
                below = [
                    (node, token, stopped[node])
                    for node, (tokens, _) in zip(nodes, chosen, strict=True)
                    for token in tokens
                ]
                next_outcomes.append((
                    weight * math.prod(chance for _, chance in chosen),
                    prefixes + [(*prefixes[node], token) for node, token, _ in below],
                    parents + [-1 if absent else node for node, _, absent in below],
                    stopped + [
                        absent or stops(float(draft[prefixes[node]][token]))
                        for node, token, absent in below
                    ],
                ))  # fmt: skip
        outcomes, first, size = next_outcomes, first + size, size * width
    for weight, prefixes, parents, _ in outcomes:
        tokens = [0] + [prefix[-1] for prefix in prefixes[1:]]
        probs = torch.stack([draft[prefix] for prefix in prefixes[:first]])
        sampling = BranchSampling(branches, probs[None])
        yield DraftOutcome(
            weight,
            TokenTree(torch.tensor([tokens]), torch.tensor([parents]), branch_sampling=sampling),
            prefixes,
        )


def cells(*breaks: Iterable[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the unit cube where a rule's verdict can change; return middles and volumes.

    Between two breaks a rule does not depend on the number, so its integral is a finite sum.
    """
    middles, lengths = [], []
    for points in breaks:
        edges = torch.tensor(sorted({0.0, 1.0, *(min(point, 1.0) for point in points)}))
        # the middle of the last cell may round to one, which is no uniform number
        middles.append(((edges[1:] + edges[:-1]) / 2).clamp(max=1 - 2**-53))
        lengths.append(edges.diff())
    return torch.cartesian_prod(*middles, torch.zeros(1)), torch.cartesian_prod(
        *lengths, torch.ones(1)
    ).prod(-1)


def sums(law: torch.Tensor) -> list[float]:
    return law.cumsum(0).tolist()


def repeated(tree: TokenTree, count: int) -> TokenTree:
    assert tree.branch_sampling is not None
    sampling = BranchSampling(
        tree.branch_sampling.branches, tree.branch_sampling.probs.expand(count, -1, -1)
    )
    return TokenTree(
        tree.tokens.expand(count, -1), tree.parents.expand(count, -1), branch_sampling=sampling
    )


CellVerdicts = tuple[Verdict, torch.Tensor]
"""A verdict in every cell, and the cells' volumes."""


def by_rejection(outcome: DraftOutcome, base: Laws, shared: bool = False) -> CellVerdicts:
    """Integrate over one coin per node, and one number for the sample after the path.

    `shared` has all children of a node tested with one coin, which is wrong.
    """
    tree = outcome.tree
    assert tree.branch_sampling is not None
    coins: list[list[float]] = [[] for _ in outcome.prefixes]
    ends: list[float] = []
    for node, prefix in enumerate(outcome.prefixes):
        law, ends = base[prefix], ends + sums(base[prefix])
        below = [child for child, parent in enumerate(tree.parents[0].tolist()) if parent == node]
        draft_law = tree.branch_sampling.probs[0, node].clone() if below else law
        for index, child in enumerate(below):
            token = outcome.prefixes[child][-1]
            coins[child] = [float(law[token] / draft_law[token])]
            law = (law - draft_law).clamp(min=0)
            law = law / law.sum() if law.sum() > 0 else base[prefix]
            draft_law[token] = 0.0
            if draft_law.sum() == 0:
                draft_law = torch.ones_like(draft_law)
                draft_law[[outcome.prefixes[tried][-1] for tried in below[: index + 1]]] = 0.0
            draft_law = draft_law / draft_law.sum()
        ends += sums(law)
    num_nodes, whose = len(coins), torch.arange(len(coins))
    if shared:
        whose = tree.parents[0].clamp(min=0)
        for child, parent in enumerate(whose.tolist()):
            coins[parent] = coins[parent] + coins[child]
    numbers, volumes = cells(*coins, ends)
    verdict = rejection(
        repeated(tree, len(numbers)),
        outcome.base_probs(base).expand(len(numbers), -1, -1),
        numbers[:, whose],
        numbers[:, num_nodes, None].expand(-1, num_nodes),
    )
    return verdict, volumes


def by_matching(outcome: DraftOutcome, base: Laws) -> CellVerdicts:
    """Integrate over one number a level, which all nodes of the level share."""
    lengths = [len(prefix) for prefix in outcome.prefixes]
    levels = [
        [
            index
            for prefix in outcome.prefixes
            if len(prefix) == level
            for index in sums(base[prefix])
        ]
        for level in range(max(lengths) + 1)
    ]
    numbers, volumes = cells(*levels)
    base_probs = outcome.base_probs(base).expand(len(numbers), -1, -1)
    tree = repeated(outcome.tree, len(numbers))
    return match(tree, draw(base_probs, numbers[:, lengths])), volumes


def by_typicality(outcome: DraftOutcome, base: Laws) -> CellVerdicts:
    return typical(outcome.tree, outcome.base_probs(base)), torch.ones(1)


def joint(base: Laws, length: int, prefix: Prefix = ()) -> torch.Tensor:
    """Return the base's own law of the tokens after a text: (vocab, ...), one axis a token."""
    vocab = len(base[()])
    chances = [
        math.prod(float(base[prefix + text[:index]][token]) for index, token in enumerate(text))
        for text in itertools.product(range(vocab), repeat=length)
    ]
    return torch.tensor(chances).view([vocab] * length)


def emitted(
    judge: Callable[[DraftOutcome, Laws], CellVerdicts],
    trees: Iterable[DraftOutcome],
    base: Laws,
    length: int,
) -> torch.Tensor:
    """Return the law of the first tokens that steps emit; what one step lacks the next ones add.

    Those are given the base's own law, so a step that is exact after every text makes it exact.
    """
    vocab = len(base[()])
    law = torch.zeros([vocab] * length)
    for outcome in trees:
        verdict, volumes = judge(outcome, base)
        rows = zip(
            verdict.path.tolist(), verdict.count.tolist(), verdict.bonus.tolist(), strict=True
        )
        weights: dict[Prefix, float] = defaultdict(float)
        for (path, count, bonus), volume in zip(rows, volumes.tolist(), strict=True):
            weights[(*outcome.prefixes[path[count - 1]], bonus)] += volume
        for prefix, weight in weights.items():
            later_law = joint(base, length - len(prefix), prefix) if len(prefix) < length else 1.0
            law[prefix[:length]] += outcome.weight * weight * later_law
    return law


def acceptance(trees: Iterable[DraftOutcome], base: Laws) -> float:
    """Return how probable it is that rejection keeps a child of the root."""
    total = 0.0
    for outcome in trees:
        verdict, volumes = by_rejection(outcome, base)
        total += outcome.weight * float(volumes[verdict.count > 1].sum())
    return total


def variation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the total variation distance of two laws."""
    return float((first - second).abs().sum() / 2)


SHAPES = [(4, (1, 1)), (3, (1, 1, 1)), (3, (2, 1)), (2, (2, 1, 2)), (4, (3,)), (3, (3, 1))]
EXACT = {
    "rejection": (by_rejection, sampled_children),
    "match, drawn children": (by_matching, sampled_children),
    "match, best children": (by_matching, best_children),
}


@pytest.mark.parametrize(
    ("name", "shape", "zeros"),
    # every shape, with and without zeros, by turns
    slow_except(
        [
            (name, shape, 0.4 if (turn + index) % 2 else 0.0)
            for turn, name in enumerate(EXACT)
            for index, shape in enumerate(SHAPES)
        ],
        itertools.product(EXACT, SHAPES, (0.0, 0.4)),
    ),
)
def test_lossless_rules_have_the_law_of_the_base_to_the_last_token(name, shape, zeros):
    (judge, children), (vocab, branches) = EXACT[name], shape
    depth = len(branches)
    base, draft = laws(vocab, depth, 1, zeros), laws(vocab, depth, 2, zeros)
    law = emitted(judge, draft_outcomes(draft, branches, children), base, depth + 1)
    assert (law - joint(base, depth + 1)).abs().max() < 1e-12


@pytest.mark.parametrize("branches", [(1, 1, 1), (2, 1)])
@pytest.mark.parametrize("name", EXACT)
def test_stopping_below_a_doubted_token_keeps_the_law(name, branches):
    judge, children = EXACT[name]
    base, draft = laws(3, len(branches), 5), laws(3, len(branches), 6)
    trees = list(draft_outcomes(draft, branches, children, stops=lambda chance: chance < 0.5))
    assert any((outcome.tree.parents[0, 1:] < 0).any() for outcome in trees)
    law = emitted(judge, trees, base, len(branches) + 1)
    assert (law - joint(base, len(branches) + 1)).abs().max() < 1e-12


# the same check must fail where a rule is wrong


def test_the_check_catches_typical_acceptance():
    base, draft = laws(3, 2, 1), laws(3, 2, 2)
    law = emitted(by_typicality, draft_outcomes(draft, (2, 1)), base, 3)
    assert variation(law, joint(base, 3)) > 0.2


P, Q = (
    torch.tensor(law, dtype=torch.float64) for law in ([0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.5, 0.1])
)


def after_any(law: torch.Tensor) -> Laws:
    """Return laws of two tokens that do not depend on the first."""
    return {(): law} | {(token,): law for token in range(len(law))}


def test_the_check_catches_a_coin_that_siblings_share():
    # the second sibling is tested with a coin that is known to have failed the first
    base, draft = after_any(P), after_any(Q)
    law = emitted(
        functools.partial(by_rejection, shared=True), draft_outcomes(draft, (2,)), base, 1
    )
    torch.testing.assert_close(law, torch.tensor([0.5225, 0.2775, 0.15, 0.05]))
    law = emitted(by_rejection, draft_outcomes(draft, (2,)), base, 1)
    assert variation(law, P) < 1e-12


def test_the_check_catches_dropping_a_doubted_token_unverified():
    base, draft = after_any(torch.tensor([0.7, 0.3])), after_any(torch.tensor([0.5, 0.5]))
    dropping = []
    for outcome in draft_outcomes(draft, (1,)):
        parents = outcome.tree.parents.clone()
        parents[0, 1] = -1 if outcome.tree.tokens[0, 1] == 1 else 0
        tree = TokenTree(outcome.tree.tokens, parents, branch_sampling=outcome.tree.branch_sampling)
        dropping.append(DraftOutcome(outcome.weight, tree, outcome.prefixes))
    law = emitted(by_rejection, dropping, base, 1)
    torch.testing.assert_close(law, torch.tensor([0.85, 0.15]))
    law = emitted(by_rejection, draft_outcomes(draft, (1,)), base, 1)
    assert variation(law, base[()]) < 1e-12


def test_the_check_catches_best_guesses_that_pass_for_drawn_ones():
    # the result of testing a beam's two best_children tokens as if they were samples
    pretended = list(draft_outcomes(after_any(Q), (2,), lambda *_: [((2, 0), 1.0)]))
    law = emitted(by_rejection, pretended, after_any(P), 1)
    torch.testing.assert_close(law, torch.tensor([0.7, 0.0, 0.3, 0.0]))


def test_at_temperature_zero_rejection_is_matching_whatever_the_coins():
    base = {
        prefix: nn.functional.one_hot(law.argmax(), 3).double()
        for prefix, law in laws(3, 2, 7).items()
    }
    for outcome in draft_outcomes(laws(3, 2, 8), (2, 1)):
        verdict, expected = by_rejection(outcome, base)[0], by_matching(outcome, base)[0]
        count = int(expected.count[0])
        assert (verdict.count == count).all()
        assert (verdict.path[:, :count] == expected.path[0, :count]).all()
        assert (verdict.bonus == expected.bonus[0]).all()


# --- how much rejection accepts ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_acceptance_is_optimal_for_one_child_grows_with_more_and_covers_with_all(seed):
    base, draft = laws(4, 0, seed)[()], laws(4, 0, seed + 100)[()]
    accepted = [
        acceptance(draft_outcomes(after_any(draft), (k,)), after_any(base)) for k in range(1, 5)
    ]
    assert accepted[0] == pytest.approx(1 - variation(base, draft), abs=1e-12)
    assert accepted == sorted(accepted)
    assert accepted[3] == pytest.approx(1.0, abs=1e-12)


# --- compared with other code ---------------------------------------------------------------------


@pytest.mark.parametrize("case", range(20))
def test_a_chain_is_judged_as_transformers_judges_it(case):
    io = load_file(GOLDEN / "spec_sampling" / "io.safetensors")
    tokens, draft, base, uniforms, matched, law = (
        io[f"{name}.{case:02d}"]
        for name in (
            "in.candidate_input_ids", "in.candidate_logits", "in.new_logits", "out.uniforms",
            "out.n_matches", "out.next_law",
        )
    )  # fmt: skip
    depth = draft.shape[1]
    tree = chain(tokens[:, -depth - 1 :])
    sampling = BranchSampling((1,) * depth, draft.double().softmax(-1))
    coins = torch.cat([torch.zeros(1), uniforms])[None]
    path, count, after = accept.walk_nodes(
        replace(tree, branch_sampling=sampling), base.double().softmax(-1), coins
    )
    assert int(count) == int(matched) + 1
    assert path[0, : int(count)].tolist() == list(range(int(count)))
    torch.testing.assert_close(after[0], law.double(), atol=1e-6, rtol=1e-5)


def test_a_chain_has_the_law_that_transformers_measured():
    io = load_file(GOLDEN / "spec_sampling_law" / "io.safetensors")
    base, draft = (
        io["in.target_logits"].double().softmax(-1),
        io["in.draft_logits"].double().softmax(-1),
    )
    count, rows, depth = 60_000, torch.arange(60_000), 3
    tokens = draw(draft.expand(count, -1, -1), noise.uniform(rows[:, None], torch.arange(3), 0))
    tree = chain(torch.cat([torch.zeros(count, 1, dtype=torch.long), tokens], dim=1))
    sampling = BranchSampling((1,) * depth, draft.expand(count, -1, -1))
    nodes = torch.arange(depth + 1)
    verdict = rejection(
        replace(tree, branch_sampling=sampling),
        base.expand(count, -1, -1),
        noise.uniform(rows[:, None], nodes, 1),
        noise.uniform(rows[:, None], nodes, 2),
    )
    texts = torch.cat([tokens, tokens[:, :1]], dim=1)
    texts[rows, verdict.count - 1] = verdict.bonus
    has_second = verdict.count > 1
    for counts, reference_counts in (
        (torch.bincount(texts[:, 0], minlength=7), io["out.first_token_counts"]),
        (torch.bincount(texts[has_second, 1], minlength=7), io["out.second_token_counts"]),
        (torch.bincount(verdict.count - 1, minlength=4), io["out.n_matches_counts"]),
    ):
        pooled = torch.stack([counts, reference_counts]).double()
        expected = pooled.sum(1, keepdim=True) * pooled.sum(0) / pooled.sum()
        # seven cells: 28 is passed by one sample in ten thousand
        assert ((pooled - expected) ** 2 / expected).sum() < 28


def test_typical_acceptance_keeps_tokens_above_its_threshold_and_is_lossy():
    base = after_any(P)
    entropy = float(torch.special.entr(P).sum())
    assert entropy == pytest.approx(1.142120, abs=1e-6)
    # exp(-H) is 0.319142: the first threshold is 0.09 itself, the second 0.09 * 0.319142
    tree = TokenTree(torch.tensor([[0, 3]]), torch.tensor([[-1, 0]]))
    probs = P.expand(1, 2, -1)
    assert int(typical(tree, probs).count) == 1
    assert int(typical(tree, probs, epsilon=0.3, delta=0.09).count) == 2
    only = draft_outcomes(after_any(Q), (1,), lambda *_: [((1,), 1.0)])
    law = emitted(by_typicality, only, base, 1)
    assert law.tolist() == [0, 1, 0, 0]
    assert variation(law, P) == pytest.approx(0.7)


@pytest.mark.parametrize("vocab", [5, noise.BLOCK, 3 * noise.BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_the_largest(vocab, dtype):
    logits = torch.randn(40, 2, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    # few different numbers, so that most rows have ties, within blocks and across them
    ties = (2 * logits).round()
    for rows in (logits, ties, torch.full_like(logits, -torch.inf), logits[:, :, ::1][:, :0]):
        assert torch.equal(noise.likeliest(rows), rows.argmax(-1))
