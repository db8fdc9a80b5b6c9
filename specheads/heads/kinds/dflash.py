"""DFlash: a block of masks, drafted in one forward with the base's features as keys and values.

Source: Chen et al. 2026, arXiv:2602.06036; z-lab/dflash, deepseek-ai/DeepSpec.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specheads.heads.layers.block import BlockConfig, BlockHead, filled, flat_settings, own_settings


@dataclass(kw_only=True, slots=True)
class Config(BlockConfig):
    """Settings of a DFlash head; the defaults are DeepSpec's for 7 tokens, in z-lab's layout."""


class Head(BlockHead):
    """All levels at once; levels are independent, so that trees are products of levels."""


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead | None:
    """Read a folder of z-lab, of DeepSpec without a Markov head, or of speculators."""
    settings = flat_settings(config)
    if settings is None or settings.get("markov_rank"):
        return None
    own = Config(**own_settings(settings))
    return filled(Head(own, settings["hidden_size"], settings["vocab_size"]), tensors)
