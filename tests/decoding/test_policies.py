import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specheads.core.drafter import Drafter, Features
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.trees.policies import Beam, BestFirst, Static, TreePolicy, chain

GOLDEN = Path(__file__).parents[1] / "golden"
MEDUSA_TREES = ("medusa_tree_mc_sim_7b_63", "medusa_tree_vicuna_7b_stage2")


class Levels(Drafter):
    """Gives the same logits at every node of a level, as Medusa does: (batch, level, vocab)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.depth = logits, logits.shape[1]

    def begin(self, committed, memory):
        del committed, memory
        return self.logits[:, :1], 1

    def extend(self, state, tokens, parents):
        assert tokens.shape == parents.shape
        return self.logits[:, state : state + 1].expand(-1, tokens.shape[1], -1), state + 1


class Walker(Drafter):
    """Says something else after every path; its state is the places that the paths lead to."""

    def __init__(self, vocab: int, depth: int, seed: int = 0, batch: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.depth = vocab, depth
        places = sum(vocab**level for level in range(depth + 1))
        self.table = 1.5 * torch.randn(batch, places, vocab, generator=generator).double()

    def _at(self, places):
        rows = torch.arange(len(places))[:, None]
        return self.table[rows, places], places

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
                place = 0
                for token in path[:-1]:
                    place = place * self.vocab + token + 1
                law = self.table[row, place].softmax(-1)
                probs[path] = probs.get(path[:-1], 1.0) * law[path[-1]].item()
        return probs


def grow(policy: TreePolicy, drafter: Drafter, roots: list[int]) -> TokenTree:
    """Grow after rows that committed one position; a second one is padding."""
    tokens = torch.tensor([[root, 99] for root in roots])
    features = Features(torch.zeros(len(roots), 2, 4))
    return policy.grow(
        drafter, Committed(features, tokens, torch.ones(len(roots), dtype=torch.long)), None
    )


def paths_of(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """Return the tokens from the root down to each node, the root left out."""
    paths: list[tuple[int, ...]] = [()]
    rest = zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist(), strict=True)
    for token, parent in rest:
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
    # vocab 5, but only 3 children of 2 nodes a level are drafted, so that the budget of 8 is
    # filled from 3 + 6 + 6 candidates
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
        ours = paths_of(tree, row)
        above: list[tuple[int, ...]] = [()]
        for level in range(depth):
            candidates = [(*path, token) for path in above for token in range(5)]
            above = sorted(candidates, key=lambda path: -probs[path])[:width]
            assert ours[level * width : (level + 1) * width] == above


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
