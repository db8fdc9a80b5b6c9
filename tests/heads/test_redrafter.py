"""ReDrafter: the numbers and beams of the original project, and initialisation."""

import pytest
import torch
from safetensors.torch import load_file

from specheads.core.drafter import Features, Head
from specheads.core.features import Committed
from specheads.core.tree import from_paths
from specheads.decoding.trees import policies
from specheads.heads.load import load_head
from tests.heads.golden import GOLDEN, expected

CASES = ["redrafter_rnn", "redrafter_sum"]
BEAMS = [(5, 4), (3, 5)]
"""Width and length of the stored beam searches; the given token counts as the first."""

TOLERANCES = pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float32, 1e-4, 1e-4), (torch.float64, 1e-9, 1e-10)],
    ids=["f32", "f64"],
)


def load(case: str, dtype: torch.dtype) -> tuple[Head, dict[str, torch.Tensor]]:
    golden = expected(case)
    head = load_head(GOLDEN / case)
    head.bind(golden["in.embeddings"])
    return head.to(dtype), golden


def root(golden: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple:
    """Return the input of `begin` for a draft from the last position of each row."""
    features = Features(golden["in.hidden"][:, -1:].to(dtype))
    committed = Committed(features, golden["in.tokens"][:, -1:], torch.ones(2, dtype=torch.long))
    return committed, None


@pytest.mark.parametrize("case", CASES)
@TOLERANCES
def test_a_public_redrafter_gives_its_project_s_logits(
    case: str, dtype: torch.dtype, rtol: float, atol: float
):
    head, golden = load(case, dtype)
    steps, _, time, _ = golden["out64.logits"].shape
    states = list(head.states(Features(golden["in.hidden"].to(dtype)), golden["in.tokens"]))
    assert len(states) == head.depth == 5
    for level in range(steps):
        torch.testing.assert_close(
            head.logits(states[level][:, :time], level),
            golden["out64.logits"][level].to(dtype),
            rtol=rtol,
            atol=atol,
        )


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_of_the_best_fifty_equal_the_project_s(case: str):
    """The project gives all other tokens -50000, which is not a log probability."""
    head, golden = load(case, torch.float32)
    states = head.states(Features(golden["in.hidden"]), golden["in.tokens"])
    for level, (state, theirs) in enumerate(zip(states, golden["out.log_probs"], strict=False)):
        logits = head.logits(state[:, : theirs.shape[1]], level)
        best, guesses = logits.topk(50, dim=-1)
        law = torch.full_like(theirs, -50000.0).scatter(-1, guesses, best.log_softmax(-1))
        kept = theirs > -1000
        assert torch.equal(law > -1000, kept)
        torch.testing.assert_close(law[kept], theirs[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("search", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_the_deepest_paths_of_a_beam_equal_the_project_s_beams(
    case: str, search: int, dtype: torch.dtype
):
    head, golden = load(case, dtype)
    width, length = BEAMS[search]
    with torch.inference_mode():
        tree = policies.Beam(width, length - 1).grow(head, *root(golden, dtype))
    reach = tree.ancestors()
    for row in range(2):
        beams = [tree.tokens[row, reach[row, leaf]].tolist() for leaf in range(-width, 0)]
        assert beams == golden[f"out.beams.{search}"][row].tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("search", [0, 1])
@TOLERANCES
def test_drafting_along_the_project_s_beams_gives_their_scores(
    case: str, search: int, dtype: torch.dtype, rtol: float, atol: float
):
    head, golden = load(case, dtype)
    beams = golden[f"out.beams.{search}"]
    logits, state = head.begin(*root(golden, dtype))
    score = torch.zeros(beams.shape[:2], dtype=dtype)
    for place in range(1, beams.shape[2]):
        best, guesses = logits.topk(50, dim=-1)
        law = best.log_softmax(-1).expand(-1, beams.shape[1], -1)
        hit = guesses == beams[:, :, place : place + 1]
        assert hit.any(-1).all()
        score += (law * hit).sum(-1)
        parents = torch.arange(beams.shape[1]).expand(2, -1) * int(place > 1)
        logits, state = head.extend(state, beams[:, :, place], parents)
    wanted = golden[f"out64.beam_scores.{search}"].to(dtype)
    torch.testing.assert_close(score, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("case", "part", "given"),
    [("redrafter_pack", "expected", "in.beams")]
    + [(case, "packed", "out.beams") for case in CASES],
)
def test_beams_share_prefixes_as_the_project_packs_them(case: str, part: str, given: str):
    packed = load_file(GOLDEN / case / f"{part}.safetensors")
    beams_of = expected(case)
    for search in range(len([name for name in packed if name.startswith("out.packed")])):
        beams = beams_of[f"{given}.{search}"]
        tree = from_paths(beams)
        assert tree.tokens.shape == packed[f"out.packed.{search}"].shape
        unpacker = packed[f"out.unpacker.{search}"]
        reach, depths = tree.ancestors(), tree.depths()
        for row, places in enumerate(unpacker):
            # the nodes after a row's own prefixes are padding, there and here
            own = int(places.max()) + 1
            assert torch.equal(tree.tokens[row, :own], packed[f"out.packed.{search}"][row, :own])
            offsets = packed[f"out.position_offsets.{search}"][row, :own]
            assert torch.equal(depths[row, :own], offsets)
            assert torch.equal(tree.tokens[row][places], beams[row])
            for beam in places:
                assert torch.equal(reach[row, beam[-1]].nonzero()[:, 0], beam.sort().values)
            mask = packed.get(f"out.causal_mask.{search}")
            if mask is not None:
                seen = mask[row, :own, -tree.tokens.shape[1] :][:, :own].bool()
                assert torch.equal(reach[row, :own, :own], seen)
