"""Every method of a comparison shows a planted bug: drafts that are shifted by one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import candidate_generator

from specheads.config.commands import DRAFTERS
from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.prompt_lookup import LookupText
from specheads.measure import compare as methods
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import GenerationSettings, continue_prompts
from tests import tiny
from tests.measure.test_measure import Habit
from tests.measure.test_replay import CHAIN, DEPTH, Shifted, prompts

METHODS = (
    *("head", "prompt_lookup", "hybrid", "streaming", "draft_model"),
    *("transformers_lookup", "transformers_assisted"),
)
SETTINGS = GenerationSettings(max_new_tokens=30, batch_size=3)


@dataclass
class OneLate(Drafter):
    """Drafts the chain of another drafter without its first token: an off-by-one error."""

    inner: Drafter

    def __post_init__(self) -> None:
        self.depth, self.drafted_size = self.inner.depth - 1, self.inner.drafted_size

    def memory(self, batch: int, capacity: int) -> Any:
        return self.inner.memory(batch, capacity)

    def begin(self, committed: Committed, memory: Any) -> tuple[Tensor, Any]:
        logits, state = self.inner.begin(committed, memory)
        first = logits.argmax(-1)
        return self.inner.extend(state, first, torch.zeros_like(first))

    def extend(self, state: Any, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Any]:
        return self.inner.extend(state, tokens, parents)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every method of a comparison draft the token after the right one."""
    find = LookupText.find

    def late_find(self: LookupText, copied: int) -> tuple[int, list[int]]:
        matched, right = find(self, copied)
        return matched, right[1:]

    monkeypatch.setattr(LookupText, "find", late_find)
    for name, kind in (("DraftModel", DraftModel), ("Streaming", Streaming)):
        monkeypatch.setattr(methods, name, late(kind))
    for name in ("PromptLookupCandidateGenerator", "AssistedCandidateGenerator"):
        generator = getattr(candidate_generator, name)
        monkeypatch.setattr(generator, "get_candidates", late_candidates(generator.get_candidates))


def late(kind: Callable[..., Drafter]) -> Callable[..., Drafter]:
    def make(model: Any, depth: int, *args: Any, **settings: Any) -> Drafter:
        return OneLate(kind(model, depth + 1, *args, **settings))

    return make


def late_candidates(right: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    def get(self: Any, input_ids: Tensor, **settings: Any) -> tuple[Tensor, Any]:
        ids, logits = right(self, input_ids, **settings)
        drafted = ids[:, input_ids.shape[1] :]
        # the token after the last one is unknown; use another one
        last = (drafted[:, -1:] + 1) % tiny.VOCAB
        return torch.cat([input_ids, drafted[:, 1:], last], dim=1), logits

    return get


def make_all_methods(head: Habit) -> dict[str, Any]:
    """Return the methods of a comparison; the draft model is a copy of the base."""
    base, model = tiny.base(), tiny.base("llama", "eager")
    names = [*METHODS, "transformers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "DRAFT_DEPTH", DEPTH)
        patch.setattr(methods, "WINDOW", 100)
        return methods.make_methods(names, base, {"head": head}, {"head": CHAIN}, model)


def rate(name: str, head: Habit) -> float:
    """Return tokens per forward; the text is the base's own whatever is drafted."""
    # prompt lookup needs prompts that repeat themselves
    texts = prompts() if "lookup" in name else tiny.prompts()
    decoded = make_all_methods(head)[name].decode(tiny.base(), texts, SETTINGS)
    assert [text.tokens for text in decoded] == continue_prompts(tiny.base(), texts, SETTINGS)
    counts = [text.counts for text in decoded]
    accepted = sum(sum(prompt.accepted) for prompt in counts)
    return DepthCounts(sum(prompt.forwards for prompt in counts), [], [accepted]).tokens_per_forward


def test_every_drafting_method_is_tested():
    assert {*METHODS, "transformers"} == {*DRAFTERS}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_shows_shifted_drafts(name: str, monkeypatch: pytest.MonkeyPatch):
    right = rate(name, Habit(0.0, DEPTH))
    plant(monkeypatch)
    wrong = rate(name, Shifted())
    assert right > 1.2
    assert wrong - 1 < 0.5 * (right - 1)
