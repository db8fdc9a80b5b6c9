"""How prompts are decoded: what all measurements of one evaluation share."""

from collections.abc import Sequence
from dataclasses import dataclass

from specheads.config import Compare, Evaluate, Evaluation, Train
from specheads.decoding.acceptance.sampling import GREEDY, Sampling
from specheads.decoding.trees.policies import TreePolicy

Asked = Train | Evaluate | Compare
"""Settings that say what is measured: `evaluation`, `tree`, `data` and `seed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How prompts are decoded."""

    max_new_tokens: int
    """Limit of each prompt."""
    tree: TreePolicy | None = None
    """How drafts grow; None is a chain as deep as the drafter."""
    sampling: Sampling = GREEDY
    """How tokens are chosen; each prompt draws with a seed of its own."""
    acceptance: str = "match"
    """What is kept of a tree: a name in `specheads.decoding.acceptance.rules.RULES`."""
    coupled: bool = True
    """Whether drafts see the noise that the base draws with."""
    batch_size: int = 1
    """Prompts decoded together."""
    stop_at_eos: bool = True
    """Whether the base's end-of-text token ends a text."""
    progress: bool = False
    """Whether to show a progress bar."""
    sources: tuple[str, ...] = ()
    """What each prompt was cut from: intervals draw prompts of one source together. Empty is a
    source of its own for each."""

    def sources_of(self, prompts: Sequence[object]) -> Sequence[str]:
        """Return what these prompts were cut from, the first ones or all."""
        return self.sources[: len(prompts)] or [""] * len(prompts)


def how_of(evaluation: Evaluation, seed: int, sources: Sequence[str] = ()) -> How:
    """Return how the settings of an evaluation want prompts decoded; the tree is still to come."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return How(
        max_new_tokens=evaluation.max_new_tokens,
        sampling=Sampling(**{name: getattr(evaluation, name) for name in names}, seed=seed),
        acceptance=evaluation.acceptance,
        coupled=evaluation.coupled,
        batch_size=evaluation.batch_size,
        progress=True,
        sources=tuple(sources),
    )
