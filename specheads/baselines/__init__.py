"""Drafters that need no training; see docs/baselines.md."""

from specheads.baselines.draft_model import DraftModel
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.baselines.streaming import Streaming

__all__ = ["DraftModel", "PromptLookup", "Streaming"]
