"""Which ways of drafting are compared, and how each is made for a base."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specheads.base.model import FrozenBase
from specheads.baselines import DraftModel, PromptLookup, Streaming
from specheads.baselines.draft_model import refuse_vocabulary
from specheads.config import Compare
from specheads.config.measuring import DRAFTERS, OF_DRAFT_MODEL, OF_TRANSFORMERS
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.machine import dtype_name
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup, own_tree
from specheads.heads.load import drafter_of
from specheads.measure.compare.rivals import Rival
from specheads.measure.drafting import ways
from specheads.measure.how import Asked
from specheads.measure.speed import Arm, Way
from specheads.measure.tune.for_evaluation import choose_tree


def chosen(settings: Compare) -> list[str]:
    """Return the drafters that are asked for; those with a draft model need its name."""
    if unknown := [name for name in settings.drafters if name not in DRAFTERS]:
        raise InputError(f"drafters must be among {', '.join(DRAFTERS)}, got {unknown[0]!r}")
    if (needing := set(settings.drafters) & {*OF_DRAFT_MODEL}) and not settings.draft_model:
        raise InputError(f"the drafter {min(needing)} needs a model: draft_model=FOLDER_OR_HUB_ID")
    named = [name for name in DRAFTERS if settings.draft_model or name not in OF_DRAFT_MODEL]
    return list(dict.fromkeys(settings.drafters)) or named


def load_draft_model(settings: Compare, base: FrozenBase, names: list[str]) -> FrozenBase | None:
    """Load the draft model as the base computes, where a drafter asks for it."""
    if not {*names} & {*OF_DRAFT_MODEL}:
        return None
    dtype = dtype_name(base.dtype)
    model = FrozenBase.load(settings.draft_model, dtype=dtype, device=str(base.device))
    refuse_vocabulary(model, base)
    return model


@dataclass(frozen=True, slots=True)
class Bench:
    """What drafters are made of, on one base and under one condition."""

    base: FrozenBase
    heads: Mapping[str, Head]
    """Heads by what they are called, a single one `head`."""
    trees: Mapping[str, policies.TreePolicy]
    """Their own trees, without copied text."""
    settings: Compare
    asked: Asked
    model: FrozenBase | None
    """The draft model."""

    @classmethod
    def of(
        cls,
        base: FrozenBase,
        heads: Mapping[str, Head],
        settings: Compare,
        asked: Asked,
        model: FrozenBase | None,
        context: int,
    ) -> "Bench":
        """Choose each head's tree where one is drafted with; texts are about so long."""
        drafting = {"head", "hybrid"} & {*chosen(settings)}
        picked = {
            name: own_tree(choose_tree(base, head, asked, context)[0])
            for name, head in heads.items()
            if drafting
        }
        return cls(base, heads, picked, settings, asked, model)

    def on(self, base: FrozenBase) -> "Bench":
        """Return the same for another copy of the base, such as one in another dtype."""
        heads = {name: drafter_of(head, base) for name, head in self.heads.items()}
        return replace(self, base=base, heads=heads)

    def own(self) -> dict[str, Arm]:
        """Return the drafters of our loop that are asked for.

        Above temperature zero heads draft in all three ways, unless that is not wanted.
        """
        arms: dict[str, Arm] = {}
        for name in chosen(self.settings):
            if name == "head":
                for called, head in self.heads.items():
                    arms[called] = Arm(head, self.trees[called])
                    if self.settings.other_ways:
                        arms |= _other_ways(called, head, self.trees[called], self.asked)
            elif name == "hybrid":
                for called, head in self.heads.items():
                    label = "hybrid" if called == "head" else f"{called}_hybrid"
                    arms[label] = _hybrid(self.base, head, self.trees[called], self.settings)
            elif name not in OF_TRANSFORMERS:
                arms[name] = _untrained(self.base, name, self.settings, self.model)
        return arms

    def ways(self) -> dict[str, Way]:
        """Return all drafters that are asked for, those of transformers among them."""
        names = [name for name in chosen(self.settings) if name in OF_TRANSFORMERS]
        rivals = {name: _rival(name, self.settings, self.model) for name in names}
        return {**self.own(), **rivals}


def _other_ways(called: str, head: Head, tree: policies.TreePolicy, asked: Asked) -> dict[str, Arm]:
    """Return the ways to draft above temperature zero that the evaluation does not ask for."""
    others = ways(head, tree) if asked.evaluation.temperature > 0 else {}
    others.pop("coupled" if asked.evaluation.coupled else "uncoupled", None)
    return {f"{called}_{name}": other for name, other in others.items()}


def _lookup(base: FrozenBase, settings: Compare, copied: int) -> PromptLookup:
    return PromptLookup(base.vocab_size, copied, max_ngram=settings.max_ngram, device=base.device)


def _hybrid(base: FrozenBase, head: Head, tree: policies.TreePolicy, settings: Compare) -> Arm:
    copied = settings.copied_tokens
    # tokens that the head's tree holds leave room for as many more copied ones
    both = Hybrid(head, _lookup(base, settings, copied + tree.depth))
    return Arm(both, HybridTree(tree, copied))


def _untrained(base: FrozenBase, name: str, settings: Compare, model: FrozenBase | None) -> Arm:
    copied, depth = settings.copied_tokens, settings.draft_depth
    if name == "prompt_lookup":
        return Arm(_lookup(base, settings, copied), Lookup(copied))
    if name == "streaming":
        alike = Streaming(base, depth, sinks=settings.sinks, window=settings.window)
        return Arm(alike, policies.chain(depth))
    assert model is not None
    return Arm(DraftModel(model, depth, base), policies.chain(depth))


def _rival(name: str, settings: Compare, model: FrozenBase | None) -> Rival:
    if name == "transformers_lookup":
        return Rival(name, prompt_lookup_num_tokens=settings.copied_tokens)
    if name == "transformers_assisted":
        assert model is not None
        return Rival(name, assistant_model=model.model)
    return Rival(name)
