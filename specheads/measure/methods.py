"""The decoding methods of a comparison: heads, baselines without training, and transformers."""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specheads.base.loading import without_generation_config
from specheads.base.model import FrozenBase
from specheads.config import Compare
from specheads.config.commands import DRAFTERS, OF_DRAFT_MODEL, OF_TRANSFORMERS
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.core.machine import dtype_name, synchronise
from specheads.decoding.draft_model import DraftModel, Streaming, refuse_vocabulary
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.sampling import Sampling, each_prompt
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup, own_tree
from specheads.decoding.trees.named import fixed_policy
from specheads.decoding.trees.policies import Sampled
from specheads.decoding.trees.tuned import Tuned
from specheads.heads.load import drafter_of
from specheads.measure.counts import DepthCounts, paired_gain, rate
from specheads.measure.generation import (
    Decoded,
    EvaluationConfig,
    GenerationSettings,
    decode_prompts,
    generation_settings,
)
from specheads.measure.results import COPIED_TOKENS, MAX_NGRAM, SINKS, Drafting
from specheads.measure.speed import DraftMethod, Method, Timing
from specheads.measure.tune import choose_tree

# --- three ways to draft above temperature zero ------------------------------------------------


def sampling_methods(drafter: Drafter, tree: policies.TreePolicy) -> dict[str, DraftMethod]:
    """Return three ways to draft with a tree; none if the tree drafts nothing.

    Coupled drafts see the noise that the base samples with, uncoupled ones do not. Rejection
    tests one sampled token per level, at as many levels as the head's own tree has. If the tree
    itself is `Sampled`, rejection tests that tree, and the other two draft a chain as deep.
    """
    if not tree.depth:
        return {}
    drawn = isinstance(tree, Sampled)
    guessed = policies.chain(tree.depth) if drawn else tree
    tested = tree if drawn else Sampled((1,) * own_tree(tree).depth)
    return {
        "coupled": DraftMethod(drafter, guessed, acceptance="match", coupled=True),
        "uncoupled": DraftMethod(drafter, guessed, acceptance="match", coupled=False),
        "rejection": DraftMethod(drafter, tested, acceptance="rejection", coupled=False),
    }


def measure_drafting(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    alone: list[list[int]],
    generation: GenerationSettings,
) -> dict[str, Drafting]:
    """Return the `drafting` section of results.json: the three ways on the same prompts.

    `alone` is the output of `write_alone` with the same limit and sampling.
    """
    methods = sampling_methods(drafter, generation.tree or policies.chain(drafter.depth))
    decoded = {
        name: decode_prompts(base, drafter, prompts, method.settings(generation))
        for name, method in methods.items()
    }
    counts = {name: [one.counts for one in texts] for name, texts in decoded.items()}
    same = {
        name: [one.tokens == text for one, text in zip(texts, alone, strict=True)]
        # rejection samples from the base's distribution, but not the same tokens
        if methods[name].acceptance == "match"
        else []
        for name, texts in decoded.items()
    }
    return {
        name: Drafting(
            **asdict(rate(counts[name])),
            tree=method.tree.name,
            num_nodes=method.tree.num_nodes,
            compared=len(same[name]),
            identical=sum(same[name]),
            gain_of_coupled=(
                None if name == "coupled" else paired_gain(counts["coupled"], counts[name])
            ),
        )
        for name, method in methods.items()
    }


# --- the methods that settings name ------------------------------------------------------------


def chosen(settings: Compare) -> list[str]:
    """Return the names of the methods; those with a draft model need the name of one."""
    if unknown := [name for name in settings.drafters if name not in DRAFTERS]:
        raise InputError(f"drafters must be among {', '.join(DRAFTERS)}, got {unknown[0]!r}")
    if (needing := set(settings.drafters) & {*OF_DRAFT_MODEL}) and not settings.draft_model:
        raise InputError(f"the drafter {min(needing)} needs a model: draft_model=FOLDER_OR_HUB_ID")
    named = [name for name in DRAFTERS if settings.draft_model or name not in OF_DRAFT_MODEL]
    return list(dict.fromkeys(settings.drafters)) or named


def load_draft_model(settings: Compare, base: FrozenBase, names: list[str]) -> FrozenBase | None:
    """Load the draft model in the base's dtype; None if no method needs it."""
    if not {*names} & {*OF_DRAFT_MODEL}:
        return None
    dtype = dtype_name(base.dtype)
    model = FrozenBase.load(settings.draft_model, dtype=dtype, device=str(base.device))
    refuse_vocabulary(model, base)
    return model


def evaluation_tree(
    base: FrozenBase,
    head: Head,
    settings: EvaluationConfig,
    generation: GenerationSettings,
    context: int,
) -> tuple[policies.TreePolicy, Tuned | None]:
    """Return the tree of the settings, and the measurements if it was chosen now."""
    if (tree := fixed_policy(head_depth=head.depth, **asdict(settings.tree))) is not None:
        return tree, None
    return choose_tree(
        base,
        head,
        settings.data,
        generation,
        context,
        prompt_tokens=settings.evaluation.prompt_tokens,
        num_prompts=settings.evaluation.tune_prompts,
    )


@dataclass(frozen=True, slots=True)
class MethodFactory:
    """Make the methods of a comparison for one base and one condition."""

    base: FrozenBase
    heads: Mapping[str, Head]
    """Heads by name; a single one is called `head`."""
    trees: Mapping[str, policies.TreePolicy]
    """Each head's own tree, without prompt-lookup tokens."""
    settings: Compare
    evaluated: EvaluationConfig
    model: FrozenBase | None
    """The draft model."""

    @classmethod
    def of(
        cls,
        base: FrozenBase,
        heads: Mapping[str, Head],
        settings: Compare,
        evaluated: EvaluationConfig,
        model: FrozenBase | None,
        context: int,
    ) -> "MethodFactory":
        """Choose a tree for each head that a method uses, at this context length."""
        needs_tree = {"head", "hybrid"} & {*chosen(settings)}
        generation = generation_settings(evaluated.evaluation, evaluated.seed)
        trees = {
            name: own_tree(evaluation_tree(base, head, evaluated, generation, context)[0])
            for name, head in heads.items()
            if needs_tree
        }
        return cls(base, heads, trees, settings, evaluated, model)

    def on(self, base: FrozenBase) -> "MethodFactory":
        """Return the same methods for a copy of the base, such as one in another dtype."""
        heads = {name: drafter_of(head, base) for name, head in self.heads.items()}
        return replace(self, base=base, heads=heads)

    def draft_methods(self) -> dict[str, DraftMethod]:
        """Return the methods in our loop.

        Above temperature zero a head drafts in all three ways if `other_ways` is set.
        """
        methods: dict[str, DraftMethod] = {}
        for name in chosen(self.settings):
            if name == "head":
                for called, head in self.heads.items():
                    methods[called] = DraftMethod(head, self.trees[called])
                    if self.settings.other_ways:
                        methods |= self._other_ways(called, head)
            elif name == "hybrid":
                for called, head in self.heads.items():
                    label = "hybrid" if called == "head" else f"{called}_hybrid"
                    methods[label] = self._hybrid(head, self.trees[called])
            elif name not in OF_TRANSFORMERS:
                methods[name] = self._untrained(name)
        return methods

    def methods(self) -> dict[str, Method]:
        """Return all methods, those of transformers included."""
        names = [name for name in chosen(self.settings) if name in OF_TRANSFORMERS]
        return {**self.draft_methods(), **{name: self._transformers(name) for name in names}}

    def _other_ways(self, called: str, head: Head) -> dict[str, DraftMethod]:
        """Return the ways to draft above temperature zero that the evaluation does not use."""
        evaluation = self.evaluated.evaluation
        others = sampling_methods(head, self.trees[called]) if evaluation.temperature > 0 else {}
        others.pop("coupled" if evaluation.coupled else "uncoupled", None)
        return {f"{called}_{name}": other for name, other in others.items()}

    def _lookup(self, copied: int) -> PromptLookup:
        base = self.base
        return PromptLookup(base.vocab_size, copied, max_ngram=MAX_NGRAM, device=base.device)

    def _hybrid(self, head: Head, tree: policies.TreePolicy) -> DraftMethod:
        # tokens that the head's tree contains leave room for as many more copied ones
        both = Hybrid(head, self._lookup(COPIED_TOKENS + tree.depth))
        return DraftMethod(both, HybridTree(tree, COPIED_TOKENS))

    def _untrained(self, name: str) -> DraftMethod:
        settings, depth = self.settings, self.settings.draft_depth
        if name == "prompt_lookup":
            return DraftMethod(self._lookup(COPIED_TOKENS), Lookup(COPIED_TOKENS))
        if name == "streaming":
            own = Streaming(self.base, depth, sinks=SINKS, window=settings.window)
            return DraftMethod(own, policies.chain(depth))
        assert self.model is not None
        return DraftMethod(DraftModel(self.model, depth, self.base), policies.chain(depth))

    def _transformers(self, name: str) -> "TransformersMethod":
        if name == "transformers_lookup":
            return TransformersMethod(prompt_lookup_num_tokens=COPIED_TOKENS)
        if name == "transformers_assisted":
            assert self.model is not None
            return TransformersMethod(assistant_model=self.model.model)
        return TransformersMethod()


# --- transformers' own generation --------------------------------------------------------------


@dataclass(slots=True)
class _Watch(BaseStreamer):
    """Record the base's forwards in a call of `generate`, and the tokens that each gave."""

    read: list[int] = field(default_factory=list)
    """Tokens of a row that each forward read."""
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """Tokens of the prompt, followed by those that each forward gave."""

    def put(self, value: torch.Tensor) -> None:
        """Record the tokens of a forward."""
        self.given.append(value.numel())

    def end(self) -> None:
        """Record nothing."""

    @contextmanager
    def forwards(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the forwards of a model."""

        def before(_: Any, __: Any, inputs: dict[str, Any]) -> None:
            self.read.append(inputs["input_ids"].shape[1])
            self.began.append(time.perf_counter())

        def after(*_: Any) -> None:
            self.ended.append(time.perf_counter())

        hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class TransformersMethod:
    """Decode with transformers' `generate` and these keyword arguments.

    Without arguments it takes a whole batch. With `assistant_model=` or
    `prompt_lookup_num_tokens=` it takes one prompt at a time, because transformers cannot batch
    there. Above temperature zero its text is another sample.
    """

    tree = policies.NOTHING

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.batches = arguments, not arguments

    def decode(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> list[Decoded]:
        """Decode every prompt and count its forwards after the one that reads the prompt."""
        each = each_prompt(generation.sampling, len(prompts))
        sources = generation.sources_of(prompts)
        if self.batches:
            size = generation.batch_size
            texts = [
                text
                for first in range(0, len(prompts), size)
                for text in self._call(base, prompts[first : first + size], generation, each[first])
            ]
            return [
                Decoded(text, DepthCounts(len(text) - 1, [], [], source))
                for text, source in zip(texts, sources, strict=True)
            ]
        watched, texts = [], []
        for prompt, one in zip(prompts, each, strict=True):
            watch = _Watch()
            with watch.forwards(base.model):
                texts += self._call(base, [prompt], generation, one, watch)
            watched.append(watch)
        depth = max((read - 1 for watch in watched for read in watch.read[1:]), default=0)
        counts = [_count(*pair, depth) for pair in zip(watched, sources, strict=True)]
        return [Decoded(*pair) for pair in zip(texts, counts, strict=True)]

    def time(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> Timing:
        """Decode prompts once and time it: together, or one by one if it cannot batch."""
        units = [prompts] if self.batches else [[prompt] for prompt in prompts]
        total = Timing(0.0, 0.0, 0, 0, 0)
        for unit in units:
            watch = _Watch()
            synchronise(base.device)
            start = time.perf_counter()
            with watch.forwards(base.model):
                texts = self._call(base, unit, generation, generation.sampling)
            synchronise(base.device)
            total.seconds += time.perf_counter() - start
            total.step_seconds += watch.ended[-1] - watch.ended[0]
            total.num_steps += len(watch.ended) - 1
            total.new_tokens += sum(map(len, texts))
            total.forwards += len(unit) * (len(watch.ended) - 1)
        return total

    def draft_seconds(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> float:
        """Return the median time between two forwards of the base; 0 if nothing drafts."""
        if self.batches:
            return 0.0
        watch = _Watch()
        with watch.forwards(base.model):
            self._call(base, prompts[:1], generation, generation.sampling)
        gaps = zip(watch.ended, watch.began[1:], strict=False)
        return statistics.median([began - ended for ended, began in gaps] or [0.0])

    def _call(
        self,
        base: FrozenBase,
        prompts: list[list[int]],
        generation: GenerationSettings,
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of one call, cut after the first end-of-text token."""
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ends = base.eos_ids if generation.stop_at_eos else ()
        hidden = without_generation_config(base.model)
        with torch.random.fork_rng(), torch.inference_mode(), hidden:
            torch.manual_seed(sampling.seed)
            out: Any = base.model.generate(  # pyright: ignore[reportCallIssue]
                torch.tensor(padded, device=base.device),
                attention_mask=torch.tensor(mask, device=base.device),
                generation_config=_config(generation.max_new_tokens, sampling, ends),
                streamer=streamer,
                **self.arguments,
            )
        return [_cut(row, ends) for row in out[:, width:].tolist()]


def _config(max_new_tokens: int, sampling: Sampling, ends: tuple[int, ...]) -> GenerationConfig:
    """Return the generation settings as a transformers `GenerationConfig`."""
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawn = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        **drawn,
    )


def _cut(text: list[int], ends: tuple[int, ...]) -> list[int]:
    first = next((place for place, token in enumerate(text) if token in ends), len(text))
    return text[: first + 1]


def _count(watch: _Watch, source: str, depth: int) -> DepthCounts:
    """Count the forwards after the first, which reads the prompt and drafts as well."""
    counts = DepthCounts.zeros(depth, source)
    for read, given in zip(watch.read[1:], watch.given[2:], strict=True):
        counts.add(given - 1, drafted_beyond=read > given)
    return counts
