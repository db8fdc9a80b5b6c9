"""Tree policies, and what tree.kind stands for on the command line."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specheads.config.compose import settings_of
from specheads.config.shared import TREES, TreeSettings
from specheads.core.drafter import Drafter, Features
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.trees.policies import Beam, BestFirst, Product, Static, chain
from specheads.decoding.trees.tuned import fixed_policy
from specheads.heads.load import load_head
from tests.decoding.markov import Levels, grow

GOLDEN = Path(__file__).parents[1] / "golden"
MEDUSA_TREES = ("medusa_tree_mc_sim_7b_63", "medusa_tree_vicuna_7b_stage2")


class Walker(Drafter):
    """Says something else after every path; its state is the places that the paths lead to."""

    def __init__(self, vocab: int, depth: int, seed: int = 0, batch: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.depth = vocab, depth
        num_texts = sum(vocab**level for level in range(depth + 1))
        self.table = 1.5 * torch.randn(batch, num_texts, vocab, generator=generator).double()

    def _at(self, texts):
        rows = torch.arange(len(texts))[:, None]
        return self.table[rows, texts], texts

    def begin(self, committed, memory):
        del memory
        return self._at(torch.zeros(len(committed.counts), 1, dtype=torch.long))

    def extend(self, state, tokens, parents):
        # heap numbering: child `token` of place p has the number p * vocab + token + 1
        return self._at(state.gather(1, parents) * self.vocab + tokens + 1)

    def path_probs(self, row: int = 0) -> dict[tuple[int, ...], float]:
        """Return the probability of every path, worked out one token at a time."""
        probs: dict[tuple[int, ...], float] = {}
        for length in range(1, self.depth + 1):
            for path in itertools.product(range(self.vocab), repeat=length):
                index = 0
                for token in path[:-1]:
                    index = index * self.vocab + token + 1
                law = self.table[row, index].softmax(-1)
                probs[path] = probs.get(path[:-1], 1.0) * law[path[-1]].item()
        return probs


def paths_of(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """Return the tokens from the root down to each node, the root left out."""
    paths: list[tuple[int, ...]] = [()]
    nodes = zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist(), strict=True)
    for token, parent in nodes:
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("case", MEDUSA_TREES)
def test_medusas_own_code_grows_the_same_trees(case):
    io = load_file(GOLDEN / case / "io.safetensors")
    policy = Static(json.loads((GOLDEN / case / "config.json").read_text())["choices"])
    roots = io["in.base_logits"].argmax(-1).tolist()
    tree = grow(policy, Levels(io["in.head_logits"]), roots)
    assert torch.equal(tree.tokens, io["out.tree_candidates"])
    for row in range(len(roots)):
        assert torch.equal(tree.ancestors()[row].to(torch.uint8), io["out.attn_mask"])
        assert torch.equal(tree.depths()[row], io["out.position_offsets"])


@pytest.mark.parametrize("policy", [Static([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)]), chain(3)])
def test_a_static_tree_brings_the_ancestors_it_has(policy):
    tree = grow(policy, Walker(vocab=3, depth=3, batch=2), [0, 1])
    assert torch.equal(tree.ancestors(), TokenTree(tree.tokens, tree.parents).ancestors())


@pytest.mark.parametrize("num_nodes", range(2, 7))
def test_no_tree_of_that_size_holds_more_probability(num_nodes):
    drafter = Walker(vocab=2, depth=3, seed=num_nodes)
    probs = drafter.path_probs()
    trees = (
        set(paths)
        for paths in itertools.combinations(probs, num_nodes - 1)
        if all(path[:-1] in paths for path in paths if len(path) > 1)
    )
    best = max(trees, key=lambda paths: sum(map(probs.__getitem__, paths)))
    tree = grow(BestFirst(num_nodes, depth=3, beam=4, branch=2), drafter, [0])
    assert set(paths_of(tree)) == best


def test_best_first_expands_the_beam_and_keeps_the_best_of_all():
    # with 3 children of 2 nodes a level, 8 nodes are chosen from 3 + 6 + 6 candidates
    drafter = Walker(vocab=5, depth=3, seed=4, batch=2)
    tree = grow(BestFirst(8, depth=3, beam=2, branch=3), drafter, [0, 0])
    for row in range(2):
        probs = drafter.path_probs(row)
        beam, pool = [()], []
        for _ in range(3):
            children = []
            for path in beam:
                below = sorted(((*path, token) for token in range(5)), key=probs.__getitem__)
                children += below[-3:]
            pool += children
            beam = sorted(children, key=probs.__getitem__)[-2:]
        assert set(paths_of(tree, row)) == set(sorted(pool, key=probs.__getitem__)[-7:])
        assert all(path[:-1] in [(), *paths_of(tree, row)] for path in paths_of(tree, row))


def test_ties_go_to_the_shallower_node():
    # a drafter that is certain gives every node of its chain probability one, all the others
    # zero: the first two nodes of the chain 2 2 2 must stay, or the third would be an orphan
    certain = torch.full((1, 3, 4), -torch.inf)
    certain[..., 2] = 0.0
    tree = grow(BestFirst(3, depth=3, beam=2, branch=2), Levels(certain), [0])
    assert paths_of(tree) == [(2,), (2, 2)]


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (3, 2), (4, 3)])
def test_a_beam_holds_the_best_continuations_of_the_level_above(width: int, depth: int):
    drafter = Walker(vocab=5, depth=depth, batch=2)
    tree = grow(Beam(width, depth), drafter, [7, 8])
    assert tree.tokens.shape == (2, 1 + width * depth)
    for row in range(2):
        probs = drafter.path_probs(row)
        paths = paths_of(tree, row)
        above: list[tuple[int, ...]] = [()]
        for level in range(depth):
            candidates = [(*path, token) for path in above for token in range(5)]
            above = sorted(candidates, key=lambda path: -probs[path])[:width]
            assert paths[level * width : (level + 1) * width] == above


def test_a_beam_counts_only_the_best_guesses_of_a_node():
    #  .52 a  ->  .6 a  .4 b                   among all four     aa .31  ab .21  ba .15
    #  .48 b  ->  .32 a  .3 b  .2 c  .18 d     among the best two aa .31  ba .25  bb .23
    table = torch.tensor([[0.52, 0.48, 1e-9, 1e-9], [0.6, 0.4, 1e-9, 1e-9], [0.32, 0.3, 0.2, 0.18]])
    drafter = Walker(vocab=4, depth=2)
    drafter.table[0, :3] = table.log().double()
    everything = grow(Beam(3, 2), drafter, [7])
    two = grow(Beam(2, 2, top=2), drafter, [7])
    assert paths_of(everything)[3:5] == [(0, 0), (0, 1)]
    assert paths_of(two)[2:] == [(0, 0), (1, 0)]


SEARCHES = [
    ("mlp_speculator_untied", 0, (5, 4, 3)),
    ("mlp_speculator_untied", 1, (3, 2, 2)),
    ("mlp_speculator_untied", 2, (1, 1, 1)),
    ("mlp_speculator_tied_scaled", 0, (4, 3, 2, 2)),
    ("mlp_speculator_tied_scaled", 1, (2, 2, 2, 2)),
]


def searched(case: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Return the head, what `begin` takes where its project began, and what it found."""
    io = load_file(GOLDEN / case / "expected.safetensors")
    hidden = io["in.hidden"]
    roots = io["in.inds"][:, hidden.shape[1] - 1 :][:, :1]
    arguments = (Committed(Features(hidden[:, -1:].to(dtype)), roots, torch.ones(2).long()), None)
    reference = load_file(GOLDEN / case / "search.safetensors")
    return load_head(GOLDEN / case).to(dtype), arguments, reference


@pytest.mark.parametrize(("case", "search", "widths"), SEARCHES)
def test_the_tree_is_its_project_s_candidates_flattened(case, search, widths):
    head, arguments, reference = searched(case)
    suffixes = reference[f"out.suffixes.{search}"]
    flat = 0
    for row in range(2):
        candidates = suffixes[row].tolist()
        expected = {tuple(path[:end]) for path in candidates for end in range(1, len(path) + 1)}
        policy = Product(widths, 1 + len(expected))
        with torch.inference_mode():
            tree = policy.grow(head, *arguments)
        paths = paths_of(tree, row)
        assert set(paths) == expected
        # best first: leaves are in the order of its scores
        assert [list(path) for path in paths if len(path) == len(widths)] == candidates
        flat += policy.num_nodes
    # there both rows are flattened into one
    assert len(reference[f"out.flat.tokens.{search}"]) == flat


@pytest.mark.parametrize(("case", "search", "widths"), SEARCHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_drafting_along_its_project_s_candidates_gives_their_scores(
    case: str, search: int, widths: tuple[int, ...], dtype: torch.dtype, tolerance: float
):
    head, arguments, reference = searched(case, dtype)
    suffixes = reference[f"out.suffixes.{search}"]
    logits, state = head.begin(*arguments)
    score = torch.zeros(suffixes.shape[:2], dtype=dtype)
    for level in range(len(widths)):
        law = logits.log_softmax(-1).expand(-1, suffixes.shape[1], -1)
        score += law.gather(2, suffixes[..., level : level + 1])[..., 0]
        if level + 1 < len(widths):
            parents = torch.arange(suffixes.shape[1]).expand(2, -1) * int(level > 0)
            logits, state = head.extend(state, suffixes[..., level], parents)
    expected = reference[f"out64.suffix_scores.{search}"].to(dtype)
    torch.testing.assert_close(score, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_nodes", [2, 7, 10])
def test_paths_enter_by_the_probability_of_the_whole(num_nodes: int):
    drafter = Walker(vocab=4, depth=3, batch=2)
    tree = grow(Product((3, 2, 1), num_nodes), drafter, [7, 8])
    for row in range(2):
        probs = drafter.path_probs(row)
        level = [()]
        for width in (3, 2, 1):
            children = ([(*path, token) for token in range(4)] for path in level)
            best = (sorted(siblings, key=probs.__getitem__)[-width:] for siblings in children)
            level = list(itertools.chain.from_iterable(best))
        ordered = sorted(level, key=probs.__getitem__, reverse=True)
        beginnings = (path[:end] for path in ordered for end in range(1, 4))
        assert paths_of(tree, row) == list(dict.fromkeys(beginnings))[: num_nodes - 1]


@pytest.mark.parametrize(
    ("tree", "num_nodes", "depth"),
    [
        (TreeSettings(kind="chain"), 4, 3),
        (TreeSettings(kind="chain", depth=2), 3, 2),
        (TreeSettings(kind="static", paths=[[0], [1], [0, 0]]), 4, 2),
        (TreeSettings(kind="best_first", num_nodes=9), 9, 3),
        (TreeSettings(kind="beam", beam=5), 16, 3),
        (TreeSettings(kind="product", branches=[3, 2], num_nodes=7), 7, 2),
    ],
    ids=lambda value: value.kind if isinstance(value, TreeSettings) else None,
)
def test_every_kind_makes_its_policy(tree: TreeSettings, num_nodes: int, depth: int):
    policy = fixed_policy(tree, 3)
    assert policy is not None
    assert (policy.num_nodes, policy.depth) == (num_nodes, depth)
    assert tree.kind in TREES


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "vicuna_7b_stage2"])
def test_a_published_medusa_tree_is_its_project_s_list_of_choices(name: str):
    stored = GOLDEN / f"medusa_tree_{name}" / "config.json"
    choices = json.loads(stored.read_text())["choices"]
    settings = settings_of("evaluate", [f"tree=medusa_{name}"]).tree
    policy = fixed_policy(settings, 5)
    assert isinstance(policy, Static)
    assert {*policy.paths} == {*map(tuple, choices)}
