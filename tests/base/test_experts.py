"""Mixture-of-experts bases: the code that computes the experts, and what rounding does to them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specheads.base.experts import experts_of
from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.core.tree import TokenTree
from tests import tiny


@pytest.mark.parametrize(
    ("dtype", "changes", "chosen"),
    [
        (torch.float64, {}, "eager"),
        (torch.float32, {}, "grouped_mm"),
        (torch.bfloat16, {}, "grouped_mm"),
        # rows of 24 bytes
        (torch.bfloat16, {"moe_intermediate_size": 12}, "eager"),
    ],
)
def test_experts_are_grouped_where_torch_computes_it(dtype, changes, chosen):
    base = tiny.own_base("qwen3_moe", dtype=dtype, **changes)
    assert base.config._experts_implementation == chosen


@pytest.mark.parametrize("always", [False, True])
def test_base_is_refused_only_if_every_text_gives_a_path_other_logits(always: bool):
    model = AutoModelForCausalLM.from_config(tiny.config("mixtral"), dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.mul_(9)
    trees = 0

    def reroute(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Send the nodes of a tree, of the first one or of all, to other experts."""
        nonlocal trees
        hidden, chosen, shares = inputs
        if len(hidden) != 6:
            return None
        trees += 1
        return (hidden, (chosen + 1) % 4, shares) if always or trees == 1 else None

    experts_of(model)[0].register_forward_pre_hook(reroute)
    if always:
        with pytest.raises(InputError, match="'mixtral' does not compute a path in a tree"):
            FrozenBase(model)
    else:
        FrozenBase(model)
    assert trees == (3 if always else 2)


PARENTS = [-1, 0, 0, 2, 1, 2, 5, 3, 5, 6, 8]
PATHS = ([0, 1, 4], [0, 2, 3, 7], [0, 2, 5, 6, 9], [0, 2, 5, 8, 10])
LENGTH = 37


def random_base(
    architecture: str, dtype: torch.dtype, seed: int, experts: int = 192, *, exact: bool = False
) -> FrozenBase:
    """Return a base with matrices large enough for oneDNN; `experts` is the width of an expert."""
    setting = "num_local_experts" if architecture in ("mixtral", "granitemoe") else "num_experts"
    sizes = {"hidden_size": 192, "intermediate_size": experts, "num_attention_heads": 6}
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = experts // 2
    torch.manual_seed(seed)
    config = tiny.config(architecture, head_dim=32, **sizes | {setting: 16})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(4.0)
    return FrozenBase(model, exact=exact)


def compared(base: FrozenBase, seed: int) -> list[tuple[float, bool, bool]]:
    """Compare nodes of a tree, and a row of a batch, with single steps.

    Returns for each comparison the largest difference of the logits relative to the largest logit,
    whether another token has the largest logit, and whether a layer chose other experts for this
    node or for one above it.
    """
    routes: list[Tensor] = []
    for experts in experts_of(base.model):
        experts.register_forward_pre_hook(
            lambda _, inputs: routes.append(inputs[1].sort(-1).values)
        )

    def read(tokens: Tensor, parents: list[int], cache: Any) -> tuple[Tensor, Tensor]:
        """Return the logits of each node of the first row, and its experts."""
        routes.clear()
        tree = TokenTree(tokens, torch.tensor([parents] * len(tokens)))
        logits = base.verify(tree, cache).logits[0]
        chosen = [route.view(*tokens.shape, -1)[0] for route in routes]
        return logits, torch.stack(chosen or [torch.zeros_like(tokens[0])], 1)

    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(tiny.VOCAB, (4, LENGTH), generator=generator)
    nodes = torch.randint(tiny.VOCAB, (4, len(PARENTS)), generator=generator)

    def cache(rows: int) -> Any:
        empty = base.cache(rows, LENGTH + len(PARENTS) + 1)
        base.prefill(text[:rows], empty, [LENGTH] * rows)
        return empty

    def difference(result: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> Any:
        size = float((result[0] - reference[0]).abs().max() / reference[0].abs().max())
        flipped = bool(result[0].argmax() != reference[0].argmax())
        return size, flipped, not torch.equal(result[1], reference[1])

    tree, out = read(nodes[:1], PARENTS, cache(1)), []
    for path in PATHS:
        alone, moved = cache(1), False
        for node in path:
            logits, chosen = read(nodes[:1, [node]], [-1], alone)
            alone.commit([[0]])
            size, flipped, moves = difference(
                (tree[0][node], tree[1][node]), (logits[0], chosen[0])
            )
            # a token also differs if one before it went to other experts
            moved |= moves
            out.append((size, flipped, moved))
    rows = read(nodes[:, :1], [-1], cache(4))
    out.append(difference(rows, read(nodes[:1, :1], [-1], cache(1))))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", *tiny.EXPERTS])
def test_rounding_seldom_changes_the_experts_of_a_token(architecture: str, dtype: torch.dtype):
    """The counts are those of docs/bases.md; pytest -s prints them."""
    comparisons = [
        comparison
        for seed in range(50)
        for comparison in compared(random_base(architecture, dtype, seed), seed)
    ]
    unmoved_size = max(size for size, _, moved in comparisons if not moved)
    moved_sizes = [size for size, _, moved in comparisons if moved]
    flips = sum(flipped for _, flipped, _ in comparisons)
    print(  # noqa: T201
        f"\n{architecture} {dtype}: {len(comparisons)} comparisons; same experts: "
        f"difference at most {unmoved_size:.1e}; other experts: {len(moved_sizes)} times, "
        f"at most {max(moved_sizes, default=0):.1e}; "
        f"another best token: {flips} times"
    )
    assert unmoved_size < (1e-5 if dtype == torch.float32 else 0.05)
    assert len(moved_sizes) <= (0 if dtype == torch.float32 else 0.1 * len(comparisons))
    assert flips <= (0 if dtype == torch.float32 else 0.05 * len(comparisons))


@pytest.mark.parametrize(
    ("architecture", "seeds"),
    [
        ("mixtral", [3]),
        *(pytest.param(name, range(20), marks=pytest.mark.slow) for name in tiny.EXPERTS),
    ],
)
def test_exact_bases_do_not_depend_on_the_rows_of_an_expert(
    architecture: str, seeds: list[int] | range
):
    for seed in seeds:
        # narrow, so that one row and two rows are multiplied by different code
        base = random_base(architecture, torch.bfloat16, seed, 48, exact=True)
        nodes = compared(base, seed)[:-1]
        assert {size for size, *_ in nodes} == {0.0}
