"""tiny_code, texts of the standard library, and heads trained on them, for tests with engines.

Heads are trained for seconds on half of the texts, so that drafts of all lengths are accepted.
"""

import sysconfig
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.generate import generate
from specheads.export.write import CheckText
from specheads.heads.load import build_for_base

ROOT = Path(__file__).parents[2]
BASE = ROOT / "recipes" / "tiny_code" / "base"
DEPTH = 3
NEW_TOKENS = 40


@cache
def base() -> FrozenBase:
    return FrozenBase.load(BASE, dtype="float32", device="cpu")


@cache
def prompts() -> tuple[list[int], ...]:
    """Return six prompts of different lengths; two share a prefix longer than a block."""
    tokenizer = base().tokenizer
    assert tokenizer is not None
    stdlib = Path(sysconfig.get_path("stdlib"))
    source = (stdlib / "argparse.py").read_text() + (stdlib / "typing.py").read_text()
    ids = tokenizer(source[:40_000])["input_ids"]
    windows = [ids[1000 * index : 1000 * index + 34 + 5 * index] for index in range(5)]
    return (*windows, windows[4][:40] + ids[5000:5007])


@cache
def continuations() -> tuple[list[int], ...]:
    """Return the base's continuations, with tokens for a last draft beyond the limit."""
    limit = NEW_TOKENS + DEPTH + 1
    out = generate(base(), None, list(prompts()), max_new_tokens=limit, stop_at_eos=False)
    return tuple(out.tokens)


ORIGINAL = "original_max_position_embeddings"
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    ORIGINAL: 64,
}  # fmt: skip
DFLASH = {"num_layers": 1, "attention_heads": 2, "key_value_heads": 1, "draft_tokens": 512}
DSPARK = {**DFLASH, "markov_rank": 32}


def check_texts() -> list[CheckText]:
    """Return prompts and continuations for the check of an export."""
    return list(zip(prompts(), continuations(), strict=True))


def trained(settings: dict[str, Any], steps: int) -> Head:
    """Train a head on half of the texts for this number of steps."""
    texts = [prompt + text for prompt, text in check_texts()]
    length = min(map(len, texts))
    tokens = torch.tensor([text[:length] for text in texts[::2]])
    all_tokens = torch.tensor([*chain.from_iterable(texts)])
    counts = torch.bincount(all_tokens, minlength=base().vocab_size)
    torch.manual_seed(0)
    head = build_for_base({"depth": DEPTH, **settings}, base(), counts)
    if head.kind == "hydra_heads":
        # its initial value of zero would hide the prefix layer after so few steps
        torch.nn.init.normal_(head.get_parameter("prefix.self_attn.o_proj.weight"), std=0.5)
    return train_head(head, base(), tokens, steps, learning_rate=2e-3)


def train_head(
    head: Head, base: FrozenBase, tokens: torch.Tensor, steps: int, learning_rate: float
) -> Head:
    """Train a head on the same texts, (batch, time), for this number of steps."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate)
    features = base.read(tokens, head.aux_layers)
    for _ in range(steps):
        losses = [
            F.cross_entropy(
                head.logits(state[:, : -2 - level], level).flatten(0, 1),
                head.to_drafted(tokens[:, 2 + level :].contiguous()).flatten(),
                ignore_index=-1,
            )
            for level, state in enumerate(head.states(features, tokens))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return head.eval()
