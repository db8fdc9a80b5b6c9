"""DFlash: a block of masks, drafted in one forward with the base's features as keys and values.

Source: Chen et al. 2026, arXiv:2602.06036; z-lab/dflash, deepseek-ai/DeepSpec.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specheads.heads.layers.block import BlockConfig, BlockHead, read_block


@dataclass(kw_only=True, slots=True)
class Config(BlockConfig):
    """Settings of a DFlash head; the defaults are DeepSpec's for 7 tokens, in z-lab's layout."""


class Head(BlockHead):
    """All levels at once; levels are independent, so that trees are products of levels."""


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead | None:
    """Read a folder of z-lab, of DeepSpec without a Markov head, or of speculators."""
    return read_block(Head, Config, config, tensors)
