"""Drafters that need no training; see docs/compare.md."""

from specheads.baselines.draft_model import DraftModel
from specheads.baselines.streaming import Streaming
from specheads.decoding.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "PromptLookup", "Streaming"]
