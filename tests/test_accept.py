import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from specheads.accept import Sampling, greedy
from specheads.grow import Static
from specheads.tree import TokenTree

GOLDEN = Path(__file__).parent / "golden"
MEDUSA_TREES = ("medusa_tree_mc_sim_7b_63", "medusa_tree_vicuna_7b_stage2")


def saying(chosen: list[list[int]], vocab: int = 10) -> torch.Tensor:
    """Return logits whose argmax after each node is as given."""
    return torch.nn.functional.one_hot(torch.tensor(chosen), vocab).float()


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


def test_the_path_the_base_would_have_taken_is_kept():
    #          0:a           after the root the base says c: node 2,
    #         /   \          after that e: node 4,
    #      1:b     2:c       after that f, which nobody drafted: the bonus.
    #       |     /   \      node 3 is what the base says after node 1,
    #      3:d  4:e   5:d    but node 1 is not on its path
    tree = TokenTree(torch.tensor([[0, 1, 2, 3, 4, 3]]), torch.tensor([[-1, 0, 0, 1, 2, 2]]))
    verdict = greedy(tree, saying([[2, 3, 4, 9, 5, 9]]))
    assert verdict.count.tolist() == [3]
    assert verdict.path[0, :3].tolist() == [0, 2, 4]
    assert verdict.bonus.tolist() == [5]


def test_a_drafter_that_is_wrong_leaves_the_root_and_the_bonus():
    tree = TokenTree(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]]))
    verdict = greedy(tree, saying([[7, 2, 3]]))
    assert (verdict.count.tolist(), verdict.path[0, 0].item()) == ([1], 0)
    assert verdict.bonus.tolist() == [7]


def test_the_root_alone_is_always_accepted():
    tree = TokenTree(torch.tensor([[4], [5]]), torch.tensor([[-1], [-1]]))
    verdict = greedy(tree, saying([[8], [9]]))
    assert (verdict.path.tolist(), verdict.count.tolist()) == ([[0], [0]], [1, 1])
    assert verdict.bonus.tolist() == [8, 9]


@st.composite
def judged_trees(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows of (tokens, parents, what the base says after each node), three words only."""
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
        said = draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes))
        rows.append((tokens, parents, said))
    return rows


@given(judged_trees())
def test_the_verdict_is_that_of_a_walk_from_the_root(rows):
    tokens, parents, said = zip(*rows, strict=True)
    tree = TokenTree(torch.tensor(tokens), torch.tensor(parents))
    verdict = greedy(tree, saying(list(said)))
    for row, judged in enumerate(rows):
        count = int(verdict.count[row])
        found = (verdict.path[row, :count].tolist(), int(verdict.bonus[row]))
        assert found == walk(*judged)


@pytest.mark.parametrize("case", MEDUSA_TREES)
def test_medusas_own_code_accepts_the_same_tokens(case):
    io = load_file(GOLDEN / case / "io.safetensors")
    policy = Static(json.loads((GOLDEN / case / "config.json").read_text())["choices"])
    tokens = io["out.tree_candidates"]
    tree = TokenTree(tokens, policy.parents.expand(len(tokens), -1))
    verdict = greedy(tree, io["in.tree_logits"])
    assert (verdict.count - 1).tolist() == io["out.greedy.accept_length"].tolist()
    accepted = tokens.gather(1, verdict.path)
    for row, count in enumerate(verdict.count.tolist()):
        expected = io["out.greedy.accepted_tokens"][row]
        assert accepted[row, :count].tolist() == expected[expected >= 0].tolist()


def test_sampling_follows_the_law_of_the_base_along_every_branch():
    # both children of the root are drafted, so every row says two tokens, and how often it says
    # each pair must be p(first) * p(second | first), whatever stands in the tree
    rows = 40_000
    logits = torch.tensor([[0.5, -0.5, 1.0], [2.0, 0.0, 0.0], [0.0, 1.0, -1.0], [0.0, 0.0, 3.0]])
    tree = TokenTree(
        torch.tensor([[9, 0, 1, 2]]).expand(rows, -1),
        torch.tensor([[-1, 0, 0, 0]]).expand(rows, -1),
    )
    verdict = Sampling(0.8)(tree, logits.expand(rows, -1, -1))
    assert (verdict.count == 2).all()
    first = tree.tokens.gather(1, verdict.path[:, 1:2])[:, 0]
    shares = torch.bincount(first * 3 + verdict.bonus, minlength=9) / rows
    laws = (logits / 0.8).softmax(-1)
    expected = (laws[0][:, None] * laws[1:]).flatten()
    # four standard errors of a share at one half
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0.0)


def test_sampling_from_the_best_token_only_is_greedy():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, (6, 5), generator=generator)
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 1, 2, 3]]).expand(6, -1))
    logits = torch.randn(6, 5, 4, generator=generator)
    drawn, chosen = Sampling(1.0, top_k=1)(tree, logits), greedy(tree, logits)
    assert torch.equal(drawn.count, chosen.count)
    assert torch.equal(drawn.bonus, chosen.bonus)


def test_sampling_leaves_out_all_but_the_likeliest_tokens_and_repeats_with_its_seed():
    tree = TokenTree(torch.zeros(500, 1, dtype=torch.long), torch.full((500, 1), -1))
    logits = torch.tensor([[[0.0, 0.3, 0.2, 0.1]]]).expand(500, -1, -1)
    first, again, other = (
        Sampling(5.0, top_k=2, seed=seed)(tree, logits).bonus for seed in (1, 1, 2)
    )
    assert set(first.tolist()) == {1, 2}
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (-1.0, 0), (1.0, -1)])
def test_sampling_refuses_what_is_no_law(temperature, top_k):
    with pytest.raises(ValueError, match="temperature > 0 and top_k >= 0"):
        Sampling(temperature, top_k=top_k)
