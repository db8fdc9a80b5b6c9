"""Medusa: independent heads that all read the same hidden state.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.1; FasterDecoding/Medusa.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads import heads
from specheads.drafter import Bias, Features, Memory, State, Weight, last
from specheads.drafter import Head as BaseHead


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of Medusa heads; the defaults are the published ones."""

    depth: int = 5
    """Levels it drafts, each by a head of its own."""

    num_layers: int = 1
    """Residual blocks of each head."""

    draft_tokens: int = 0
    """Tokens it can draft, the most frequent ones of the training text. Zero is all."""

    def __post_init__(self) -> None:
        if self.depth < 1 or self.num_layers < 0:
            raise ValueError(
                "medusa needs depth >= 1 and num_layers >= 0, got "
                f"{self.depth} and {self.num_layers}"
            )


class _Block(nn.Module):
    """x + SiLU(W x + b), the identity until W and b have learned something."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, values: Tensor) -> Tensor:
        return values + F.silu(self.linear(values))


class Head(BaseHead):
    """`depth` heads, each some residual blocks and a vocabulary projection of its own."""

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.depth = config.depth
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(width) for _ in range(config.num_layers)))
            for _ in range(self.depth)
        )
        self.head = nn.ModuleList(
            nn.Linear(width, self.drafted_size, bias=False) for _ in range(self.depth)
        )

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Start every head as the base's own next-token law (the blocks begin as identities)."""
        del embedding
        for head in self.head:
            head.get_parameter("weight").data.copy_(projection)

    def states(
        self, features: Features, tokens: Int[Tensor, "batch time"]
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield each head's state; none of them reads a drafted token."""
        del tokens
        for blocks in self.blocks:
            yield blocks(features.hidden)

    def projection(self, level: int) -> tuple[Weight, Bias | None]:
        """Return the level's vocabulary projection; it has no bias."""
        return self.head[level].get_parameter("weight"), None

    def begin(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        count: Int[Tensor, " batch"],
        memory: Memory | None,
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Answer for the root from the base's last state."""
        del tokens, memory
        hidden = last(features.hidden, count)
        return self.logits(self.blocks[0](hidden), 0), (hidden, 0)

    def extend(
        self, state: State, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], State]:
        """Give every node of the level the same answer: Medusa's guesses ignore the path."""
        del parents
        hidden, level = state[0], state[1] + 1
        logits = self.logits(self.blocks[level](hidden), level)
        return logits.expand(-1, tokens.shape[1], -1), (hidden, level)


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read FasterDecoding's layout: `{head}.{layer}.linear.*`, then `{head}.{layers}.weight`.

    Its config.json has neither width nor vocabulary; the tensors do.
    """
    if "medusa_num_heads" not in config:
        return None
    own = Config(depth=config["medusa_num_heads"], num_layers=config.get("medusa_num_layers", 1))
    named = {name.removeprefix("medusa_heads."): value for name, value in tensors.items()}
    projection = f"0.{own.num_layers}.weight"
    if projection not in named:
        raise ValueError(
            f"a Medusa checkpoint of {own.num_layers} layers needs the projection "
            f"{projection!r}; it is incomplete, or shares the base's (not supported)"
        )
    vocab_size, width = named[projection].shape
    head = Head(own, width=width, vocab_size=vocab_size)
    heads.fill(head, {_own_name(name, own.num_layers): value for name, value in named.items()})
    return head


def _own_name(name: str, num_layers: int) -> str:
    head, layer, rest = (*name.split(".", 2), "")[:3]
    if layer == str(num_layers):
        return f"head.{head}.{rest}"
    return f"blocks.{head}.{layer}.{rest}"
