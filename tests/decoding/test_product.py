"""The product tree grows as in the MLP speculator's own project."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.decoding.trees.policies import Product
from specheads.heads.load import load_head
from tests.decoding.test_policies import Walker, grow, paths_of

GOLDEN = Path(__file__).parents[1] / "golden"
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
    begun = (Committed(Features(hidden[:, -1:].to(dtype)), roots, torch.ones(2).long()), None)
    found = load_file(GOLDEN / case / "search.safetensors")
    return load_head(GOLDEN / case).to(dtype), begun, found


@pytest.mark.parametrize(("case", "search", "widths"), SEARCHES)
def test_the_tree_is_its_project_s_candidates_flattened(
    case: str, search: int, widths: tuple[int, ...]
):
    head, begun, found = searched(case)
    suffixes = found[f"out.suffixes.{search}"]
    flat = 0
    for row in range(2):
        candidates = suffixes[row].tolist()
        wanted = {tuple(path[:end]) for path in candidates for end in range(1, len(path) + 1)}
        policy = Product(widths, 1 + len(wanted))
        with torch.inference_mode():
            tree = policy.grow(head, *begun)
        ours = paths_of(tree, row)
        assert set(ours) == wanted
        # best first: leaves are in the order of its scores
        assert [list(path) for path in ours if len(path) == len(widths)] == candidates
        flat += policy.num_nodes
    # there both rows are flattened into one
    assert len(found[f"out.flat.tokens.{search}"]) == flat


@pytest.mark.parametrize(("case", "search", "widths"), SEARCHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_drafting_along_its_project_s_candidates_gives_their_scores(
    case: str, search: int, widths: tuple[int, ...], dtype: torch.dtype, tolerance: float
):
    head, begun, found = searched(case, dtype)
    suffixes = found[f"out.suffixes.{search}"]
    logits, state = head.begin(*begun)
    score = torch.zeros(suffixes.shape[:2], dtype=dtype)
    for level in range(len(widths)):
        law = logits.log_softmax(-1).expand(-1, suffixes.shape[1], -1)
        score += law.gather(2, suffixes[..., level : level + 1])[..., 0]
        if level + 1 < len(widths):
            parents = torch.arange(suffixes.shape[1]).expand(2, -1) * int(level > 0)
            logits, state = head.extend(state, suffixes[..., level], parents)
    wanted = found[f"out64.suffix_scores.{search}"].to(dtype)
    torch.testing.assert_close(score, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_nodes", [2, 7, 10])
def test_paths_enter_by_the_probability_of_the_whole(num_nodes: int):
    drafter = Walker(vocab=4, depth=3, batch=2)
    tree = grow(Product((3, 2, 1), num_nodes), drafter, [7, 8])
    for row in range(2):
        probs = drafter.path_probs(row)
        level = [()]
        for width in (3, 2, 1):
            children = ([(*path, token) for token in range(4)] for path in level)
            best = (sorted(some, key=probs.__getitem__)[-width:] for some in children)
            level = list(itertools.chain.from_iterable(best))
        ordered = sorted(level, key=probs.__getitem__, reverse=True)
        beginnings = (path[:end] for path in ordered for end in range(1, 4))
        assert paths_of(tree, row) == list(dict.fromkeys(beginnings))[: num_nodes - 1]
