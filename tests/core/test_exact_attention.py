"""With exact=true a node of a tree gets bit for bit the result of decoding it alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specheads.base.cache import RowCache
from specheads.base.forward import Forwards, Verification
from specheads.base.model import FrozenBase
from specheads.base.paged import PagedKVCache
from specheads.core.cpu import exact_attention
from specheads.core.errors import InputError
from specheads.core.tree import TokenTree
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from tests import tiny
from tests.oracle import Oracle
from tests.slow import slow_except

PARENTS = [-1, 0, 0, 2, 1, 2, 5, 3, 5, 6, 8]
"""Siblings at every level, and paths whose nodes are not adjacent."""


def exact_base(architecture: str = "llama", *, exact: bool = True) -> FrozenBase:
    """Return an exact base in bfloat16 with matrices of a usual size."""
    config = tiny.config(architecture, hidden_size=192, num_attention_heads=6, head_dim=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(4.0)
    return FrozenBase(model, name=f"exact-{architecture}", exact=exact)


def rows(base: FrozenBase, lengths: list[int], num_nodes: int = len(PARENTS)) -> RowCache:
    return base.cache(len(lengths), max(lengths) + num_nodes)


def blocks(base: FrozenBase, lengths: list[int], num_nodes: int = len(PARENTS)) -> RowCache:
    needed = sum(-(-(length + num_nodes) // 4) for length in lengths)
    return PagedKVCache(base.pool(needed, 4), len(lengths))


def read(base: FrozenBase, prompts: list[list[int]], cache: RowCache) -> RowCache:
    """Return the cache with the prompts committed."""
    lengths = [len(prompt) for prompt in prompts]
    padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
    base.prefill(torch.tensor(padded), cache, lengths)
    return cache


def path_to(node: int, parents: list[int] = PARENTS) -> list[int]:
    """Return the nodes from the root to this one."""
    return [*(path_to(parents[node], parents) if node else []), node]


def assert_single_steps(
    base: FrozenBase, lengths: list[int], make: Callable[..., RowCache], parents: list[int]
) -> None:
    """Compare each node of a tree with decoding its path token by token."""
    generator, count = torch.Generator().manual_seed(sum(lengths)), len(parents)
    tokens = torch.randint(tiny.VOCAB, (len(lengths), count), generator=generator)
    prompts = [
        torch.randint(tiny.VOCAB, (length,), generator=generator).tolist() for length in lengths
    ]
    tree = TokenTree(tokens, torch.tensor([parents] * len(lengths)))
    verification = base.verify(tree, read(base, prompts, make(base, lengths, count)))
    for leaf in sorted({*range(count)} - {*parents}):
        cache = read(base, prompts, make(base, lengths, count))
        for node in path_to(leaf, parents):
            lone = TokenTree(tokens[:, [node]], torch.full((len(lengths), 1), -1))
            step = base.verify(lone, cache)
            cache.commit([[0]] * len(lengths))
            assert step.logits.shape[1] == step.features.hidden.shape[1] == 1
            assert torch.equal(step.logits[:, 0], verification.logits[:, node])
            assert torch.equal(step.features.hidden[:, 0], verification.features.hidden[:, node])


RAGGED = [61, 5, 11]


@pytest.mark.parametrize(
    ("architecture", "lengths", "make"),
    slow_except(
        [("llama", [93], rows), ("llama", RAGGED, blocks), ("gpt_neox", RAGGED, rows)],
        [
            (*case, make)
            for case in (
                *(("llama", lengths) for lengths in ([5], [93], RAGGED)),
                *(("mistral", RAGGED), ("gpt_neox", RAGGED)),
            )
            for make in (rows, blocks)
        ],
    ),
)
def test_exact_nodes_equal_single_steps_bit_for_bit(architecture, lengths, make):
    assert_single_steps(exact_base(architecture), lengths, make, PARENTS)


def test_drafts_longer_than_a_block_are_refused():
    base, count = exact_base(), exact_attention.BLOCK + 2
    chain = TokenTree(torch.zeros(1, count, dtype=torch.long), torch.arange(-1, count - 1)[None])
    base.verify(TokenTree(chain.tokens[:, :-1], chain.parents[:, :-1]), base.cache(1, count))
    with pytest.raises(InputError, match="at most 32 tokens; lower the depth"):
        base.verify(chain, base.cache(1, count))


@pytest.mark.parametrize(("constant", "value"), [("BLOCK", 12), ("TAIL", 1024), ("ROWS", 2)])
def test_a_layout_that_changes_the_order_of_sums_is_caught(constant, value, monkeypatch):
    assert exact_attention.keeps_order(torch.bfloat16)
    monkeypatch.setattr(exact_attention, constant, value)
    assert not exact_attention.keeps_order(torch.bfloat16)


def test_without_exact_bfloat16_trees_round_differently():
    base = exact_base(exact=False)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(tiny.VOCAB, (1, len(PARENTS)), generator=generator)
    prompt = torch.randint(tiny.VOCAB, (61,), generator=generator).tolist()
    tree = TokenTree(tokens, torch.tensor([PARENTS]))
    verification = base.verify(tree, read(base, [prompt], rows(base, [61])))
    cache = read(base, [prompt], rows(base, [61]))
    differing = 0
    for node in path_to(len(PARENTS) - 1):
        step = base.verify(TokenTree(tokens[:, [node]], torch.tensor([[-1]])), cache)
        cache.commit([[0]])
        differing += not torch.equal(step.logits[:, 0], verification.logits[:, node])
    assert differing


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_decoding_in_bfloat16_gives_the_base_s_text(temperature: float):
    base, prompts = exact_base(), tiny.prompts()[:1]
    options = {"max_new_tokens": 40, "sampling": Sampling(temperature=temperature)}
    alone = generate(base, None, prompts, **options)
    knows = Oracle([prompts[0] + alone.tokens[0]], 3, tiny.VOCAB, rate=0.7)
    tree = policies.Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)), "tree")
    drafted = generate(base, knows, prompts, tree=tree, **options)
    assert drafted.tokens == alone.tokens
    assert drafted.forwards[0] < alone.forwards[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, "got compile=True"),
        ({"attention": "eager"}, "and attention=eager"),
        *(({"model_type": name}, f"those of '{name}' do not") for name in ("stablelm", "nemotron")),
    ],
)
def test_unsupported_exact_bases_are_refused(options: dict[str, Any], message: str):
    model_type = options.pop("model_type", "llama")
    config = AutoConfig.for_model(model_type, **tiny.RECIPES["llama"].settings)
    attention = options.pop("attention", "sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with pytest.raises(InputError, match=message):
        FrozenBase(model, exact=True, **options)


def test_a_base_whose_products_depend_on_the_number_of_rows_is_refused(monkeypatch):
    base = exact_base(exact=False)
    verify = Forwards.verify

    def verify_unequally(self: Forwards, tree: TokenTree, cache: RowCache) -> Verification:
        verification = verify(self, tree, cache)
        verification.logits.add_(0.25 * (tree.tokens.shape[1] > 1))
        return verification

    monkeypatch.setattr(Forwards, "verify", verify_unequally)
    with pytest.raises(InputError, match="do not depend on the number of rows"):
        FrozenBase(base.model, exact=True, prepare=False)
